"""A plan that was made from a wrong profile is corrected by the first iterations: the run's numbers stay the same.

What is measured is what the simulator says of the true profile, so that no clock decides.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lt_offload import OffmateStrategy
from lt_offload.execute import installed
from lt_offload.execute.engine import Engine
from lt_offload.plan import simulate
from lt_offload.plan.correct import timed
from lt_offload.plan.planners.baselines import smallest
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Contention, OptionProfile, Profile
from lt_offload.schema.trace import Trace
from lt_offload.strategy import replan
from tests import sampling
from tests.support.engines import equal
from tests.support.hostile.device import HostileDevice
from tests.support.trainers import Run, differences, fit, planned_once, profiled, seeded_module

EPOCHS = 3
FAST_COPIES = {"h2d": 0.5, "d2h": 0.5, "host": 0.5, "device": 20.0}
SLOW_COPIES = {"h2d": 20.0, "d2h": 20.0, "host": 20.0, "device": 0.5}
SHARED = Contention(compute=0.1, h2d=0.5, d2h=0.5, host=0.9)
"""The same in every run: one that is measured says how busy the machine was."""
AGAIN = {"recompute": 1.0, "reload": 1.0, "mixed": 0.4}
TIGHT, MIDDLE = 1.5, 2.5
"""Parts of the least memory that the model can be trained with."""


def paced(profile: Profile, *, h2d: float, d2h: float, host: float, device: float, unit: float = 1.0) -> Profile:
    """Return ``profile`` with blocks of one or more seconds, and links and updates by seconds for all weights."""

    def option(old: OptionProfile) -> OptionProfile:
        return replace(old, forward_s=unit, backward_s=(2.0 + AGAIN.get(old.name, 0.0)) * unit)

    total = sum(tensor.bytes for tensor in profile.tensors)
    return replace(
        profile,
        blocks=tuple(
            replace(block, launch_s=0.0, options=tuple(map(option, block.options))) for block in profile.blocks
        ),
        hardware=replace(profile.hardware, h2d_bytes_per_s=total / h2d, d2h_bytes_per_s=total / d2h),
        optimizer=replace(profile.optimizer, host_bytes_per_s=total / host, device_bytes_per_s=total / device),
        contention=SHARED,
    )


class Machine:
    """Measures ``wrong`` before training, and in training what ``true`` would show; counts the engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, float], true: dict[str, float]) -> None:
        self.wrong, self.true = wrong, true
        self.engines = 0
        self.traces = 0
        install = Engine.install

        def installed(engine: Engine) -> None:
            self.engines += engine.plan is not None  # the first batch comes after one without a plan
            install(engine)

        profiled(monkeypatch, lambda *_: paced(sizes(), **wrong))
        planned_once(monkeypatch)
        monkeypatch.setattr(Engine, "install", installed)
        monkeypatch.setattr(replan, "_SHARE", 1e6)  # planning again may take as long as it does
        monkeypatch.setattr(Engine, "trace", lambda engine: self.trace(engine.plan))

    @property
    def profile(self) -> Profile:
        """The true one."""
        return paced(sizes(), **self.true)

    def trace(self, plan: Plan) -> Trace:
        self.traces += 1
        return simulate(timed(plan, self.profile), self.profile)


def module(**options: Any) -> Any:
    return seeded_module(layers=6, dropout=0.1, **options)


@functools.cache
def sizes() -> Profile:
    """The profile of the module's training step, measured once."""
    found = fit(OffmateStrategy(memory="200MB"), module(), max_steps=1).trainer.strategy.profile
    assert isinstance(found, Profile)
    return found


@pytest.fixture(scope="module")
def stock() -> Run:
    return fit("auto", module(), max_epochs=EPOCHS)


@pytest.fixture(scope="module")
def least() -> int:
    found = smallest(sizes(), [block.options for block in sizes().blocks], host_update=True, host_budget=None)
    assert found is not None
    return found.device_bytes


