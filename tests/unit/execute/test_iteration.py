"""Where an iteration is: things in any order train as plain PyTorch does, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

import lt_offload
from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.execute.iteration import HALFWAY, Iteration, State
from lt_offload.execute.updates.window import Window
from tests.support.engines import installed
from tests.support.user_nets import Net, adamw, measured, rows, seed


def at(*come: Callable[[Iteration], object]) -> Iteration:
    """Return an iteration within a step, to which ``come`` has come."""
    iteration = Iteration(Window(), open=lambda: False, waiting=lambda: 0)
    iteration.enclosed = True
    for call in come:
        call(iteration)
    return iteration


FORWARD, BACKWARD = Iteration.begin_forward, Iteration.begin_backward
USE = "weights were used"
REFUSED: dict[str, tuple[tuple[Callable[[Iteration], object], ...], Callable[[Iteration], object], str]] = {
    "weights are read while updates run": ((FORWARD, BACKWARD), lambda i: i.check_read(USE), "of this step"),
    "they are written": ((FORWARD, BACKWARD), lambda i: i.check_write(USE), "would see other weights"),
    "another forward": ((FORWARD, BACKWARD), FORWARD, "called a second time"),
    "another plan": ((FORWARD, BACKWARD), lambda i: i.check_leave(USE), "of this step"),
    "a forward was given up": ((FORWARD, Iteration.forget), BACKWARD, "had been given up"),
    "updates broke off": ((FORWARD, Iteration.settle), FORWARD, "updates broke off, and the model was called"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    """Said here once more: the walk below asks the iteration itself what it refuses."""
    come, then, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message):
        then(at(*come))


def test_no_checkpoint_is_complete_until_an_iteration_has_followed_the_one_that_broke_off() -> None:
    iteration = at(FORWARD, BACKWARD, Iteration.fail)
    assert (iteration.state, iteration.unfinished()) == (State.FAILED, HALFWAY)
    for call in (FORWARD, BACKWARD, Iteration.end):
        call(iteration)
    assert (iteration.state, iteration.unfinished()) == (State.IDLE, None)


def test_only_the_last_pass_of_a_window_updates() -> None:
    window = Window()
    window.begin()
    assert window.which == "updating"
    passes = []
    for waiting in (2, 1, 0):
        window.begin_pass(waiting)
        passes.append(window.which)
        window.added += 1
    assert passes == ["beginning", "accumulating", "updating"]


class AnyOrder(RuleBasedStateMachine):
    """A loop of one's own that does things in any order, and its twin in plain PyTorch."""

    KINDS: tuple[dict[str, Any], ...] = ({}, {"accumulate": 2}, {"delayed": True})

    @initialize(kind=st.sampled_from(KINDS))
    def begin(self, kind: dict[str, Any]) -> None:
        self.kind, self.around = kind, ExitStack()
        self.model = Net()
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.other = adamw(self.model), adamw(self.twin)
        plan = lt_offload.solve(measured(Net), memory="1GB", **kind)
        self.engine = self.around.enter_context(installed(self.model, self.optimizer, plan))
        self.engine.accumulate = kind.get("accumulate", 1)
        self.iteration = self.engine._iteration
        self.losses: tuple[Tensor, Tensor] | None = None
        self.batches = rows(8)
        self.count = 0

    def do(
        self, *checks: Callable[[], None], act: Callable[[], Any], twin: Callable[[], Any]
    ) -> tuple[Any, Any] | None:
        """Act on both, if the iteration allows it; otherwise see that it is refused."""
        try:
            for check in checks:
                check()
        except ConfigError:
            with pytest.raises(ConfigError):
                act()
            return None
        return act(), twin()

    def loss_of(self, model: torch.nn.Module) -> Tensor:
        loss: Tensor = model(**self.batches[self.count % len(self.batches)])["loss"]
        return loss

    @rule()
    def forward(self) -> None:
        self.count += 1
        found = self.do(
            self.iteration.check_forward,
            act=lambda: self.loss_of(self.model),
            twin=lambda: self.loss_of(self.twin),
        )
        if found is not None:
            self.losses = found
            assert torch.equal(*found)

    @precondition(lambda self: self.losses is not None)
    @rule()
    def backward(self) -> None:
        assert self.losses is not None
        one, other = self.losses
        self.losses = None
        self.do(self.iteration.check_backward, act=one.backward, twin=other.backward)

    @rule()
    def drop(self) -> None:
        self.losses = None

    @rule()
    def step(self) -> None:
        if self.do(self.iteration.check_step, act=self.optimizer.step, twin=self.other.step) is not None:
            self.losses = None
            self.optimizer.zero_grad()
            self.other.zero_grad()
            assert self.iteration.state is State.IDLE

    @rule()
    def validate(self) -> None:
        with torch.no_grad():
            found = self.do(
                self.iteration.check_validation,
                act=lambda: self.loss_of(self.model),
                twin=lambda: self.loss_of(self.twin),
            )
        if found is not None and self.iteration.state is not State.BACKWARD:
            assert torch.equal(*found)

    @rule()
    def read(self) -> None:
        found = self.do(
            lambda: self.iteration.check_read(USE),
            act=lambda: [param.clone() for param in self.model.parameters()],
            twin=lambda: list(self.twin.parameters()),
        )
        if found is not None:
            assert all(map(torch.equal, *found))

    @rule()
    def write(self) -> None:
        with torch.no_grad():
            self.do(
                lambda: self.iteration.check_read(USE),
                lambda: self.iteration.check_write(USE),
                act=lambda: self.model.layers[1].linear.weight.mul_(0.5),
                twin=lambda: self.twin.layers[1].linear.weight.mul_(0.5),
            )

    @precondition(lambda self: "accumulate" in self.kind)
    @rule(count=st.integers(0, 3))
    def resize(self, count: int) -> None:
        def set_accumulate() -> None:
            self.engine.accumulate = count

        if self.iteration.begun or not count:
            with pytest.raises(ConfigError):
                set_accumulate()
        else:
            set_accumulate()

    @precondition(lambda self: "delayed" in self.kind)
    @rule()
    def clear(self) -> None:
        self.optimizer.zero_grad()
        self.other.zero_grad()

    @rule()
    def break_off(self) -> None:
        halfway = self.iteration.halfway or self.engine.added > 0
        error = RuntimeError("broken off")
        self.engine.abort(error)
        assert getattr(error, "__notes__", []) == [HALFWAY] * self.engine.halfway
        self.losses = None
        assert self.iteration.state is (State.FAILED if halfway or self.engine.unfinished() else State.IDLE)
        assert (self.engine.unfinished() is not None) == (self.iteration.state is State.FAILED)
        self.optimizer.zero_grad()
        self.other.zero_grad()
        self.model.load_state_dict(self.twin.state_dict())
        self.optimizer.load_state_dict(self.other.state_dict())

    def teardown(self) -> None:
        if hasattr(self, "around"):
            self.losses = None
            self.around.close()


def test_anything_in_any_order() -> None:
    seed()
    once = settings(
        max_examples=6,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(AnyOrder, settings=once)
