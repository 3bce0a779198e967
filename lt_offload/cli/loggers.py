"""Loggers of a run's metrics: a CSV file and TensorBoard in the run folder, and Weights & Biases if asked for."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lt_offload.errors import ConfigError


def loggers(chosen: Any, folder: Path, wandb: str | None) -> list[Logger] | bool:
    """Return the loggers of a run: those that ``trainer.logger`` has ``chosen``, and the project ``wandb``, if any.

    Raises ``ConfigError`` if its package is not installed, or all logging is switched off.
    """
    if chosen in (None, True):
        wanted: list[Logger] = [
            # Empty names: else each logger puts folders of its own between. Flushed at every
            # record, which comes seldom, so that a run that is killed has its curve.
            CSVLogger(str(folder), name="", version="", flush_logs_every_n_steps=1),
            TensorBoardLogger(str(folder / "tensorboard"), name="", version=""),
        ]
    elif chosen is False:
        wanted = []
    else:
        wanted = list(chosen) if isinstance(chosen, list) else [chosen]
    if wandb is None:
        return wanted or False
    if not wanted:
        raise ConfigError(f"--wandb {wandb} logs, and trainer.logger=false does not; leave one of them out")
    return [*wanted, _wandb(wandb, folder)]


def _wandb(project: str, folder: Path) -> Logger:
    """Return the logger; with WANDB_MODE=offline it needs no network, and its files can be sent later."""
    if not project.strip():
        raise ConfigError("--wandb: the name of the project is empty; give one, or --wandb alone")
    if find_spec("wandb") is None:
        raise ConfigError(f"--wandb {project} needs the package wandb: pip install wandb")
    from lightning.pytorch.loggers import WandbLogger

    offline = os.environ.get("WANDB_MODE") == "offline"
    return WandbLogger(project=project, name=folder.resolve().name, save_dir=str(folder), offline=offline)
