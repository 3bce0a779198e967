"""What callbacks read and write between steps, and another plan that takes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lt_offload import OffmateStrategy
from lt_offload.execute.engine import Engine
from lt_offload.plan import simulate
from lt_offload.plan.correct import timed
from lt_offload.strategy.metrics import LossCheck
from tests.gpu.target import ROOM
from tests.gpu.users.runs import USERS, Bench, check_way, in_both_ways, module
from tests.parity.lightning.test_replan import FAST_COPIES, SLOW_COPIES, paced
from tests.support.trainers import Run, differences, profiled

pytestmark = [*USERS, pytest.mark.usefixtures("planned_once")]


@pytest.mark.filterwarnings("ignore:.*loss of step . is not finite")
def test_losses_are_noted_where_they_are(bench: Bench) -> None:
    """A finite one, and then two that are not: nothing is read before somebody asks, and the first one stays."""
    check = LossCheck()
    for step, value in enumerate((1.0, float("nan"), 2.0, float("inf")), start=1):
        check.note({"loss": torch.tensor(value, device=bench.device, requires_grad=True)}, step)
        assert (check.first, check.is_finite) == (2 if step > 1 else 0, step % 2 == 1)
    made = module()
    step = made.training_step
    made.training_step = lambda batch, batch_idx: (
        step(batch, batch_idx) * (float("nan") if made.global_step == 2 else 1)
    )
    with pytest.warns(UserWarning, match="the loss of step 3 is not finite"):
        bench.fit(OffmateStrategy(memory=ROOM, planner="resident", **bench.options), made, log_every_n_steps=2)


class Reads(Callback):
    """Keeps copies of what hooks see."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def keep(self, *tensors: Tensor) -> None:
        self.seen += [tensor.detach().cpu().clone() for tensor in tensors]


def run_with(bench: Bench, make: Callable[[], Any], **settings: Any) -> Callable[[Any], tuple[Run, list[Tensor]]]:
    """Return a scene with the callback that ``make`` gives, and what it has seen."""

    def scene(strategy: Any) -> tuple[Run, list[Tensor]]:
        callback = make()
        return bench.fit(strategy, callbacks=[callback], **settings), getattr(callback, "seen", [])

    return scene


def compared(bench: Bench, way: str, make: Callable[[], Any], **settings: Any) -> list[Tensor]:
    """Compare runs with a callback, and return what it has seen."""
    (stock, expected), (ours, found) = bench.compare(way, run_with(bench, make, **settings))
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    assert differences(stock, ours) == []
    return found


class ReadsGradients(Reads):
    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self.look)

    def look(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.keep(*[p.grad for p in pl_module.parameters() if p.grad is not None])


@in_both_ways
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_reading_gradients(hook: str, way: str, bench: Bench) -> None:
    assert len(compared(bench, way, lambda: ReadsGradients(hook))) > 100


class WritesGradients(Callback):
    """Noise on some gradients, another scale for the rest, none for a layer: as recipes for training do it."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.change)

    def change(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for index, parameter in enumerate(pl_module.parameters()):
            if parameter.grad is None:
                continue
            if index % 3 == 0:
                parameter.grad.mul_(0.5)
            elif index % 3 == 1:
                parameter.grad.add_(1e-3)
        pl_module.model.model.layers[2].mlp.up_proj.weight.grad.zero_()


@in_both_ways
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_writing_gradients(hook: str, way: str, bench: Bench) -> None:
    compared(bench, way, lambda: WritesGradients(hook))


# -- another plan takes over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "true"), [(SLOW_COPIES, FAST_COPIES), (FAST_COPIES, SLOW_COPIES)])
def test_a_better_plan_takes_over(
    wrong: dict[str, float], true: dict[str, float], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = Engine.install
    engines: list[int] = []

    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, module(dropout=0.1), max_epochs=4)

    def trace(engine: Engine) -> Any:
        profile = paced(bench.profiles[-1], **true)
        assert engine.plan is not None
        return simulate(timed(engine.plan, profile), profile)

    def installed(engine: Engine) -> None:
        engines.extend([1] * (engine.plan is not None))
        install(engine)

    profiled(monkeypatch, lambda measure, _: paced(measure(), **wrong))
    monkeypatch.setattr(Engine, "trace", trace)
    monkeypatch.setattr(Engine, "install", installed)
    expected = scene("auto")
    # Beside a GPU no update may change its place while a run trains: here all of them are on the device.
    strategy = bench.strategy("tight", scene, share=0.2, planner="offmate", host_update=False)
    found = scene(strategy)
    assert len(engines) == 2
    check_way("tight", strategy)
    assert differences(expected, found) == []
