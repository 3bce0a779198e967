"""What callbacks read and write between steps, optimizer states included, and other plans that take over."""

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


# -- weights and states ------------------------------------------------------------------------------------------------


class ReadsStates(Reads):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.keep(*list(pl_module.parameters())[::5])
        states = [trainer.optimizers[0].state[p] for p in list(pl_module.parameters())[::7]]
        self.keep(*[state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")])
        self.keep(*list(pl_module.state_dict().values())[::9])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.keep(pl_module.model.model.norm.weight, pl_module.model.lm_head.weight)


@in_both_ways
def test_reading_weights_and_states(way: str, bench: Bench) -> None:
    assert len(compared(bench, way, ReadsStates)) > 100


class KeepsOnTheHost(Reads):
    """Keeps the last weights and states as scripts for a GPU do it: what comes to the host is a copy."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen += [value.cpu() for value in list(pl_module.state_dict().values())[::3]]
        self.seen += [p.detach().to("cpu", non_blocking=True) for p in list(pl_module.parameters())[::5]]
        self.seen += [torch.from_numpy(p.numpy(force=True)) for p in list(pl_module.parameters())[::7]]
        self.seen += [state["exp_avg"].cpu() for state in list(trainer.optimizers[0].state.values())[::9]]


@in_both_ways
def test_what_is_brought_to_the_host_is_a_copy(way: str, bench: Bench) -> None:
    if bench.device.type == "cpu":
        pytest.skip("there it is the tensor itself, in plain PyTorch, too")
    assert len(compared(bench, way, KeepsOnTheHost)) > 100


class WritesStates(Callback):
    """Changes weights and states between steps, in place and by assignment, where they are and from elsewhere."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        layers = pl_module.model.model.layers
        with torch.no_grad():
            layers[1].mlp.up_proj.weight.mul_(0.9)
            weight = layers[5].self_attn.q_proj.weight
            weight.copy_(torch.full(weight.shape, 0.01))
            # Where they are already no copy is made, so that these writes count.
            for written in (layers[2].mlp.up_proj.weight, trainer.optimizers[0].state[weight]["exp_avg"]):
                written.to(written.device).mul_(0.9)
                written.to(weight).mul_(0.9)
        layers[3].mlp.down_proj.weight.data = layers[3].mlp.down_proj.weight.data * 0.5
        state = trainer.optimizers[0].state[layers[6].mlp.gate_proj.weight]
        state["exp_avg"].mul_(0.5)
        state["step"].add_(1)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] *= 0.5


@in_both_ways
def test_writing_weights_and_states(way: str, bench: Bench) -> None:
    compared(bench, way, WritesStates)


# -- weights that thaw -------------------------------------------------------------------------------------------------


class Thaws(Callback):
    """Trains the upper half first, and everything from the second epoch on."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.model.model.layers[:4].requires_grad_(False)
        pl_module.model.model.embed_tokens.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.requires_grad_(True)


@in_both_ways
def test_thawing_in_the_middle(way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        made = module()
        made.configure_optimizers = lambda: torch.optim.AdamW(made.parameters(), lr=1e-2, fused=True)
        return bench.fit(strategy, made, callbacks=[Thaws()], max_epochs=3)

    assert differences(*bench.compare(way, scene)) == []
