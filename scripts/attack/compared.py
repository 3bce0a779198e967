"""Trainings of one thing, plain and within budgets: how each ends, and what it differs in from plain training."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.errors import InfeasibleError, OffloadError, OverBudget
from lt_offload.machine import driver
from tests import fake_cuda
from tests.support.engines import same_state

BUDGETS = ("smallest", "middle", "resident", "recomputing")
"""The smallest one that is named, 2/5 of the way to that in which all stays, that one, and the smallest one again if
activations do not travel."""

ROOM = 1 << 30
_MIDDLE = 0.4


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a training leaves."""

    seen: dict[str, list[Any]]
    weights: dict[str, Tensor]
    states: list[dict[str, Any]]
    generator: Tensor
    plan: Any

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer, seen: dict[str, list[Any]], plan: Any) -> Ended:
        """Copy it to the host."""
        states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
        return cls(
            seen=seen,
            weights={name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()},
            states=[{k: _copied(v) for k, v in state.items()} for state in states],
            generator=torch.get_rng_state(),
            plan=plan,
        )

    @property
    def travels(self) -> bool:
        """True if the plan copies anything."""
        return any(op.lane in ("h2d", "d2h") for op in self.plan.ops)

    def differs(self, other: Ended) -> list[str]:
        """Return what is not the same, bit for bit."""
        found = []
        for name in sorted(self.seen.keys() | other.seen.keys()):
            mine, theirs = self.seen.get(name, []), other.seen.get(name, [])
            if not same_state(mine, theirs):
                pairs = enumerate(zip(mine, theirs, strict=False))
                first = next((i for i, pair in pairs if not same_state(*pair)), min(len(mine), len(theirs)))
                found.append(f"{name} from number {first} on, of {len(mine)} and {len(theirs)}")
        if self.weights.keys() != other.weights.keys():
            return [*found, "other weights"]
        weights = [name for name in self.weights if not same_state(self.weights[name], other.weights[name])]
        if weights:
            found.append(f"{len(weights)} of {len(self.weights)} weights, {weights[0]} first")
        states = sum(not same_state(a, b) for a, b in zip(self.states, other.states, strict=True))
        found += [f"{states} of {len(self.states)} states"] * bool(states)
        return found + ["the generator"] * (not torch.equal(self.generator, other.generator))


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


Train = Callable[[dict[str, Any] | None], Ended]
"""Trains plainly, or within a budget if it is given the settings of that."""


@contextmanager
def no_failed_kernels() -> Iterator[None]:
    """Enclose a training; raises ``RuntimeError`` at its end if a kernel of the fake GPU has failed."""
    before = _failed_kernels()
    yield
    if _failed_kernels() > before:
        raise RuntimeError("a kernel has failed after its launch")


def _failed_kernels() -> int:
    if not fake_cuda.enabled():
        return 0
    from tests.fake_cuda import runtime

    return runtime.failed()


def smallest(train: Train, **switches: Any) -> int:
    """Return the smallest memory that is named where there is none."""
    context = driver.context_bytes(torch.device("cuda")) if torch.cuda.is_available() else 0
    memory = 1000 + context * 21 // 20
    while True:
        try:
            train({"memory": memory, **switches})
        except InfeasibleError as error:
            if error.needed_bytes is not None:
                return error.needed_bytes
            raise
        except OverBudget:  # the first step has to fit on a GPU when it shows something
            if not torch.cuda.is_available():
                raise
            memory += memory // 8
        else:
            raise AssertionError(f"{memory} bytes were enough")


@dataclass(frozen=True)
class Found:
    """What became of a training within a budget."""

    budget: str
    outcome: str
    says: str = ""
    travels: bool = False
    """Whether the plan copies anything."""


def attacked(train: Train, budgets: tuple[str, ...] = BUDGETS) -> Iterator[Found]:
    """Train plainly, and within each budget."""
    try:
        plain = train(None)
        steady = plain.differs(train(None))
    except Exception as error:
        steady = [_said(error)]
    if steady:
        yield Found("plain", "not run", "; ".join(steady))
        return
    least = peak = 0
    for budget in sorted(budgets, key=("smallest", "resident", "middle", "recomputing").index):
        named = False
        try:
            settings: dict[str, Any] = {"memory": ROOM, "planner": "resident"}
            if budget == "recomputing":
                settings = {"memory": smallest(train, activation_offload=False), "activation_offload": False}
            elif budget != "resident":
                least = least or smallest(train)
                settings = {"memory": least + int(_MIDDLE * max(0, peak - least)) * (budget == "middle")}
            named = True
            ended = train(settings)
        except Exception as error:
            yield Found(budget, _kind(error, named), _said(error) + (_enough(train, settings) if named else ""))
            continue
        peak = ended.plan.predicted.device_peak_bytes if budget == "resident" else peak
        differs = plain.differs(ended)
        yield Found(budget, "wrong" if differs else "equal", "; ".join(differs), ended.travels)


def _enough(train: Train, settings: dict[str, Any]) -> str:
    """Return in which memory a program trains that failed in what was named as enough."""
    for factor in (1.02, 1.05, 1.1, 1.2):
        try:
            train(settings | {"memory": int(settings["memory"] * factor)})
        except Exception:
            continue
        return f" [{factor} times as much is enough]"
    return ""


def _kind(error: Exception, named: bool) -> str:
    if not isinstance(error, OffloadError):
        return "foreign"
    return "over budget" if isinstance(error, (OverBudget, InfeasibleError) if named else OverBudget) else "refused"


def _said(error: Exception) -> str:
    """Return the error's sentence, and where it comes from if it is not ours."""
    at = "" if isinstance(error, OffloadError) else _place(error)
    return f"{type(error).__name__}: {error}"[:600] + at


def _place(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/lt_offload/" in f.filename]
    return f" (by lt_offload/{frames[-1].filename.rpartition('/lt_offload/')[2]}:{frames[-1].lineno})" if frames else ""
