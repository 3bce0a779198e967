"""``lt-finetune validate``: the loss on held-out data."""

from __future__ import annotations

import math

from lt_offload.cli.app import App
from lt_offload.cli.preflight import check_early
from lt_offload.errors import ConfigError
from lt_offload.finetune.processes import is_first
from lt_offload.finetune.terminal import clear, status


def validate(app: App, *, ckpt_path: str | None = None) -> int:
    """Compute the loss on held-out data, streaming the weights.

    Args:
        app: the settings.
        ckpt_path: checkpoint to evaluate; if not given, the newest one of a run folder, else the pretrained model.
    """
    check_early(app, ckpt_path)
    status("reading data, loading the model")
    # Lightning returns no list of results at all where there is nothing to validate on.
    [metrics] = app.trainer.validate(
        app.model, datamodule=app.datamodule, ckpt_path=ckpt_path, weights_only=True, verbose=False
    ) or [{}]
    clear()
    if "val_loss" not in metrics:
        raise ConfigError("there is nothing to validate on; set data.validation_path, or data.validation_share above 0")
    if is_first():
        print(f"val_loss {metrics['val_loss']:.6f}  (perplexity {math.exp(min(metrics['val_loss'], 700.0)):.4g})")
    return 0
