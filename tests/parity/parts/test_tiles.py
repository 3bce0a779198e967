"""Training in tiles of tokens gives, bit for bit, what plain PyTorch gives with a model in the same tiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lt_offload
from lt_offload import OffmateStrategy, PlanError
from lt_offload.model.forms import FORMS
from lt_offload.model.tiles import tokens_of
from lt_offload.plan import Plan
from lt_offload.schema.profile import Profile
from tests import sampling
from tests.parity.parts.nets import plan_for
from tests.support import models, trainers
from tests.support.engines import Case as EngineCase
from tests.support.engines import Result, changed, differences, make_optimizer, plain
from tests.support.profiles import budgets
from tests.support.trainers import fit

TOKENS = 7
LENGTH = 48


def start(**options: Any) -> nn.Module:
    return models.build("llama", dropout=0.1, **options)


def sample(seed: int = 0, length: int = LENGTH) -> dict[str, torch.Tensor]:
    return models.batch(start(), sequence_length=length, seed=seed)


def stored(form: str) -> nn.Module:
    """A model of which adapters train."""
    dtype = torch.bfloat16 if form == "lossless" else torch.float32
    model = start(hidden_size=64, intermediate_size=128, dtype=dtype)
    lt_offload.store_weights(model, form)
    torch.manual_seed(0)
    return models.adapted(model).train()


def profiled(tokens: int | None, start: Callable[[], nn.Module] = start) -> Profile:
    model = start()
    lt_offload.tile_tokens(model, tokens)
    return lt_offload.profile(
        model, sample(), optimizer=make_optimizer(model, "adamw-fused"), run=lambda batch: model(**batch).loss
    )


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profiled(TOKENS)


def trained(plan: Plan | None, *, accumulate: int, clips: bool, start: Callable[[], nn.Module] = start) -> Result:
    """Train by ``plan``, or a model in tiles in plain PyTorch; the third batch is shorter than a tile."""
    model = start()
    optimizer = make_optimizer(model, "adamw-fused")
    losses = []
    if plan is None:
        lt_offload.tile_tokens(model, TOKENS)
    context: Any = nullcontext()
    if plan is not None:
        context = lt_offload.offloaded(
            model, optimizer, sample(), plan=plan, tile_tokens=TOKENS, accelerator="cpu", accumulate=accumulate
        )
    with context as engine:
        torch.manual_seed(1)
        for step, length in enumerate((LENGTH, LENGTH - 5, 3)):
            for number in range(accumulate):
                loss = model(**sample(2 * step + number, length)).loss
                loss.backward()
                losses.append(loss.detach().clone())
            if clips:
                clip = nn.utils.clip_grad_norm_ if plan is None else None
                losses.append(clip(model.parameters(), 0.1) if clip else engine.clip_grad_norm_(0.1))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(model(**sample(99)).loss)
    assert tokens_of(model) == (TOKENS if plan is None else 0)
    return Result(losses, model, optimizer)


KINDS: list[dict[str, Any]] = [{}, {"accumulate": 2}, {"delayed": True}, {"activation_offload": False}]


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "settings"), sampling.grid(["tight", "middle", "resident"], KINDS, count=5))
def test_every_budget_gives_the_numbers_of_the_reference(
    profile: Profile, budget: str, settings: dict[str, Any]
) -> None:
    plan = plan_for(profile, budget, **settings)
    how = {"accumulate": settings.get("accumulate", 1), "clips": settings.get("delayed", False)}
    assert plan.tile_tokens == TOKENS
    assert f"tiles of {TOKENS} tokens" in plan.explain()
    assert differences(trained(None, **how), trained(plan, **how)) == []


@pytest.mark.parametrize(("form", "budget"), sampling.grid([*FORMS], ["tight", "middle", "resident"], count=3))
def test_mlps_with_stored_weights_and_adapters_run_in_tiles(form: str, budget: str) -> None:
    make = partial(stored, form)
    assert len(lt_offload.tile_tokens(make(), TOKENS)) == 3
    plan, how = plan_for(profiled(TOKENS, make), budget), {"accumulate": 1, "clips": False}
    assert differences(trained(None, **how, start=make), trained(plan, **how, start=make)) == []


def test_tiles_add_up_in_another_order_and_need_less(profile: Profile) -> None:
    case = EngineCase(shapes=((2, LENGTH),))
    result = plain(case)
    assert changed(case, result)
    tiles = plain(EngineCase(shapes=((2, LENGTH),), tile_tokens=TOKENS))
    assert differences(result, tiles) != []
    assert differences(result, plain(EngineCase(shapes=((2, LENGTH),), tile_tokens=2 * LENGTH))) == []
    for mine, other in zip(tiles.model.parameters(), result.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert budgets.least(profile) < 0.95 * budgets.least(profiled(None))


def test_another_plan_than_that_of_the_tiles_is_refused(profile: Profile) -> None:
    model = start()
    plan = plan_for(profile, "resident")
    context = lt_offload.offloaded(model, make_optimizer(model, "adamw-fused"), sample(), plan=plan, accelerator="cpu")
    with pytest.raises(PlanError, match="tile_tokens=7, .* the model runs with tile_tokens=None; set"), context:
        pass


# -- Lightning --------------------------------------------------------------------------------------------------------


def run(strategy: Any, tokens: int | None = None, **settings: Any) -> trainers.Run:
    module = trainers.seeded_module(dropout=0.1)
    lt_offload.tile_tokens(module.model, tokens)
    options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2, **settings}
    return fit(strategy, module=module, **options)


def offmate(**options: Any) -> OffmateStrategy:
    return OffmateStrategy(**{"memory": 200_000, "host_memory": 1 << 34, "planner": "offmate"} | options)


def test_a_strategy_gives_the_numbers_of_the_reference() -> None:
    strategy = offmate(tile_tokens=TOKENS)
    theirs, ours = run("auto", TOKENS), run(strategy)
    assert trainers.differences(theirs, ours) == []
    assert strategy.plan is not None
    assert strategy.plan.tile_tokens == TOKENS
    assert tokens_of(ours.module) == 0


@pytest.mark.slow
def test_a_resumed_run_and_a_replay_say_that_tiles_have_changed(tmp_path: Path) -> None:
    first = run(offmate(tile_tokens=TOKENS, report_dir=tmp_path), max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = run(offmate(tile_tokens=TOKENS), ckpt=tmp_path / "last.ckpt")
    assert trainers.state_differences(run("auto", TOKENS), resumed) == []
    with pytest.warns(UserWarning, match="had tile_tokens=7, this one has None"):
        run(offmate(), ckpt=tmp_path / "last.ckpt")
    with pytest.raises(PlanError, match="tile_tokens"):
        run(offmate(plan=tmp_path / "plan.json", planner="auto"))


class Long(trainers.Module):
    """Trains on longer sequences, one and a half as long as a tile and more."""

    def train_dataloader(self) -> Any:
        rows = [models.batch(self.model, batch_size=1, sequence_length=56, padding=False, seed=at) for at in range(6)]
        return DataLoader([{name: tensor[0] for name, tensor in row.items()} for row in rows], batch_size=2)


def long_run(strategy: Any, tokens: int | None = None) -> trainers.Run:
    torch.manual_seed(0)
    module = Long()
    lt_offload.tile_tokens(module.model, tokens)
    return fit(strategy, module=module, max_epochs=1, limit_train_batches=3, limit_val_batches=0)


@pytest.mark.slow
def test_the_first_step_fits_where_its_plan_fits() -> None:
    def within(memory: int, tokens: int | None) -> trainers.Run:
        return long_run(offmate(memory=memory, planner="auto", solver_time_limit=1000, tile_tokens=tokens))

    needed = budgets.named_by(lambda: within(90_000, TOKENS))
    assert needed < 0.7 * budgets.named_by(lambda: within(90_000, None))
    ours = within(needed, TOKENS)
    theirs = long_run("auto", TOKENS)
    assert all(map(torch.equal, theirs.module.losses, ours.module.losses))
    assert trainers.state_differences(theirs, ours) == []
