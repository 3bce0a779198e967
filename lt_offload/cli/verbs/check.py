"""``lt-finetune check``: every setting, without data, weights or a GPU."""

from __future__ import annotations

from lt_offload.cli.app import App
from lt_offload.cli.preflight import check_early
from lt_offload.finetune import load
from lt_offload.finetune.data.batches.streaming import check_end
from lt_offload.finetune.module import check_data


def check(app: App) -> int:
    """Check every setting, without data, weights or a GPU.

    Args:
        app: the settings.
    """
    check_early(app)
    if app.datamodule.streaming:
        check_end(app.trainer)
    if app.model.architecture is not None:
        config = load.load_config(app.model.name, app.model.architecture)
        check_data(config, max_length=app.datamodule.max_length)
        app.model.check_packing(config, app.datamodule)
    print(f"{app.recipe}: every setting is known and of the right type")
    return 0
