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
from lt_offload.errors import InfeasibleError
from scripts.hf.cases import Make

BUDGETS = ("tight", "middle", "resident", "recompute")
"""The smallest one, a third more, more than anything needs, and the smallest with which no activation travels."""
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

    @classmethod
    def of(cls, trainer: Any) -> Outcome:
        """Return that of ``trainer``."""
        optimizer = trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        run = getattr(trainer, "offmate", None)
        return cls(
            logs=[_without_times(record) for record in trainer.state.log_history],
            weights={name: tensor.detach().cpu().clone() for name, tensor in trainer.model.state_dict().items()},
            states=[_copied(optimizer.state.get(parameter, {})) for parameter in parameters],
            generator=torch.get_rng_state(),
            peak=run.plan.predicted.device_peak_bytes if run is not None else 0,
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
    """Return the smallest budget that there is a plan for."""
    with quiet(), lt_offload.hf_trainer(**settings):
        trainer = make(folder)
    trainer.offmate.settings = replace(trainer.offmate.settings, memory=1)
    try:
        with quiet():
            trainer.train()
    except InfeasibleError as error:
        return error.needed_bytes or 0
    raise AssertionError("a byte was enough")


def offloaded(make: Make, budget: str, folder: Path) -> Any:
    """Return the context of a run with one of :data:`BUDGETS`."""
    if budget == "resident":
        return lt_offload.hf_trainer(memory="8GB")
    settings = {"activation_offload": False} if budget == "recompute" else {}
    memory = least(make, folder, **settings)
    if torch.cuda.is_available():  # where what the context takes is measured anew
        memory += memory // 50
    return lt_offload.hf_trainer(memory=memory * 4 // 3 if budget == "middle" else memory, **settings)


def compare(make: Make, budget: str, folder: Path, plain: Outcome | None = None) -> tuple[Outcome, list[str]]:
    """Return what an offloaded run leaves, and what is not as after a plain one."""
    plain = plain or Outcome.of(train(make, folder))
    found = Outcome.of(train(make, folder, offloaded(make, budget, folder)))
    return found, plain.differs(found)


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
