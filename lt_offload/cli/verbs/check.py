"""``lt-finetune check``: every setting, without data, weights or a GPU."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from lt_offload.cli.app import App
from lt_offload.cli.preflight import check_early
from lt_offload.cli.verbs.plan import configuration
from lt_offload.finetune.data.batches.streaming import check_end
from lt_offload.resources import is_dir, user_path


def check(app: App) -> int:
    """Check every setting, without data, weights or a GPU.

    Args:
        app: the settings.
    """
    check_early(app)
    if app.datamodule.streaming:
        check_end(app.trainer)
    if app.model.architecture is not None or is_dir(user_path(app.model.name)):
        config = configuration(app)
        # Names of layers, of adapters' targets and of trained weights are those of a model, which takes no memory here.
        with torch.device("meta"):
            app.model.prepare(AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]
    if is_dir(user_path(app.datamodule.tokenizer_name)):
        _ = app.datamodule.encoder  # the chat template is there, and fits
    print(f"{app.recipe}: every setting is known and of the right type")
    return 0
