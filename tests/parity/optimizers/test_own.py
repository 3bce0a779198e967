"""Optimizers that users write: the numbers of plain PyTorch at three budgets, in loops and under a Trainer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import lt_offload
from lt_offload import OffmateStrategy, limits
from lt_offload.errors import UnsupportedError
from lt_offload.model.blocks import find_blocks
from lt_offload.model.optimizers import tried
from lt_offload.plan import Plan, solve
from tests import sampling
from tests.parity.optimizers.own import (
    AdamWScheduleFree,
    Clipping,
    Closing,
    Counting,
    CountingItself,
    Feeling,
    InnerGroups,
    Lion,
    Nested,
    Noisy,
    Replacing,
    SideBySide,
    Uneven,
    muon_with_adam,
)
from tests.parity.users import test_odd_parameters as odd_parameters
from tests.parity.windows.training import Training, budgets, require_equal
from tests.support import engines, models, plans, trainers
from tests.support.engines import Case, Factory, Result, differences, installed, offloaded, plain
from tests.support.profiles.budgets import least

OWN: list[Factory] = [muon_with_adam, AdamWScheduleFree, Lion, CountingItself]
NESTED: list[Factory] = [Nested, Replacing, Counting]
SETTINGS: list[dict[str, Any]] = [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}]


@pytest.mark.parametrize("make", [*OWN, *NESTED])
def test_equal_at_three_budgets(make: Factory) -> None:
    windows = [[(2, 12)], [(1, 9)], [(2, 7)]]
    training = Training(start=models.build(layers=2), windows=windows, optimizer=make)
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile):
        require_equal(training, solve(profile, memory=memory), expected)


@pytest.mark.slow
def test_what_updates_take_for_a_moment_is_planned() -> None:
    """Also in later steps, and of the kinds of tensors that take most; at the smallest budget that is accepted."""
    training = Training(start=models.build(layers=2), windows=[[(1, 7)]] * 3, optimizer=Uneven)
    profile = training.profile()
    plan = solve(profile, memory=least(profile, host_update=False), host_update=False)
    require_equal(training, plan, training.plainly())


@pytest.mark.slow
@pytest.mark.parametrize("make", sampling.some(OWN, 2))
def test_options_and_counts_of_a_step_are_those_that_its_updates_use(make: Factory) -> None:
    """Where updates wait, the loop's own step is over before they begin."""
    start = models.build(layers=2, dtype=torch.bfloat16)
    training = Training(start=start, windows=[[(2, 12)], [(1, 9), (2, 7)], [(2, 7)]], optimizer=make, clip_norm=0.2)
    profile = training.profile()
    for memory in budgets(profile, accumulate=2, delayed=True):
        require_equal(training, solve(profile, memory=memory, accumulate=2, delayed=True), training.plainly())


@pytest.mark.slow
@pytest.mark.parametrize(("make", "settings"), sampling.grid(OWN, SETTINGS))
def test_under_a_trainer(make: Factory, settings: dict[str, Any]) -> None:
    """The Trainer's closure runs inside the step."""

    class Module(trainers.Module):
        def configure_optimizers(self) -> Optimizer:
            return make([{"params": list(self.parameters())}])

    def run(strategy: Any) -> trainers.Run:
        lightning.pytorch.seed_everything(3, verbose=False)
        return trainers.fit(strategy, Module(layers=2), max_epochs=1, **settings)

    expected = run("auto")
    for memory in sampling.one((150_000, 100_000_000)):
        assert trainers.differences(expected, run(OffmateStrategy(memory=memory))) == []


@pytest.mark.parametrize("make", [AdamWScheduleFree, CountingItself, *NESTED])
def test_states_in_any_order_and_of_several_tensors(make: Factory) -> None:
    """A state that begins as the weight lies before one that begins as zeros; a table is in every tensor's state."""
    case = Case(optimizer=make, places=("paged", "device", "host"))
    assert differences(plain(case), offloaded(case)) == []


