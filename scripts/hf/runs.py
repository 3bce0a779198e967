"""One run of a case, plain or offloaded, and what two of them differ in."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

import lt_offload
from lt_offload.errors import InfeasibleError, OverBudget
from lt_offload.machine import driver
from scripts.attack.compared import Ended
from scripts.hf.cases import OF_BITSANDBYTES, Make
from tests import fake_cuda

BUDGETS = ("tight", "middle", "resident", "recompute")
"""The smallest one, 2/5 of the way to that in which all stays, more than that, and the smallest without offloading."""
_MIDDLE = 0.4
_SPARE = 6 << 20
_OURS = ("step_s", "step_vs_plan", "device_peak_gb", "host_peak_gb", "tokens_per_s")
_CLOCKS = ("runtime", "per_second", "preparation_time", "total_flos", "train_loss")
"""What differs from run to run, or counts what this call has trained only."""


def ended(trainer: Any) -> Ended:
    """Return what a training by ``trainer`` leaves; seen is everything that it logged but times."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    run = getattr(trainer, "offmate", None)
    logs = [_without_times(record) for record in trainer.state.log_history]
    return Ended.of(trainer.model, optimizer, {"logs": logs}, run.plan if run is not None else None)


def _without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in an order of its own: that of one which was stored is another."""
    names = (name for name in sorted(record) if name not in _OURS and not any(clock in name for clock in _CLOCKS))
    return {name: record[name] for name in names}


def train(make: Make, folder: Path, context: Any = None, **options: Any) -> Any:
    """Train, and return the Trainer."""
    with quiet(), context or nullcontext():
        trainer = make(folder)
        trainer.remove_callback(PrinterCallback)
        trainer.train(**options)
    return trainer


@cache
def least(make: Make, folder: Path, **settings: Any) -> int:
    """Return the smallest budget that there is a plan for, and on a GPU a first step that shows it."""
    with quiet(), lt_offload.hf_trainer(**settings):
        trainer = make(folder)
    context = driver.context_bytes(trainer.args.device) if torch.cuda.is_available() else 0
    memory = 1 + context * 21 // 20
    while True:
        trainer.offmate.settings = replace(trainer.offmate.settings, memory=memory)
        try:
            with quiet():
                trainer.train()
        except InfeasibleError as error:
            # Where what the context takes is measured anew, it may be another page or two; the fake GPU's never is.
            spare = 0 if not torch.cuda.is_available() or fake_cuda.enabled() else _SPARE
            return (error.needed_bytes or 0) + spare
        except OverBudget:
            if not torch.cuda.is_available():
                raise
            memory += memory // 8
        else:
            assert memory > 1, "a byte was enough"
            return memory


@cache
def resident(make: Make, folder: Path) -> Ended:
    """Return what a run leaves in which everything stays on the device."""
    return ended(train(make, folder, _resident()))


def _resident() -> Any:
    return lt_offload.hf_trainer(memory="8GB", planner="resident", host_update=False)


def offloaded(make: Make, budget: str, folder: Path, least_bytes: int = 0) -> Any:
    """Return the context of a run with one of :data:`BUDGETS`, of ``least_bytes`` at least."""
    if budget == "resident":
        return _resident()
    settings = {"activation_offload": False} if budget == "recompute" else {}
    if make in OF_BITSANDBYTES and torch.cuda.is_available():  # bitsandbytes' kernels for the CPU give other bits
        settings["host_update"] = False
    memory = least(make, folder, **settings)
    if budget == "middle":
        memory += int(_MIDDLE * max(0, resident(make, folder).plan.predicted.device_peak_bytes - memory))
    return lt_offload.hf_trainer(memory=max(memory, least_bytes), **settings)


def trained(make: Make, budget: str, folder: Path) -> Any:
    """Return the Trainer of a run with one of :data:`BUDGETS`; with more, if it needs more later."""
    needed = 0
    while True:
        try:
            return train(make, folder, offloaded(make, budget, folder, needed))
        except InfeasibleError as error:  # a later batch is larger, or weights are unfrozen
            if (error.needed_bytes or 0) <= needed:
                raise
            needed = error.needed_bytes or 0
        except OverBudget:
            if not torch.cuda.is_available():
                raise
            needed = (needed or least(make, folder)) * 9 // 8  # that batch has to fit on a GPU when it shows something


def within(make: Make, budget: str, folder: Path) -> Ended:
    """Return what a run leaves with one of :data:`BUDGETS`."""
    return resident(make, folder) if budget == "resident" else ended(trained(make, budget, folder))


def compare(make: Make, budget: str, folder: Path, plain: Ended | None = None) -> tuple[Ended, list[str]]:
    """Return what an offloaded run leaves, and what is not as after a plain one, or as the budget is meant."""
    plain = plain or ended(train(make, folder))
    found = within(make, budget, folder)
    return found, [*plain.differs(found), *["nothing travels"] * (budget == "tight" and not found.travels)]


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what libraries say about models as small as these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextmanager
def home(model: bool = True) -> Iterator[Path]:
    """Yield a folder, with TRL's model in it."""
    from tests.support import tiny

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if model:
            (folder / "model").mkdir()
            tiny.model(folder / "model", chat=True, tie_word_embeddings=False, num_hidden_layers=3)
        yield folder
