"""``lt-finetune validate``: the loss on held-out data."""

from __future__ import annotations

from lt_offload.cli.app import App
from lt_offload.cli.early import check_early


def validate(app: App, *, ckpt_path: str | None = None) -> int:
    """Compute the loss on held-out data, streaming the weights.

    Args:
        app: the settings.
        ckpt_path: checkpoint to evaluate; the pretrained model if not given.
    """
    check_early(app, ckpt_path)
    app.trainer.validate(app.model, datamodule=app.datamodule, ckpt_path=ckpt_path, weights_only=True)
    return 0
