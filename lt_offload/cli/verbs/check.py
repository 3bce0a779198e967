"""``lt-finetune check``, and the part of it with which all verbs begin, before data are read and models loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from lt_offload.cli.verbs.plan import configuration
from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.data.batches import check_end
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.terminal import clear
from lt_offload.finetune.weights.left_out import take_up
from lt_offload.model.blocks import find_blocks
from lt_offload.plan.settings import Settings
from lt_offload.resources import is_dir, is_file, user_path
from lt_offload.strategy.checkpoint import files as checkpoint
from lt_offload.strategy.checkpoint.foreign import check_checkpoint, check_weights
from lt_offload.strategy.windows import settings_from_trainer

if TYPE_CHECKING:
    from lt_offload.cli.app import App


def check(app: App) -> int:
    """Check every setting, without data, weights or a GPU.

    Args:
        app: the settings.
    """
    if app.datamodule.streaming:
        check_end(app.trainer)
    if app.model.architecture is not None or is_dir(user_path(app.model.name)):
        config = configuration(app)
        # Names of layers, of adapters' targets and of trained weights are those of a model, which takes no memory here.
        with torch.device("meta"):
            model = app.model.prepare(AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]
            if hasattr(app.trainer.strategy, "blocks"):
                find_blocks(model, app.trainer.strategy.blocks)
    if is_dir(user_path(app.datamodule.tokenizer_name)):
        _ = app.datamodule.encoder  # the chat template is there, and fits
    clear()
    print(f"{app.recipe}: every setting is known and of the right type")
    return 0


def check_early(app: App, ckpt_path: str | None = None, *, resume: bool = False, reads_data: bool = True) -> None:
    """Raise ``ConfigError`` for files and folders that do not fit the settings.

    ``ckpt_path`` will be loaded, and with ``resume`` training goes on from it. Without ``reads_data`` there need be no
    data: a run folder may have been copied to a machine without them.
    """
    data = app.datamodule
    if isinstance(settings := getattr(app.trainer.strategy, "settings", None), Settings):
        settings_from_trainer(settings, app.trainer)
    if reads_data:
        data.check_paths()
    load.check_name(app.model.name)  # what has to be converted is not, yet
    if is_dir(user_path(app.model.name)) and app.model.architecture is None:
        load.load_config(app.model.name)
    if is_dir(user_path(data.tokenizer_name)):
        load.load_tokenizer(data.tokenizer_name)
    if ckpt_path is not None:
        _check_file(app.model, ckpt_path, resume=resume)


def _check_file(module: FineTune, path: str, *, resume: bool) -> None:
    if not (is_file(path) or is_dir(path)):
        raise ConfigError(f"ckpt_path={path!r} does not exist; give a .ckpt file that a Trainer has written")
    content: Any = checkpoint.load(path, weights_only=True)
    check_checkpoint(content, path)
    if resume and "optimizer_states" not in content:
        raise ConfigError(
            f"ckpt_path={path!r} has weights only, no optimizer states; give one that was written while training"
        )
    if resume:
        module.check_continues(content)
    if module.quantize is not None:
        return  # four bits are made of numbers, which a model on meta has not: what does not fit is said when loading
    # The model without memory for its weights: names and shapes are enough, and there within a second.
    with torch.device("meta"):
        skeleton = module.build(init="random")
    names = {f"model.{name}": tensor for name, tensor in skeleton.state_dict().items()}
    check_weights(take_up(content, skeleton, name=module.name), names)
