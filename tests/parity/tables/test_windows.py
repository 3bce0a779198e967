"""Tied embeddings updated in two parts in windows of several micro-batches, whose gradients are added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload.errors import UnsupportedError
from lt_offload.execute.updates.window import CarriedWindow
from lt_offload.plan.rows import as_head, table_of
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import make_plan
from lt_offload.plan.verify.check import check
from lt_offload.schema.plan import Op, Plan, PlannerName
from lt_offload.schema.profile import Profile
from tests.parity.tables.tied import MAKERS, VOCABULARY, build, measured, optimizer_of, planned
from tests.support import models
from tests.support.engines import Result, carried_out, differences, in_windows, installed
from tests.support.hostile.device import HostileDevice

Shape = tuple[int, int]
"""Samples and tokens; a plan is for (5, 24)."""
WINDOWS: Sequence[Sequence[Shape]] = (
    ((5, 24), (5, 24), (5, 24)),
    ((5, 24), (2, 9), (5, 24)),
    ((2, 9),),
    ((5, 24), (3, 24)),
    ((5, 24), (2, 7), (1, 5), (5, 24)),
)
"""They are planned for three micro-batches; others are shorter, one is longer."""
ONE_BY_ONE: Sequence[Sequence[Shape]] = (((5, 24),), ((5, 24),), ((2, 9),), ((5, 24),))


def batches(windows: Sequence[Sequence[Shape]], rows: int = VOCABULARY) -> list[list[dict[str, Any]]]:
    """Micro-batches by window; some tokens are in several of them, or several times in one, others in one alone."""
    model = build("torch", rows=rows)
    seeds = iter(range(1000))
    made = [[models.batch(model, batch_size=b, sequence_length=s, seed=next(seeds)) for b, s in w] for w in windows]
    for window in made:
        for batch in window:
            batch["input_ids"][:, 2] = 7
        window[-1]["input_ids"][:, 3:5] = 11
    return made


def plain(
    maker: str,
    windows: Sequence[Sequence[Shape]] = WINDOWS,
    family: str = "llama-tied",
    rows: int = VOCABULARY,
    **clips: float | None,
) -> Result:
    """Train without the engine."""
    model = build(maker, family, rows)
    optimizer = optimizer_of(model, maker)
    torch.manual_seed(0)
    return Result(in_windows(model, optimizer, batches(windows, rows), **clips), model, optimizer)


class Training:
    """One training in windows, which several engines may carry out one after the other."""

    def __init__(self, maker: str, family: str = "llama-tied", rows: int = VOCABULARY) -> None:
        self.model = build(maker, family, rows)
        self.optimizer = optimizer_of(self.model, maker)
        self.losses: list[torch.Tensor] = []
        self.peak = 0
        self.clip_value: float | None = None
        self.clip_norm: float | None = None
        self.norms: list[float | None] | None = None
        self.between: Callable[[nn.Module], None] = lambda model: None
        torch.manual_seed(0)

    def run(
        self,
        plan: Plan,
        budget: int,
        micro_batches: Sequence[tuple[dict[str, Any], int, bool]],
        begun: CarriedWindow | None = None,
        mode: str = "lazy",
    ) -> CarriedWindow | None:
        """Carry out micro-batches, of windows of so many, of which some are the last; return what they have left."""
        left, device = None, HostileDevice(budget, mode, check=True)
        with carried_out(self.model, self.optimizer, plan, device) as engine:
            engine.clip_value = self.clip_value
            if begun is not None:
                engine.handover.enter_window(begun)
            for batch, size, last in micro_batches:
                with engine.iteration(last=last, grad_norm=self.norms is not None):
                    loss = self.model(**batch).loss / size
                    loss.backward()
                    self.losses.append(loss.detach().clone())
                    if last and self.clip_norm is not None:
                        self.losses.append(engine.clip_grad_norm_(self.clip_norm).clone())
                    if last:
                        self.optimizer.step()
                self.peak = max(self.peak, engine.stats.device_peak_bytes)
                self.between(self.model)
                if last and self.norms is not None:
                    self.norms.append(engine.stats.grad_norm)
            if engine.added:
                left = engine.handover.leave_window(self.optimizer)
            engine.drain()
        return left

    @property
    def result(self) -> Result:
        """What has become of it."""
        return Result(self.losses, self.model, self.optimizer)


def flat(
    windows: Sequence[Sequence[Shape]] = WINDOWS, rows: int = VOCABULARY
) -> list[tuple[dict[str, Any], int, bool]]:
    """All micro-batches, with the size of their window, and whether they are its last."""
    return [(b, len(w), b is w[-1]) for w in batches(windows, rows) for b in w]


@pytest.mark.parametrize("part_of_budget", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("window", [1, 3])
def test_two_parts_have_the_numbers_of_plain_pytorch(window: int, maker: str, part_of_budget: float) -> None:
    plan, budget = planned(maker, part_of_budget, window=window)
    uses = [(op.kind, op.rows) for op in plan.ops if op.uses_gradients and op.rows]
    kinds = ("accumulate", "update") if window > 1 else ("update",)
    assert uses == [(kind, rows) for rows in ("others", "looked up") for kind in kinds]
    windows = WINDOWS if window > 1 else ONE_BY_ONE
    training = Training(maker)
    training.run(plan, budget, flat(windows))
    assert training.peak <= budget
    assert differences(plain(maker, windows), training.result) == []


@pytest.mark.parametrize("mode", ["thread", "random"])
@pytest.mark.parametrize("family", ["bloom", "gemma3"])
def test_other_models_and_orders_of_lanes_give_the_same_numbers(family: str, mode: str) -> None:
    plan, budget = planned("torch", 0.3, family)
    training = Training("torch", family)
    training.run(plan, budget, flat(), mode=mode)
    assert differences(plain("torch", family=family), training.result) == []


@pytest.mark.parametrize("planner", ["stream", "l2l"])
def test_a_table_that_a_plan_fetches_again_is_fetched_by_the_next_micro_batch(planner: PlannerName) -> None:
    plan, budget = planned("noise", 0.3, planner=planner)
    table = table_of(measured("noise"))
    (fetch,) = (op for op in plan.ops if op.kind == "prefetch" and table in plan.tensors(op))
    assert fetch.step < len(plan.options)
    assert fetch.passes == plan.passes
    rows = {op.id for op in plan.ops if op.updates_on_host and op.rows == "looked up"}
    early = replace(fetch, after=tuple(other for other in fetch.after if other not in rows))
    assert check(replace(plan, ops=tuple(early if op is fetch else op for op in plan.ops)), measured("noise"))
    training = Training("noise")
    training.run(plan, budget, flat())
    assert training.peak <= budget
    assert differences(plain("noise"), training.result) == []


@pytest.mark.parametrize("maker", ["torch", "noise"])
def test_gradients_are_clipped_by_value_when_they_are_complete(maker: str) -> None:
    plan, budget = planned(maker, 0.3)
    training = Training(maker)
    training.clip_value = 1e-3
    training.run(plan, budget, flat())
    expected = plain(maker, clip_value=1e-3)
    assert differences(expected, training.result) == []
    assert differences(expected, plain(maker)) != []


@pytest.mark.parametrize("part_of_budget", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("maker", "window"), [("torch", 3), ("masters", 3), ("noise", 3), ("torch", 1), ("noise", 1)])
def test_gradients_that_are_clipped_by_their_norm_are_added_up_by_rows(
    maker: str, window: int, part_of_budget: float
) -> None:
    plan, budget = planned(maker, part_of_budget, window=window, delayed=True)
    assert [op.rows for op in plan.ops if op.kind == "accumulate" and op.rows] == ["others", "looked up"]
    windows = WINDOWS if window > 1 else ONE_BY_ONE
    training = Training(maker)
    training.clip_norm = 0.1
    training.run(plan, budget, flat(windows))
    assert training.peak <= budget
    expected = plain(maker, windows, clip_norm=0.1)
    assert differences(expected, training.result) == []
    assert expected.losses[len(windows[0])] > 0.1  # the first norm


@pytest.mark.parametrize(("at", "delayed"), [(1, False), (2, False), (5, False), (2, True), (5, True)])
def test_another_plan_goes_on_in_the_midst_of_a_window(at: int, delayed: bool) -> None:
    plan, budget = planned("masters", 0.3, delayed=delayed)
    settings = Settings(planner="greedy", memory=2 * budget, accumulate=3, delayed=delayed)
    whole = make_plan(measured("masters"), settings)
    assert not any(op.rows for op in whole.ops)
    clip_norm = 0.1 if delayed else None
    expected = plain("masters", clip_norm=clip_norm)
    for first, then in ((plan, whole), (whole, plan), (plan, plan)):
        training, all_of_them = Training("masters"), flat()
        training.clip_norm = clip_norm
        left = training.run(first, 2 * budget, all_of_them[:at])
        training.run(then, 2 * budget, all_of_them[at:], left)
        assert differences(expected, training.result) == []


def test_sums_can_be_read_and_edited_between_micro_batches_where_updates_wait() -> None:
    plan, _ = planned("torch", 0.3, delayed=True)
    windows = [WINDOWS[1]] * 2

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        seen = []
        torch.manual_seed(0)
        weight = model.get_input_embeddings().weight  # type: ignore[operator]
        for window in batches(windows):
            for batch in window:
                (model(**batch).loss / 3).backward()
                seen.append(weight.grad.clone())
            weight.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    plainly, training = Training("torch"), Training("torch")
    expected = loop(plainly.model, plainly.optimizer)
    with installed(training.model, training.optimizer, plan) as engine:
        engine.accumulate = 3
        found = loop(training.model, training.optimizer)
    assert all(map(torch.equal, expected, found))
    assert differences(plainly.result, training.result) == []


@pytest.mark.parametrize("complete", [False, True])
def test_a_window_begins_anew_after_an_error(complete: bool) -> None:
    plan, _ = planned("torch", 0.3)
    training = Training("torch")
    model, optimizer = training.model, training.optimizer
    first, second = batches([((5, 24), (5, 24))])[0]
    with carried_out(model, optimizer, plan) as engine:
        with engine.iteration(last=False):
            model(**first).loss.backward()
        with pytest.raises(RuntimeError, match="by the user"), engine.iteration(last=False):  # noqa: PT012
            loss = model(**second).loss
            if complete:
                loss.backward()
            raise RuntimeError("by the user")
        assert engine.added == 0
        optimizer.zero_grad()
        torch.manual_seed(0)
        for batch, size, last in flat():
            with engine.iteration(last=last):
                loss = model(**batch).loss / size
                loss.backward()
                if last:
                    optimizer.step()
            training.losses.append(loss.detach().clone())
    assert differences(plain("torch"), training.result) == []


def test_validations_between_micro_batches_leave_no_tokens() -> None:
    plan, budget = planned("torch", 0.3)
    training = Training("torch")
    other = batches([((5, 24),)])[0][0]

    def validate(model: nn.Module) -> None:
        with torch.no_grad():
            model(**other)

    training.between = validate
    training.run(plan, 2 * budget, flat())
    assert differences(plain("torch"), training.result) == []


LARGE: Sequence[Sequence[Shape]] = (((5, 24), (6, 24)), ((7, 24),), ((8, 24), (2, 9), (9, 24)))


def test_batches_with_more_tokens_than_planned_find_room() -> None:
    plan, budget = planned("torch", 1.0)
    training = Training("torch")
    training.run(plan, 8 * budget, flat(LARGE))
    assert differences(plain("torch", LARGE), training.result) == []


def test_a_batch_may_have_more_tokens_than_the_table_has_rows() -> None:
    plan, budget = planned("torch", 0.3, rows=models.VOCAB)
    training = Training("torch", rows=models.VOCAB)
    training.run(plan, budget, flat(rows=models.VOCAB))
    assert differences(plain("torch", rows=models.VOCAB), training.result) == []


@pytest.mark.parametrize("maker", ["torch", "noise"])
def test_parts_of_micro_batches_add_their_gradients_as_in_a_plan_for_whole_tensors(maker: str) -> None:
    plan, budget = planned(maker, 0.3, parts=2)
    settings = Settings(planner="greedy", memory=2 * budget, accumulate=3)
    whole = make_plan(measured(maker, parts=2), settings)
    assert plan.parts == 2
    assert not any(op.rows for op in whole.ops)
    windows = (((5, 24), (5, 24), (4, 24)), ((5, 24),))
    results = []
    for found in (whole, plan):
        training = Training(maker)
        training.run(found, 2 * budget, flat(windows))
        results.append(training.result)
    assert differences(*results) == []


def test_squares_of_gradients_are_those_of_sums() -> None:
    plan, budget = planned("torch", 0.3)
    whole = make_plan(measured("torch"), Settings(planner="greedy", memory=2 * budget, accumulate=3))
    norms = []
    for found in (plan, whole):
        training = Training("torch")
        training.norms = []
        training.run(found, 2 * budget, flat())
        norms.append(training.norms)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert len(norms[0]) == len(WINDOWS)


def test_a_use_of_other_rows_in_one_micro_batch_is_an_error() -> None:
    plan, budget = planned("torch", 1.0)
    training, calls = Training("torch"), 0
    table = training.model.get_input_embeddings()
    plainly = type(table).forward

    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        x: torch.Tensor = plainly(self, ids)
        return x + self.weight[-1] if calls == 2 else x

    table.forward = forward.__get__(table)
    with pytest.raises(UnsupportedError, match=r"embed_tokens\.weight is used in another way.*planner='greedy'"):
        training.run(plan, budget, flat())


def slow(found: Profile) -> Profile:
    """The same model beside slow links and a slow host."""
    hardware = replace(found.hardware, h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
    return replace(found, hardware=hardware, optimizer=replace(found.optimizer, host_bytes_per_s=3e7))


@pytest.mark.parametrize(("accumulate", "delayed"), [(2, False), (2, True)])
def test_the_planner_takes_two_parts_where_that_is_faster(accumulate: int, delayed: bool, tmp_path: Path) -> None:
    found, budget = slow(measured("masters")), planned("masters", 0.3)[1] * 4 // 5
    settings = Settings(memory=budget, accumulate=accumulate, delayed=delayed)
    plan = make_plan(found, settings)
    whole = make_plan(replace(found, tensors=tuple(replace(t, lookup_bytes=0) for t in found.tensors)), settings)
    assert any(op.rows for op in plan.ops)
    assert plan.predicted.iteration_s < whole.predicted.iteration_s
    assert check(plan, found) == []
    assert plan.predicted.host_peak_bytes <= plan.host_budget_bytes
    assert any("two parts" in note for note in plan.notes)
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    training = Training("masters")
    training.clip_norm = 0.1 if delayed else None
    training.run(plan, budget, flat())
    assert differences(plain("masters", clip_norm=training.clip_norm), training.result) == []


@pytest.mark.own_plan("is about a plan that fetches the table early")
def test_the_planner_takes_two_parts_also_where_the_next_iteration_fetches_the_table() -> None:
    found = slow(measured("masters"))
    table = table_of(found)
    assert table is not None
    budget = make_plan(as_head(found, table), Settings(planner="stream")).predicted.device_peak_bytes * 7 // 10
    plan = make_plan(found, Settings(memory=budget))
    whole = make_plan(
        replace(found, tensors=tuple(replace(t, lookup_bytes=0) for t in found.tensors)), Settings(memory=budget)
    )
    assert plan.predicted.iteration_s < 0.9 * whole.predicted.iteration_s
    rows = {op.id for op in plan.ops if op.updates_on_host and op.rows == "looked up"}
    (fetch,) = (op for op in plan.ops if op.kind == "prefetch" and table in plan.tensors(op))
    assert fetch.step < len(plan.options)
    assert rows.intersection(fetch.after)
    training = Training("masters")
    training.run(plan, budget, flat(ONE_BY_ONE))
    assert differences(plain("masters", ONE_BY_ONE), training.result) == []


BROKEN: dict[str, tuple[int, Callable[[Op], Op]]] = {
    "an update of all rows at once": (1, lambda op: replace(op, rows=None) if op.kind == "update" else op),
    "both parts alike": (1, lambda op: replace(op, rows="others") if op.rows else op),
    "not read directly": (1, lambda op: replace(op, zero_copy=(), bytes=0) if op.kind == "forward" else op),
    "not after the other rows": (1, lambda op: replace(op, after=()) if op.rows == "looked up" else op),
    "a lookup that waits for nothing": (1, lambda op: replace(op, after=()) if op.zero_copy else op),
    "rows that are added up as a whole": (3, lambda op: replace(op, rows=None) if op.kind == "accumulate" else op),
    "not after the sum of other rows": (
        3,
        lambda op: replace(op, after=()) if op.kind == "accumulate" and op.rows == "looked up" else op,
    ),
    "a sum that begins before the last update of rows": (
        3,
        lambda op: replace(op, after=()) if op.rows == "others" and op.sends_gradients else op,
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_plan_in_two_parts_that_is_broken_is_refused(what: str) -> None:
    window, change = BROKEN[what]
    plan, _ = planned("torch", 0.3, window=window)
    assert check(plan, measured("torch")) == []
    assert check(replace(plan, ops=tuple(map(change, plan.ops))), measured("torch"))


@pytest.mark.parametrize("which", ["beginning", "accumulating"])
def test_rows_that_only_one_pass_adds_up_are_refused(which: Any) -> None:
    plan, _ = planned("torch", 0.3)
    ops = [
        replace(op, passes=(which,)) if op.kind == "accumulate" and op.rows == "looked up" else op for op in plan.ops
    ]
    assert check(replace(plan, ops=tuple(ops)), measured("torch"))
