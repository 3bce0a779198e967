"""Tables and the curve of the bench against other systems, from made-up rows; gaps to the bound; what was tried."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from lt_offload.plan.planners.offmate.program import lower_bound
from scripts import tables
from scripts.bench import planner
from scripts.bench.contenders import tables as contender_tables
from scripts.breadth import tables as breadth
from scripts.docs import figures
from scripts.simulated import near_floor
from tests.support.bench_samples import GB, HARDWARE, marked_pages, measured
from tests.support.profiles.random_decisions import random_decisions
from tests.support.profiles.tiny import fastest_plans, tiny_profile

PLAN = {"predicted_s": 1.02, "lower_bound_s": 0.98}
FOUND = [
    measured(contender="no-offload", title="no offload", budget_bytes=None, step_s=0.9, tokens_per_s=111.1),
    measured(budget_bytes=8 * GB, device_peak_bytes=7 * GB, within_budget=True, plan=PLAN, losses_equal=True),
    measured(
        contender="fsdp2",
        title="FSDP2",
        budget_bytes=8 * GB,
        step_s=2.0,
        tokens_per_s=50.0,
        device_peak_bytes=9 * GB,
        within_budget=False,
        loss_difference=0.00123,
    ),
    measured(contender="torchao", title="torchao", budget_bytes=8 * GB) | {"status": "out of memory", "message": "x"},
    measured(budget_bytes=16 * GB, tokens_per_s=108.0, plan=PLAN),
]


def stored(folder: Path, suite: str, device: str = "cuda") -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"suite": suite, "device": device}
    document = {
        "kind": "bench",
        "date": "2025-01-31",
        "commit": "abc1234",
        "settings": settings,
        "figures": {"rows": FOUND},
        **HARDWARE,
    }
    (folder / f"bench-{suite}.json").write_text(json.dumps(document))
    return folder


def test_tables_show_ratios_and_failures(tmp_path: Path) -> None:
    block = tables.bench(tables.read(stored(tmp_path, "small"))["bench"])
    assert (
        "(`python -m scripts.bench.suite --suite small`; Some GPU, torch 2.11.0, 2025-01-31 at commit abc1234)" in block
    )
    lines = [line for line in block.splitlines() if line.startswith("| m, ")]
    assert lines == [
        "| m, all memory | no offload | 111 | 900 ms | 1.00 |  |  |  |  | 2 GB |  |",
        "| m, 8 GB | lt_offload, auto | 100 | 1 s | 0.90 | 2.00 | 1.02 s | 980 ms | 7 GB | 2 GB | equal |",
        "| m, 8 GB | FSDP2 | 50 | 2 s | 0.45 |  |  |  | 9 GB (over the budget) | 2 GB | Δ 1.2e-03 |",
        "| m, 8 GB | torchao | out of memory |  |  |  |  |  |  |  |  |",
        "| m, 16 GB | lt_offload, auto | 108 | 1 s | 0.97 |  | 1.02 s | 980 ms |  | 2 GB |  |",
    ]
    assert len({line.count("|") for line in block.splitlines() if line.startswith("|")}) == 1


def test_nothing_is_shown_that_did_not_run_on_a_gpu(tmp_path: Path) -> None:
    assert tables.bench(tables.read(stored(tmp_path, "small", device="cpu"))["bench"]) == ""


def test_points_over_the_budget_are_hollow_in_the_curve() -> None:
    rows = [measured(budget_bytes=8 * GB, within_budget=within) for within in (True, False)]
    drawn = contender_tables.curve({"figures": {"rows": rows}})
    circles = [line for line in drawn.splitlines() if "<circle" in line]
    assert [("over the budget" in line, 'fill="#ffffff"' in line) for line in circles] == [(False, False), (True, True)]


def test_the_curve_is_drawn_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "results", "curve")
    marked_pages(tmp_path)

    def call(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tables.py", "--root", str(tmp_path), *more])
        return tables.main()

    assert call() == 0
    assert call("--check") == 0
    assert "](pictures/bench-curve.svg)" in (tmp_path / "docs" / "gpu.md").read_text()
    picture = tmp_path / "docs" / "pictures" / "bench-curve.svg"
    texts = [element.text for element in ElementTree.parse(picture).iter() if element.tag.endswith("text")]
    assert {"8 GB", "16 GB", "no offload", "lt_offload, auto", "FSDP2"} <= set(texts)
    assert "torchao" not in texts, "it has no point"
    picture.write_text("<svg/>")
    assert call("--check") == 1


def test_a_row_that_was_extrapolated_says_so() -> None:
    row = measured(contender="no-offload", title="no offload", budget_bytes=None, extrapolated=True)
    del row["host_peak_bytes"]
    (line,) = contender_tables.rows({"figures": {"rows": [row]}})
    assert line[2] == "100 (extrapolated)"
    assert len(line) == len(contender_tables.HEAD)


def test_a_count_of_optimizers_says_what_else_became_of_some() -> None:
    counts = {"equal": 5, "refused": 2, "differs": 1, "not so": 4}
    result = {
        "machine": {"processor": "Some CPU", "cores": 2, "gpu": None},
        "versions": {"torch": "2.13"},
        "date": "2026-11-24",
        "commit": "abc1234",
        "settings": {"package": "some_optimizers", "version": "1.0"},
        "figures": {"counts": counts},
    }
    assert figures.optimizers([result]).startswith(
        "Of the 8 optimizers of some_optimizers 1.0 that train a small model in a plain loop, 1 end otherwise "
        "(differs), 5 give plain PyTorch's numbers, 2 are refused by name, before training (`python -m scripts.agr"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_bounds_of_whole_tensors_are_higher_and_below_all_plans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = tiny_profile(rng, 2 + seed % 3)
    decisions = (random_decisions(rng, profile) for _ in range(8))
    for plan in fastest_plans(profile, decisions):
        config = near_floor.bound_config(plan, profile)
        whole = near_floor.whole_bound(profile, config)
        assert lower_bound(profile, config) <= whole * (1 + 2 * near_floor.GAP)
        assert whole <= plan.predicted.iteration_s * (1 + 1e-6)


def test_earlier_gaps_are_shown_beside_the_present_ones(tmp_path: Path) -> None:
    case = {"name": "small", "iteration_s": 2.0, "gap": 0.5, "host_peak_bytes": GB, "plan_cpu_s": 4.0}
    runs = [[case, {**case, "name": "gone"}], [{**case, "iteration_s": 3.0, "gap": None}, {**case, "name": "new"}]]
    paths = []
    for number, cases in enumerate(runs):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps({"figures": {"cases": cases}}))
    *_, new, slower, gone = planner.compared(*paths).splitlines()
    assert new.startswith("| new | 2 s | 1.000 |")
    assert slower.startswith("| small | 2 s -> 3 s | 1.500 | 50.0% -> not proved | 1 GB -> 1 GB |")
    assert gone.startswith("| gone | not planned again |")


TRIED = {"versions": {"transformers": "9.9"}, "settings": {"family": "masked"}}


def tried(name: str, *runs: tuple[str, str, str]) -> dict[str, object]:
    return {"name": name, "runs": [dict(zip(("budget", "outcome", "says"), run, strict=True)) for run in runs]}


def test_a_table_counts_what_plain_trains_and_says_what_is_refused() -> None:
    rows = [
        tried("one", ("smallest", "equal", ""), ("recomputing", "equal", "")),
        tried("two", ("smallest", "refused", "UnsupportedError: a | b"), ("recomputing", "equal", "")),
        tried("three", ("plain", "not run", "TypeError")),
    ]
    seen = []

    def section(*args: object) -> str:
        seen.append(args)
        return "THE TABLE"

    text = breadth.table(section, [TRIED | {"figures": {"rows": rows}}])
    ((title, _, _, head, lines),) = seen
    assert "transformers 9.9" in str(title)
    assert lines == [["masked", "2 of 3", "1", "2", "", "1", "2"]]
    assert len(lines[0]) == len(head)
    assert text.startswith("THE TABLE")
    assert "- masked, refused in one of these at least: `two`" in text
    assert text.endswith("in such sizes either: `three`")
    assert breadth.table(section, []) == ""
