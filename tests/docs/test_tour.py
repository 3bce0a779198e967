"""The two engines of the tour give the numbers of plain PyTorch and of the real engine, by the same plans."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_offload import Plan, Profile, profile, solve
from lt_offload.execute.engine import Engine
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.profile import HardwareProfile
from tests.docs import pages
from tests.support.hostile.device import HostileDevice

TOUR = pages.SITE / "tour"
STEPS = 3
LINES = 300
"""What one can read at once."""
PLANS: dict[str, dict[str, Any]] = {
    "resident": {"planner": "resident", "share": 1.5},
    "stream": {"planner": "stream", "share": 0.65},
    "reload": {"planner": "stream", "share": 0.7, "without": "offload"},
    "l2l": {"planner": "l2l", "share": 0.7},
    "paged": {"host_update": False, "share": 0.7},
    "recompute": {"activation_offload": False, "share": 0.7},
    "tight": {"planner": "greedy", "share": 0.68},
    "middle": {"planner": "offmate", "share": 0.9},
}
"""What is asked of the planner. ``share``: the budget, as a part of what everything takes; ``without``: an option."""


@cache
def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOUR / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(program("overlapped").Block(16) for _ in range(3))))


def optimizer(params: Any) -> torch.optim.Optimizer:
    tour = program("overlapped")
    return torch.optim.SGD(params, lr=tour.LR, momentum=tour.MOMENTUM, foreach=False)


def batch(seed: int) -> Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))


@cache
def machine() -> HardwareProfile:
    return replace(
        load_hardware("rtx-3060-12gb"), context_bytes=0, process_bytes=0, h2d_bytes_per_s=2e8, d2h_bytes_per_s=2e8
    )


@cache
def costs() -> Profile:
    """Without the options that the tour's engines lack, and with links that are slow for so small a model."""
    built, tour = model(), program("overlapped")
    found: Profile = tour.offered(
        profile(
            built,
            (batch(0),),
            optimizer=optimizer,
            device="cpu",
            run=lambda given: tour.loss_of(built(*given)),
            hardware=machine(),
        )
    )
    return found


@cache
def planned(name: str) -> Plan:
    settings = dict(PLANS[name])
    everything = sum(2 * tensor.bytes + tensor.state_bytes for tensor in costs().tensors) + costs().shared_bytes
    everything += sum(block.option("keep").saved_bytes for block in costs().blocks)
    memory = int(settings.pop("share") * everything)
    return solve(without(costs(), settings.pop("without", "")), memory=memory, **settings)


def without(found: Profile, name: str) -> Profile:
    blocks = [replace(block, options=tuple(o for o in block.options if o.name != name)) for block in found.blocks]
    return replace(found, blocks=tuple(blocks))


Trained = tuple[list[Tensor], ...]
"""Losses, weights, momentum."""


def trained(within: Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[object]]) -> Trained:
    """Train in an ordinary loop."""
    built = model()
    chosen = optimizer(built.parameters())
    losses = []
    with within(built, chosen):
        for step in range(STEPS):
            loss = program("overlapped").loss_of(built(batch(step)))
            loss.backward()
            chosen.step()
            chosen.zero_grad()
            losses.append(loss.detach().clone())
    states = [chosen.state[param]["momentum_buffer"] for param in built.parameters()]
    return losses, [param.detach() for param in built.parameters()], states


@cache
def plain() -> Trained:
    return trained(lambda built, chosen: nullcontext())


def by_the_real_engine(plan: Plan) -> Trained:
    @contextmanager
    def installed(built: nn.Module, chosen: torch.optim.Optimizer) -> Iterator[None]:
        device = HostileDevice(plan.budget_bytes, "lazy", check=True)
        engine = Engine(built, chosen, plan, device)
        try:
            engine.install()
            engine.follow(chosen)
            yield
        finally:
            engine.remove()
            device.close()

    return trained(installed)


