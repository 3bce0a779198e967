"""One run of a case, plain or offloaded, and what two of them differ in."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

import lt_offload
from lt_offload.errors import InfeasibleError, OverBudget
from lt_offload.machine import driver
from scripts.hf.cases import OF_BITSANDBYTES, Make
from tests import fake_cuda

BUDGETS = ("tight", "middle", "resident", "recompute")
"""The smallest one, 2/5 of the way to that in which all stays, more than that, and the smallest without offloading."""
_MIDDLE = 0.4
_SPARE = 6 << 20
_OURS = ("step_s", "step_vs_plan", "device_peak_gb", "host_peak_gb", "tokens_per_s")
_CLOCKS = ("runtime", "per_second", "preparation_time", "total_flos", "train_loss")
"""What differs from run to run, or counts what this call has trained only."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training leaves."""

    logs: list[dict[str, Any]]
    """Everything that it logged but times: of each step loss and gradient norm."""
    weights: Mapping[str, torch.Tensor]
    states: list[Mapping[str, Any]]
    generator: torch.Tensor
    peak: int = 0
    """Bytes of the device that its plan says."""
    travels: frozenset[str] = frozenset()
    """What its plan copies, or updates on the host."""

    @classmethod
    def of(cls, trainer: Any) -> Outcome:
        """Return that of ``trainer``."""
        optimizer = trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        run = getattr(trainer, "offmate", None)
        plan = run.plan if run is not None else None
        return cls(
            logs=[_without_times(record) for record in trainer.state.log_history],
            weights={name: tensor.detach().cpu().clone() for name, tensor in trainer.model.state_dict().items()},
            states=[_copied(optimizer.state.get(parameter, {})) for parameter in parameters],
            generator=torch.get_rng_state(),
            peak=plan.predicted.device_peak_bytes if plan is not None else 0,
            travels=frozenset(str(op.payload or op.kind) for op in plan.ops if op.lane != "compute")
            if plan is not None
            else frozenset(),
        )

    def differs(self, other: Outcome) -> list[str]:
        """Return what is not the same, bit for bit."""
        found = [
            f"{mine} is not {theirs}" for mine, theirs in zip(self.logs, other.logs, strict=False) if mine != theirs
        ][:1]
        if len(self.logs) != len(other.logs):
            found.append("other records")
        if self.weights.keys() != other.weights.keys():
            found.append("other weights")
        weights = [name for name in self.weights if not torch.equal(self.weights[name], other.weights[name])]
        if weights:
            found.append(f"{len(weights)} of {len(self.weights)} weights, {weights[0]} first")
        pairs = list(zip(self.states, other.states, strict=True))
        states = sum(not _same(mine, theirs) for mine, theirs in pairs)
        if states:
            found.append(f"{states} of {len(pairs)} states")
        return found if torch.equal(self.generator, other.generator) else [*found, "the generator"]


def _without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k not in _OURS and not any(clock in k for clock in _CLOCKS)}


def _copied(state: Mapping[str, Any]) -> Mapping[str, Any]:
    return {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _same(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return mine.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        for name, value in mine.items()
    )


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
def resident(make: Make, folder: Path) -> Outcome:
    """Return what a run leaves in which everything stays on the device."""
    return Outcome.of(train(make, folder, _resident()))


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
        memory += int(_MIDDLE * max(0, resident(make, folder).peak - memory))
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


def within(make: Make, budget: str, folder: Path) -> Outcome:
    """Return what a run leaves with one of :data:`BUDGETS`."""
    return resident(make, folder) if budget == "resident" else Outcome.of(trained(make, budget, folder))


def compare(make: Make, budget: str, folder: Path, plain: Outcome | None = None) -> tuple[Outcome, list[str]]:
    """Return what an offloaded run leaves, and what is not as after a plain one, or as the budget is meant."""
    plain = plain or Outcome.of(train(make, folder))
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