def train(memory: float, made: Any = None, epochs: int = EPOCHS, **settings: Any) -> Run:
    options = settings.pop("options", {})
    strategy = OffmateStrategy(memory=int(memory), planner="offmate", solver_time_limit=1000, **options)
    return fit(strategy, made or module(), max_epochs=epochs, **settings)


# -- another plan takes over -----------------------------------------------------------------------------------------


@pytest.mark.own_plan("the better plan runs fewer blocks again", share=TIGHT, hostile=False)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "wrong", "true", "hostile"),
    [
        pytest.param(TIGHT, SLOW_COPIES, FAST_COPIES, True, id="tight, hostile, states on the device at first"),
        pytest.param(MIDDLE, FAST_COPIES, SLOW_COPIES, True, id="middle, hostile"),
        *[
            pytest.param(TIGHT, FAST_COPIES, SLOW_COPIES, False, id="tight"),
            pytest.param(MIDDLE, SLOW_COPIES, FAST_COPIES, False, id="middle, states on the device at first"),
        ][: 2 * sampling.FULL],
    ],
)
def test_a_better_plan_takes_over_and_no_number_changes(
    share: float,
    wrong: dict[str, float],
    true: dict[str, float],
    hostile: bool,
    stock: Run,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if hostile:
        device = lambda budget, *_, **__: HostileDevice(budget, "lazy", check=True)  # noqa: E731
        monkeypatch.setattr(installed, "open_device", device)
    machine = Machine(monkeypatch, wrong, true)
    ours = train(share * least, options={"report_dir": tmp_path})
    assert differences(stock, ours) == []
    assert machine.engines == 2
    plan, profile = ours.trainer.strategy.plan, ours.trainer.strategy.profile
    assert plan.batch_size == profile.batch_size == 2
    assert plan.budget_bytes == int(share * least)
    # What reads in host memory shares the link: how long that lasts beside other copies is measured of another plan.
    assert plan.predicted.iteration_s == pytest.approx(machine.trace(plan).iteration_time, rel=0.05)
    assert any("corrected by measurement" in note for note in plan.notes)
    assert (Plan.load(tmp_path / "plan.json"), Profile.load(tmp_path / "profile.json")) == (plan, profile)
    monkeypatch.setattr(replan.Replanning, "due", lambda *_: False)
    assert differences(train(share * least), ours) == []


class Keeps(Callback):
    """Keeps references as users do, and changes a weight in the moment before another engine takes over."""

    def __init__(self, at: int, what: Callable[[Any, Any], Any]) -> None:
        self.at, self.what = at, what
        self.kept: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.at:
            self.kept = self.what(trainer, pl_module)


@pytest.mark.slow
def test_parameters_states_and_hooks_of_users_survive(stock: Run, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    made = module()
    made.model.model.layers[2].register_forward_hook(lambda *_: calls.append(1))
    machine = Machine(monkeypatch, FAST_COPIES, SLOW_COPIES)

    def look(trainer: Any, pl_module: Any) -> Any:
        states = trainer.optimizers[0].state
        return list(pl_module.parameters()), [value for state in states.values() for value in state.values()]

    keeps = Keeps(3, look)
    ours = train(MIDDLE * least, made, callbacks=[keeps])
    assert machine.engines == 2
    assert differences(stock, ours) == []
    parameters, values = keeps.kept
    assert all(a is b for a, b in zip(parameters, ours.module.parameters(), strict=True))
    now = [value for state in ours.optimizer.state.values() for value in state.values()]
    assert all(a is b for a, b in zip(values, now, strict=True))
    assert len(calls) == len(ours.module.losses) + len(ours.module.validation)


@pytest.mark.slow
def test_what_is_assigned_before_another_plan_takes_over_is_trained(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halve(trainer: Any, pl_module: Any) -> None:
        weight = pl_module.model.model.layers[1].mlp.up_proj.weight
        weight.data = weight.data * 0.5
        weight = pl_module.model.model.layers[4].mlp.up_proj.weight
        with torch.no_grad():
            weight.mul_(2.0)

    plain = fit("auto", module(), max_epochs=EPOCHS, callbacks=[Keeps(5, halve)])
    machine = Machine(monkeypatch, FAST_COPIES, SLOW_COPIES)
    ours = train(MIDDLE * least, callbacks=[Keeps(5, halve)])
    assert machine.engines == 2
    assert differences(plain, ours) == []


# -- the engine stays ------------------------------------------------------------------------------------------------


def test_whoever_holds_the_memory_of_weights_keeps_the_engine(
    stock: Run, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, FAST_COPIES, SLOW_COPIES)
    keeps = Keeps(3, lambda trainer, pl_module: pl_module.state_dict())
    ours = train(MIDDLE * least, callbacks=[keeps])
    assert machine.engines == 1
    assert differences(stock, ours) == []
    weights: dict[str, Tensor] = ours.module.state_dict()
    assert all(equal(keeps.kept[name], weights[name]) for name in weights)
    plan = ours.trainer.strategy.plan
    assert plan.predicted.iteration_s == pytest.approx(machine.trace(plan).iteration_time, rel=0.001)


@pytest.mark.slow
def test_where_no_plan_is_faster_only_the_prediction_changes(
    stock: Run, least: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = {"h2d": 1.0, "d2h": 1.0, "host": 1.0, "device": 1.0}
    machine = Machine(monkeypatch, wrong, dict.fromkeys(wrong, 3.0) | {"unit": 3.0})
    predicted: list[float] = []
    keeps = Keeps(3, lambda trainer, _: predicted.append(trainer.strategy.plan.predicted.iteration_s))
    ours = train(MIDDLE * least, callbacks=[keeps], options={"report_dir": tmp_path})
    assert machine.engines == 1
    assert differences(stock, ours) == []
    plan = ours.trainer.strategy.plan
    assert plan.predicted.iteration_s == pytest.approx(3 * predicted[0])
    assert 0 < plan.predicted.lower_bound_s <= plan.predicted.iteration_s
    assert Plan.load(tmp_path / "plan.json") == plan
    found, true = Profile.load(tmp_path / "profile.json"), machine.profile
    assert found.hardware.h2d_bytes_per_s == pytest.approx(true.hardware.h2d_bytes_per_s)
    assert found.blocks[2].option("keep").backward_s == pytest.approx(6.0)


def test_a_prediction_that_was_right_is_left_alone(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, FAST_COPIES, FAST_COPIES)
    ours = train(MIDDLE * least)
    assert machine.engines == 1
    assert machine.traces == 3 + 1, "three iterations were looked at, and the last one"
    assert not any("corrected" in note for note in ours.trainer.strategy.plan.notes)


@pytest.mark.slow
def test_a_replayed_plan_stays_as_it_is(least: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(monkeypatch, FAST_COPIES, FAST_COPIES)
    plan = train(MIDDLE * least).trainer.strategy.plan
    path = plan.save(tmp_path / "plan.json")
    machine.true.update(SLOW_COPIES)
    replayed = train(MIDDLE * least, options={"plan": path})
    assert machine.engines == 2, "one per run"
    assert replayed.trainer.strategy.plan == plan


# -- what cannot be corrected ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_after_the_last_correction_a_difference_is_said_once(
    stock: Run, least: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replan, "_CORRECTIONS", 2)
    true = dict(FAST_COPIES)
    machine = Machine(monkeypatch, FAST_COPIES, true)
    trace = machine.trace

    def slower(plan: Plan) -> Trace:
        true["unit"] = 2.0 ** (1 + machine.traces // 3)  # as on a machine that gets busier and busier
        return trace(plan)

    machine.trace = slower  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        ours = train(MIDDLE * least, epochs=7)
    assert ours.trainer.global_step == 21
    assert machine.engines <= 3
    (said,) = [record.message for record in caplog.records if "planned were" in record.message]
    assert "an iteration takes" in said
    assert "'compute'" in said