def by_the_tour(tour: ModuleType, plan: Plan) -> Trained:
    blocks = list(model()[0].children())
    engine = tour.Engine(blocks, plan)
    losses = [engine.iteration(batch(step), tour.loss_of) for step in range(STEPS)]
    engine.come_home()
    weights = [param.detach() for block in blocks for param in block.parameters()]
    return losses, weights, [engine.host["state", t] for t in range(len(weights))]


def assert_equal(one: Trained, other: Trained) -> None:
    for left, right in zip(one, other, strict=True):
        assert len(left) == len(right)
        assert all(map(torch.equal, left, right))


class LateThread:
    """Does nothing before somebody waits for it: what is used without waiting is not there."""

    def __init__(self, workers: int) -> None:
        assert workers == 1
        self.tasks: list[Callable[[], None]] = []
        self.done = 0

    def submit(self, *task: Any) -> LateTask:
        self.tasks.append(partial(*task))
        return LateTask(self, len(self.tasks))


class LateTask:
    def __init__(self, thread: LateThread, number: int) -> None:
        self.thread, self.number = thread, number

    def result(self) -> None:
        while self.thread.done < self.number:
            task = self.thread.tasks[self.thread.done]
            self.thread.done += 1
            task()


@pytest.mark.parametrize("name", PLANS)
def test_numbers_are_those_of_plain_pytorch_and_of_the_real_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, overlapped = planned(name), program("overlapped")
    assert_equal(plain(), by_the_tour(program("in_turn"), plan))
    assert_equal(plain(), by_the_tour(overlapped, plan))
    monkeypatch.setattr(overlapped, "ThreadPoolExecutor", LateThread)
    assert_equal(plain(), by_the_tour(overlapped, plan))
    assert_equal(plain(), by_the_real_engine(plan))


def test_who_does_not_wait_gets_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, overlapped = planned("stream"), program("overlapped")
    monkeypatch.setattr(overlapped, "ThreadPoolExecutor", LateThread)
    hasty = replace(plan, ops=tuple(replace(op, after=()) for op in plan.ops))
    with pytest.raises((AssertionError, IndexError)):  # numbers of before, or a place that nothing has come back to
        assert_equal(plain(), by_the_tour(overlapped, hasty))


def test_the_plans_have_all_that_the_engines_can_do() -> None:
    found: Counter[str] = Counter()
    for name in PLANS:
        plan = planned(name)
        found.update({*plan.options, *plan.update_places, *(f"{op.kind} {op.payload}" for op in plan.ops)})
    assert found.keys() >= program("overlapped").OPTIONS | {"device", "paged", "host", "drop weight"}
    assert found.keys() >= {
        f"{kind} {what}" for kind in ("prefetch", "offload") for what in ("weight", "state", "activation")
    }
    assert "offload grad" in found


def test_both_are_read_at_once_and_differ_in_their_lanes_only() -> None:
    texts = [(TOUR / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in ("in_turn", "overlapped")]
    assert max(map(len, texts)) <= LINES
    hunks = [line for line in difflib.unified_diff(*texts, n=0, lineterm="") if line.startswith("@@")]
    assert len(hunks) <= 7
    shown = "\n".join(difflib.unified_diff(*texts, n=1, lineterm="", fromfile="in_turn.py", tofile="overlapped.py"))
    assert shown in (pages.SITE / "tour.md").read_text(encoding="utf-8")


def test_every_file_that_is_named_is_there() -> None:
    named = re.findall(r"`((?:lt_offload|tests|scripts|docs)/[^`]*)`", pages.read("docs/tour.md"))
    assert len(named) > 20
    assert [name for name in named if not (pages.ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["in_turn", "overlapped"])
def test_the_program_says_that_all_is_equal(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program(name), "profile", partial(profile, device="cpu", hardware=machine()))
    program(name).main()
    *_, before, last = capsys.readouterr().out.splitlines()
    assert before.startswith("loss ")
    assert last.endswith("all weights equal: True")
