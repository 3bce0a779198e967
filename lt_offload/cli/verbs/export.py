"""``lt-finetune export``: a model folder that Hugging Face reads."""

from __future__ import annotations

from lt_offload.cli.app import App
from lt_offload.cli.early import check_early
from lt_offload.strategy.checkpoint import files as checkpoint
from lt_offload.strategy.checkpoint.foreign import check_weights


def export(app: App, *, output: str, ckpt_path: str | None = None, merge: bool = True) -> int:
    """Write a model folder that Hugging Face's from_pretrained reads.

    Args:
        app: the settings.
        output: the folder; must not exist or be empty.
        ckpt_path: checkpoint to export; the pretrained model if not given.
        merge: merge adapters into the weights; otherwise the adapters alone are written.
    """
    from lt_offload.finetune.export import check_target
    from lt_offload.finetune.export import export as write

    target = check_target(output)
    check_early(app, ckpt_path)
    module = app.model
    module.configure_model()
    if ckpt_path is not None:
        state = checkpoint.load(ckpt_path, weights_only=True)["state_dict"]
        check_weights(state, module.state_dict())
        module.load_state_dict(state)
    print(write(module.model, app.datamodule.tokenizer, target, merge=merge))
    return 0