def switching(model: nn.Module, optimizer: AdamWScheduleFree) -> list[Tensor]:
    """Train, and look at the averaged weights after each step, as the method wants it."""
    losses = []
    for seed in range(3):
        model(**models.batch(model, seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            losses.append(model(**models.batch(model, seed=9)).loss)
        optimizer.train()
    return losses


def test_weights_and_states_are_exchanged_between_steps() -> None:
    case = Case()
    expected, model = engines.build(case), engines.build(case)
    one, other = AdamWScheduleFree(expected.parameters()), AdamWScheduleFree(model.parameters())
    losses = switching(expected, one)
    places = ("paged", "host", "device")
    with installed(model, other, plans.streamed(find_blocks(model), other, options=("keep",), places=places)):
        found = switching(model, other)
    assert differences(Result(losses, expected, one), Result(found, model, other)) == []


def by_closures(model: nn.Module, optimizer: Optimizer, **others: Any) -> list[Tensor]:
    """Train by steps that call the model."""
    losses = []
    for seed in range(3):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(**models.batch(model, seed=seed)).loss
            loss.backward()
            return loss

        if seed == 1:
            losses.append(closure())
            optimizer.step(**others)
        else:
            losses.append(optimizer.step(closure))
    return losses


def test_a_step_may_call_that_of_its_base_class() -> None:
    """Torch calls the hooks of both, as soon as there has been an optimizer of the base class."""
    Lion(nn.Linear(2, 2).parameters())
    case = Case()
    expected, model, refused = (engines.build(case) for _ in range(3))
    one, other, third = (Clipping(net.parameters()) for net in (expected, model, refused))
    losses = by_closures(expected, one)
    plan = plans.streamed(find_blocks(model), other, options=("keep",), places=("paged", "host", "device"))
    with installed(model, other, plan):
        found = by_closures(model, other)
    assert differences(Result(losses, expected, one), Result(found, model, other)) == []
    argument = pytest.raises(UnsupportedError, match=r"Clipping.step\(\) was given largest: the updates of this iterat")
    with argument, installed(refused, third, plan):
        by_closures(refused, third, largest=torch.ones(()))


def own_loop() -> tuple[nn.Module, Optimizer, Plan]:
    torch.manual_seed(0)
    model = odd_parameters.Model("long")
    optimizer = muon_with_adam([{"params": list(model.parameters())}])
    return model, optimizer, plans.streamed(find_blocks(model), optimizer, options=("keep",), places=("host", "device"))


def test_hooks_of_a_step_see_every_parameter() -> None:
    """Those without a gradient would be changed, so that they are not there while the loop's own step runs."""
    model, optimizer, plan = own_loop()
    whole = [list(group["params"]) for group in optimizer.param_groups]
    seen: list[bool] = []

    def look(optimizer: Optimizer, *_: object) -> None:
        seen.append([group["params"] for group in optimizer.param_groups] == whole)

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    with installed(model, optimizer, plan):
        model(x=torch.randn(4, 8), y=torch.tensor([0, 1, 2, 3]))["loss"].backward()
        optimizer.step()
        look(optimizer)
    assert seen == [True] * 3


def test_a_tensor_without_a_gradient_that_would_be_changed_is_refused() -> None:
    model, optimizer, plan = own_loop()
    refused = pytest.raises(UnsupportedError, match="SingleDeviceMuonWithAuxAdam, weight layers.0.extra.weight: ")
    with refused, installed(model, optimizer, plan):
        model(x=torch.randn(2, 8), y=torch.tensor([0, 1]))["loss"].backward()
        optimizer.step()


class Skipping(Lion):
    """Counts steps, but only those that find a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.found = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.found += any(p.grad is not None for group in self.param_groups for p in group["params"])
        super().step()


def refusal(optimizer: Optimizer) -> str:
    with pytest.raises(UnsupportedError) as error:
        limits.check("optimizer", limits.Setup(model=nn.Linear(3, 3).requires_grad_(False), optimizers=[optimizer]))
    return str(error.value)


def test_those_that_cannot_be_are_refused() -> None:
    params = list(nn.Linear(3, 3).parameters())
    assert "- optimizer Feeling: each tensor is updated when its gradient is complete, and what all" in refusal(
        Feeling(params)
    )
    assert (
        "- optimizer InnerGroups: a step on small tensors in the parameter groups changed none of them, or"
        in refusal(InnerGroups(params))
    )
    assert "- optimizer SideBySide: a step on small tensors" in refusal(SideBySide(params))
    assert "- optimizer Skipping: a trial on small tensors" in refusal(Skipping(params))
    paged = Lion(params)
    vars(paged)["is_paged"] = True
    assert "- optimizer Lion: gradients travel as dense tensors, and states" in refusal(paged)


def drawn(draw: Callable[[Tensor], Tensor | float], wants: Callable[[Tensor], bool]) -> Factory:
    return lambda params: Noisy(params, lambda p, _: draw(p) if wants(p) else 0.0)


def is_matrix(p: Tensor) -> bool:
    return p.ndim == 2


def is_large(p: Tensor) -> bool:
    return p.numel() > 8**2


def filled(number: Callable[[], float]) -> Callable[[Tensor], float]:
    return lambda _: 1e-3 * number()


def own_generator(generator: Any, draw: Callable[[Any, Tensor], Tensor | float]) -> Factory:
    def make(params: Any) -> Optimizer:
        optimizer = Noisy(params, lambda p, _: draw(generator, p) if is_large(p) else 0.0)
        vars(optimizer)["generator"] = generator
        return optimizer

    return make


@pytest.mark.parametrize(
    "make",
    [
        drawn(torch.randn_like, is_matrix),
        drawn(torch.randn_like, is_large),
        drawn(lambda p: F.dropout(p, 0.5), is_large),
        drawn(filled(random.random), is_matrix),
        drawn(filled(random.random), is_large),
        drawn(filled(np.random.rand), is_large),
        own_generator(np.random.default_rng(0), lambda own, p: own.random()),
        own_generator(torch.Generator(), lambda own, p: torch.empty_like(p).normal_(generator=own)),
    ],
)
def test_those_that_draw_for_some_tensors_only_are_refused(make: Factory) -> None:
    """Whichever tensor comes first would get the first numbers."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(40, 30))
    before = random.getstate(), str(np.random.get_state())
    refused = refusal(make([{"params": [param]} for param in model.parameters()]))
    assert "- optimizer Noisy: each tensor is updated when its gradient is complete, so that it would get" in refused
    assert (random.getstate(), str(np.random.get_state())) == before


def late(p: Tensor, state: dict[str, Any]) -> Tensor | float:
    state["step"] = state.get("step", 0) + 1
    return torch.rand_like(p) if state["step"] == 3 else 0.0


@pytest.mark.parametrize("places", [("host",), ("device",), ("paged",)])
def test_those_that_draw_in_later_steps_are_refused_then(places: tuple[str, ...]) -> None:
    case = Case(optimizer=lambda params: Noisy(params, late), places=places)
    with pytest.raises(UnsupportedError, match="optimizer Noisy draws random numbers: each tensor is updated"):
        offloaded(case)


def seeded(p: Tensor, state: dict[str, Any]) -> Tensor:
    state["step"] = state.get("step", 0) + 1
    return 1e-3 * torch.empty_like(p).normal_(generator=torch.Generator(p.device).manual_seed(state["step"]))


def test_a_generator_that_the_step_makes_gives_each_tensor_its_numbers() -> None:
    case = Case(optimizer=lambda params: Noisy(params, seeded), places=("paged", "device", "host"))
    assert differences(plain(case), offloaded(case)) == []
    assert tried(Noisy(nn.Linear(3, 3).parameters(), seeded)).verdict == "alone"


def test_a_rate_of_zero_says_nothing_about_what_an_optimizer_does() -> None:
    """As in the first step of a warm-up."""
    params = list(nn.Linear(3, 3).parameters())
    assert tried(PlainSGD(params, lr=0.0)).verdict == "alone"
    assert tried(Idle(params, lr=0.1)).verdict == "idle"


def test_one_that_needs_a_closure_is_refused_when_it_is_measured() -> None:
    model = models.build(layers=2)
    refused = pytest.raises(
        UnsupportedError, match=r"Closing, whose step\(\) ends in TypeError: a closure is required: "
    )
    with refused, lt_offload.offloaded(model, Closing(model.parameters()), models.batch(model), accelerator="cpu"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("memory", [150_000, 100_000_000])
def test_states_in_lists_are_in_checkpoints(memory: int, tmp_path: Path) -> None:
    class Module(trainers.Module):
        def configure_optimizers(self) -> Optimizer:
            return Nested(self.parameters())

    def run(epochs: int, ckpt: Path | None = None) -> trainers.Run:
        lightning.pytorch.seed_everything(3, verbose=False)
        module = Module(layers=2, shuffle=False)
        return trainers.fit(OffmateStrategy(memory=memory), module, max_epochs=epochs, ckpt=ckpt)

    run(1).trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert trainers.state_differences(run(2), run(2, tmp_path / "half.ckpt")) == []


class PlainSGD(Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


class Idle(PlainSGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass
