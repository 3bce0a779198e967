"""The budget that every contender of the bench is held to, with torch's CUDA calls replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lt_offload
from lt_offload.machine import driver
from scripts.bench import suite, workloads
from scripts.bench.contenders import case as cases
from scripts.bench.contenders import memory
from scripts.bench.contenders.case import Case, Unsupported
from scripts.bench.contenders.offload import _plan
from scripts.bench.contenders.zero3 import _config
from tests.support.bench_samples import measured

GPU = torch.device("cuda", 0)
WORKLOAD = workloads.workloads("papers", "cuda")[0]
ITEM_BYTES = workloads.BYTES[WORKLOAD.dtype]


class Card:
    """A GPU of 1000 bytes of which others have ``others`` and this process's context ``context``."""

    def __init__(self, others: int = 0, context: int = 100) -> None:
        self.others, self.context, self.reserved, self.fraction = others, context, 0, 1.0
        self.calls: list[str] = []

    def mem_get_info(self, place: torch.device) -> tuple[int, int]:
        return 1000 - self.others - self.context - self.reserved, 1000

    def cap(self, fraction: float, place: torch.device) -> None:
        self.fraction = fraction

    def warm_up(self, place: torch.device) -> None:
        self.calls.append("warm up")

    def segments(self, place: torch.device) -> bool:
        self.calls.append("expandable")
        return True

    def empty(self, nbytes: int, **_: Any) -> int:
        self.reserved += nbytes
        return nbytes


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card()
    monkeypatch.setattr(driver, "warm_up", found.warm_up)
    monkeypatch.setattr(driver, "beside_bytes", lambda place: (found.context, True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", found.mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: found.reserved)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", found.cap)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.calls.append("empty"))
    monkeypatch.setattr(memory.torch, "empty", found.empty)
    monkeypatch.setattr(cases, "use_expandable_segments", found.segments)
    return found


def case(folder: Path, budget: int | None, *, device: str = "cuda", **options: Any) -> Case:
    asked: dict[str, Any] = {"workload": WORKLOAD, "device": device, "folder": folder, "steps": 1, "host_bytes": 900}
    return Case(budget_bytes=budget, progress=folder / "progress.json", **asked, **options)


def test_a_context_that_grows_while_steps_warm_up_takes_from_every_contender(card: Card) -> None:
    budget = memory.Budget(GPU, 500)
    assert card.calls == ["warm up"], "the context is measured with the usual kernels in it"
    assert card.fraction == 0.4
    card.context = 150
    budget.follow()
    assert card.fraction == 0.35
    card.context = 120
    budget.follow()
    assert card.fraction == 0.35
    assert "empty" not in card.calls
    card.context, card.reserved = 200, 340
    budget.follow()
    assert card.calls[-1] == "empty", "what the allocator holds beyond the new limit goes back"


def test_ballast_leaves_the_budget_and_pages_have_room_in_it(card: Card) -> None:
    budget = memory.Budget(GPU, 500, ballast=True, kept_free=50)
    assert (budget.rest, budget.block) == (500, 500)
    assert card.fraction == pytest.approx((500 - 100 - 50 + 500) / 1000)
    assert card.mem_get_info(GPU)[0] == 400


def test_a_card_that_others_have_filled_is_refused(card: Card, tmp_path: Path) -> None:
    card.others = 600
    with pytest.raises(Unsupported, match="300 bytes of the device are free beside the context, for a budget of 500"):
        case(tmp_path, 500).limit(ballast=True)
    assert card.reserved == 0
    with pytest.raises(Unsupported, match="context takes 100 of 100"):
        case(tmp_path, 100).limit()


def test_every_contender_has_the_same_kind_of_segments(card: Card, tmp_path: Path) -> None:
    for budget in (None, 500):
        card.calls.clear()
        case(tmp_path, budget).limit()
        assert card.calls[0] == "expandable"


def test_what_zero_keeps_depends_on_the_budget_if_it_is_tuned(tmp_path: Path) -> None:
    plain, tuned = (
        _config(case(tmp_path, 10 * 10**9, options=options))["zero_optimization"] for options in ({}, {"tuned": True})
    )
    assert tuned.keys() > plain.keys()
    assert tuned["stage3_max_live_parameters"] * ITEM_BYTES == 2_500_000_000
    assert tuned["reduce_bucket_size"] * ITEM_BYTES == 625_000_000


@pytest.mark.parametrize(("given", "expected"), [(False, 7), (True, 900)])
def test_host_memory_that_is_given_counts_whatever_was_measured(
    given: bool, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Profile:
        class hardware:  # noqa: N801
            host_bytes = 7

    asked: dict[str, Any] = {}
    monkeypatch.setattr(lt_offload, "solve", lambda profile, **settings: asked.update(settings))
    _plan(case(tmp_path, 500, device="cpu", host_given=given), Profile, {})  # type: ignore[arg-type]
    assert asked["host_memory"] == expected


def test_a_row_over_the_budget_says_so() -> None:
    row = measured(device_peak_bytes=9 * 10**9, within_budget=False, loss=1.0, seconds=1.0)
    assert "9 GB device (OVER THE BUDGET)" in suite.line(row)
    assert "OVER" not in suite.line(row | {"within_budget": True})
