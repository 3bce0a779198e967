"""The measuring scripts: their parts on hand-made results, and each of them once on a tiny model."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lt_offload import simulate
from lt_offload.cli.main import main
from lt_offload.schema.trace import Span
from scripts import common, compare, planning, smallest_budget, tables
from scripts.bench import emulated
from scripts.docs import figures
from scripts.overlap import overlap
from tests.support import tiny
from tests.support.bench_samples import marked_pages
from tests.support.samples import make_profile

MACHINE = {"processor": "Some CPU", "cores": 2, "ram_bytes": 1, "gpu": None, "threads": 2, "system": "Linux"}
MADE = {"date": "2025-01-31", "commit": "abc1234", "machine": MACHINE, "versions": {"torch": "2.11.0"}}
COMPARE = {
    "settings": {"recipe": "quickstart", "steps": 20},
    "figures": {
        "difference": {"loss": 0.0, "weights": 0.0, "optimizer": 1.5e-8},
        "time_ratio": 1.234,
        "stock": {"device_peak_bytes": 2_500_000_000},
        "offmate": {"device_peak_bytes": 430_000_000},
    },
}
BENCH = {
    "settings": {"model": "Llama"},
    "figures": {
        "cases": [
            {"name": "plain", "step_s": 1.0, "ratio": 1.0, "goal": None, "device_peak_bytes": 10**9},
            {
                "name": "streamed",
                "step_s": 1.05,
                "ratio": 1.05,
                "goal": 1.6,
                "device_peak_bytes": 10**9,
                "lanes": {
                    "compute": {"busy_s": 1.0},
                    "h2d": {"busy_s": 0.5, "beside_compute": 0.937},
                    "d2h": {"busy_s": 0.5, "beside_compute": 0.5},
                    "host": {"busy_s": 0.0, "beside_compute": None},
                },
            },
        ],
    },
}
PREDICTIONS = {
    "figures": {
        "cases": [
            {
                "name": name,
                "shape": [4, 128],
                "budget_bytes": 10**9,
                "step_s": 0.5,
                "first_error": -0.2,
                "corrections": 1,
                "last_error": error,
                "goal": 0.1,
            }
            for name, error in (("near", 0.012), ("far", -0.23))
        ]
    }
}
CLIPPING = {
    "figures": {
        "cases": [
            {
                "window": window,
                "goal": 1.03,
                "step_s": 1.5,
                "plain_step_s": 1.0,
                "clipping": ratio,
                "clipping_worst": 1.5,
                "plain_clipping": 1.01,
            }
            for window, ratio in ((2, 1.02), (4, 1.25))
        ]
    }
}
GAPS = {
    "figures": {
        "cases": [
            {"iteration_s": 6.0 * (1 + (gap or 0)), "no_offload_s": 6.0, "gap": gap} for gap in (0.01, None, 0.25)
        ]
    }
}
LEARNT = {
    "steps": 20,
    "train_loss": [[10, 2.0], [20, 1.5]],
    "val_loss": [[0, 2.1], [20, 1.75]],
    "step_s": 1.5,
}
QUALITY = {
    "settings": {"data": "some_rows.json", "method": "lora"},
    "figures": {"equal": {"weights": True, "answers": False}, "stock": LEARNT | {"step_s": 1.0}, "offmate": LEARNT},
}
KINDS = {
    "bench-gaps": GAPS,
    "compare": COMPARE,
    "bench-emulated": BENCH,
    "bench-predictions": PREDICTIONS,
    "bench-clipping": CLIPPING,
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    for kind, result in KINDS.items():
        document = {"kind": kind} | MADE | result
        (folder / f"{kind}.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def root(results: Path) -> Path:
    """A repository with the pages that have blocks of figures."""
    above = results.parent
    marked_pages(above)
    document = {"kind": "quality"} | MADE | QUALITY
    (results / "quality-some-lora.json").write_text(json.dumps(document))
    return above


def test_pages_are_written_and_checked(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tables.py", "--root", str(root), *options])
        return tables.main()

    assert run("--check") == 1
    assert capsys.readouterr().err.count("out of date") == 7
    page = root / "docs" / "faq.md"
    assert "old" in page.read_text()
    assert run() == 0
    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- home -->\n\n")
    assert text.endswith("\n\n<!-- /quality -->\n\nmore\n")
    readme = (root / "README.md").read_text()
    assert "| 0 | 1.5e-08 | `python -m scripts.compare quickstart` |" in readme
    assert "| 1.05 | 1.50 | and `python -m scripts.bench.emulated`, with `--clipping` |" in readme
    assert "| +1.2% | -23.0% |" in readme
    assert "Made on Some CPU, 2 cores, torch 2.11.0, 2025-01-31 at commit abc1234." in readme
    assert "| float16 weights | load the model in bfloat16 or float32 |" in (root / "docs" / "limits.md").read_text()
    assert "| `some_rows.json` | lora | 20 | 2.100 | 1.750 | not in answers | 1.50 |" in text
    assert run("--check") == 0
    (root / "results" / "compare.json").unlink()
    assert run("--check") == 1


def test_the_table_of_what_fits(tmp_path: Path) -> None:
    cards = [{"name": "small", "bytes": 8 << 30}, {"name": "large", "bytes": 24 << 30}]
    row = {"way": "all", "card": "small", "reason": "more than 128GB of RAM", "iteration_s": None}
    fitting = {"way": "all", "card": "large", "iteration_s": 3.0, "no_offload_s": 2.0, "host_peak_bytes": 64e9}
    settings = {"cards": cards, "ways": ["all"], "batch": [4, 512], "model": "m"}
    result = MADE | {"settings": settings}
    block = figures.fits([result | {"figures": {"cases": [fitting, row]}}])
    assert "| model | 8 GiB, small | 24 GiB, large |" in block
    assert "| `m` | no: more than 128GB of RAM | 3 s (1.50), 64 GB RAM |" in block
    assert "**Simulated**, 4 x 512 tokens, by `python -m scripts.docs.fits` (Some CPU, 2 cores" in block


def test_what_is_trained_at_home_is_what_was_planned_for_such_a_machine() -> None:
    plan = {"title": "A model", "samples": 16, "sequence_length": 256, "iteration_s": 3.0}
    plan |= {"device_peak_bytes": 7e9, "host_peak_bytes": 20e9}
    machines = {"large": "rtx-3090,ram=32GB", "rich": "rtx-3060,ram=64GB", "home": "rtx-3060,ram=32GB"}
    block = figures.home([MADE | {"figures": {name: plan | {"hardware": card} for name, card in machines.items()}}])
    assert "| `home` | A model | `rtx-3060` | 7 GB | 20 GB | 3 s |" in block
    assert "`large`" not in block
    assert "`rich`" not in block
    assert "**Simulated**, by `python -m scripts.recipes.headers` (Some CPU, 2 cores" in block
    assert block.endswith("An update has 16 x 256 tokens.")


def test_the_pages_of_this_repository_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"page\.md has no lines"):
        tables.insert("<!-- /numbers --> <!-- numbers -->", "numbers", "x", "page.md")


def test_results_carry_machine_versions_date_and_commit(tmp_path: Path) -> None:
    path = common.save("name", "compare", {"steps": 1}, {"loss": 0.5}, tmp_path / "new")
    result = json.loads(path.read_text())
    assert path.name == "name.json"
    assert (result["kind"], result["settings"], result["figures"]) == ("compare", {"steps": 1}, {"loss": 0.5})
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["processor"]
    assert result["versions"]["torch"][0].isdigit()
    assert len(result["date"]) == 10
    assert result["commit"].partition("-dirty")[0].isalnum()


CHILD = """
from scripts.common import in_child, serve_child

def double(value):
    print("noise")
    return {"twice": 2 * value}

def fail():
    raise RuntimeError("no")

if __name__ == "__main__":
    serve_child(double, fail)
"""


def test_jobs_run_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = common.in_child("program", "double", value=21)
    assert answer == {"twice": 42}
    assert capfd.readouterr().out == ""
    with pytest.raises(SystemExit, match=r"program: fail failed \(exit code 1\)"):
        common.in_child("program", "fail")


def test_the_largest_difference_is_found_wherever_it_is() -> None:
    left = {"state": {0: {"exp_avg": torch.tensor([1.0, 2.0]), "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]}
    right = copy.deepcopy(left)
    assert compare.largest_difference(left, right) == 0
    right["state"][0]["exp_avg"][1] += 0.25
    assert compare.largest_difference(left, right) == 0.25
    right["groups"][0]["lr"] = 1.1
    assert compare.largest_difference(left, right) == 1.0


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([1.0, float("nan")])},
        {"w": torch.tensor([1.0])},
        {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"w": torch.tensor([1.0, 2.0]), "more": 1},
        {"w": "text"},
    ],
    ids=["not a number", "shape", "dtype", "keys", "type"],
)
def test_what_cannot_be_compared_is_not_called_equal(other: dict[str, Any]) -> None:
    assert compare.largest_difference({"w": torch.tensor([1.0, 2.0])}, other) is None


def test_the_plain_run_gets_no_settings_of_the_strategy() -> None:
    given = ["--trainer.strategy.memory", "1GB", "--model.lr=1", "--trainer.strategy=x", "--data.pack", "false"]
    assert compare.without_strategy(given) == ["--model.lr=1", "--data.pack", "false"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of a tiny random model on a little text."""
    model = tiny.model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    path = tmp_path / "tiny.yaml"
    settings = {
        "base": "configs/base.yaml",
        "trainer": {"accelerator": "cpu"},
        "model": {"name": str(model), "lr": 0.01},
        "data": {"path": str(tmp_path / "text.txt"), "max_length": 32, "batch_size": 2},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def test_compare_trains_both_ways_and_finds_no_difference(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(command: list[str]) -> int:
        """Run the command in this process: most of its time would be imports."""
        assert command[1:3] == ["-m", "lt_offload.cli.main"]
        return main(command[3:])

    monkeypatch.setattr(common, "_run", here)
    results = tmp_path / "results"
    program = ["compare", str(recipe), "--steps", "3", "--results", str(results)]
    monkeypatch.setattr(sys, "argv", [*program, "--trainer.strategy.memory", "400kB"])
    assert compare.main() == 0
    assert "largest difference in optimizer: 0" in capsys.readouterr().out
    result = json.loads((results / "compare-tiny.json").read_text())
    figures = result["figures"]
    assert figures["difference"] == {"loss": 0, "weights": 0, "optimizer": 0}
    assert figures["stock"]["losses"] == figures["offmate"]["losses"]
    assert len(set(figures["stock"]["losses"])) == 3, "a model that learns nothing proves nothing"
    assert "plan" not in figures["stock"]
    assert figures["offmate"]["plan"]["budget_bytes"] == 400_000
    assert 0 < figures["offmate"]["device_peak_bytes"] <= 400_000 < figures["stock"]["device_peak_bytes"]


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.12], ids=["runs in less", "honest", "too low"])
def test_smallest_budget_is_found_wherever_the_floor_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    profile = make_profile(layers=4, tensors_per_layer=2)
    floor = planning.floor_bytes(profile)
    needed = round(factor * floor)
    tried: list[int | None] = []

    def machine(recipe: str, folder: Path, steps: int, settings: list[str], **options: bool) -> int:
        memory = settings[settings.index("--trainer.strategy.memory") + 1]
        tried.append(None if memory == "null" else int(memory))
        profile.save(folder / "profile.json")
        (folder / "figures.json").write_text(json.dumps({"device_peak_bytes": needed - 1}))
        return int(memory != "null" and int(memory) < needed)

    monkeypatch.setattr(smallest_budget, "run_recipe", machine)
    monkeypatch.setattr(sys, "argv", ["smallest_budget.py", "recipes/some.yaml", "--results", str(tmp_path)])
    assert smallest_budget.main() == 0
    figures = json.loads((tmp_path / "smallest-budget-some.json").read_text())["figures"]
    assert tried[:2] == [None, floor]
    assert (figures["floor_bytes"], figures["measured_peak_bytes"]) == (floor, needed - 1)
    assert needed <= figures["runs_bytes"] <= 1.011 * needed
    assert min(size for size in tried if size) < needed, "nothing smaller was tried"


def test_overlap_is_what_ran_beside_computations() -> None:
    profile = make_profile(layers=2, tensors_per_layer=1)
    plan = planning.stream_all(profile)
    fetch = next(op for op in plan.ops if op.kind == "prefetch")
    leave = next(op for op in plan.ops if op.kind == "offload")
    update = next(op for op in plan.ops if op.kind == "update")
    spans = [
        Span(op=0, lane="compute", label="", start=0.0, end=1.0),
        Span(op=0, lane="compute", label="", start=2.0, end=3.0),
        Span(op=fetch.id, lane="h2d", label="", start=0.5, end=1.5),
        Span(op=leave.id, lane="d2h", label="", start=1.0, end=2.0),
        Span(op=update.id, lane="host", label="", start=2.5, end=3.0),
    ]
    trace = replace(simulate(plan, profile), spans=tuple(spans))
    found = overlap(trace, plan, profile)
    assert found["compute"] == {"busy_s": 2.0}
    assert found["h2d"] == {
        "busy_s": 1.0,
        "beside_compute": 0.5,
        "bytes_per_s": fetch.bytes,
        "beside_other_direction": 0.5,
    }
    assert found["d2h"]["beside_compute"] == 0.0
    assert found["host"]["beside_compute"] == 1.0
    assert found["host"]["bytes_per_s"] == 2 * sum(profile.tensors[t].bytes for t in plan.tensors(update))


def test_the_bench_on_the_emulated_device_measures_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"device_peak_bytes": 5, "plan": None, "lanes": None}
    asked: list[tuple[str, int | None]] = []

    def child(program: str, job: str, **arguments: Any) -> dict[str, Any]:
        if job == "make_plans":
            assert arguments["links"] == [10**9, 4 * 10**9]
            return {"model": "Llama", "blocks": 3}
        asked.append((arguments["case"], arguments["link"]))
        return figures | {"steps_s": [2.0, 1.0, 1.5] if arguments["case"] == "plain" else [3.0]}

    monkeypatch.setattr(emulated, "in_child", child)
    options = ["--small", "--rounds", "2", "--links", "1GB,4GB", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_emulated.py", *options])
    assert emulated.main() == 0
    cases = ["plain", "resident", "streamed", "link 1 GB per s", "link 4 GB per s"]
    assert asked == [*zip(cases, [None, None, None, 10**9, 4 * 10**9], strict=True)] * 2
    result = json.loads((tmp_path / "bench-emulated-small.json").read_text())
    assert [(case["name"], case["ratio"]) for case in result["figures"]["cases"]] == [
        (case, 1.0 if case == "plain" else 2.0) for case in cases
    ]
    assert "link 4 GB per s" in capsys.readouterr().out


def test_what_fits_is_told_by_ram() -> None:
    found = (("LoRA", None, "16GB"), ("LoRA", 2.0, "32GB"), ("All", None, "16GB"), ("All", None, "32GB"))
    rows = [{"way": way, "ram": ram, "iteration_s": seconds} for way, seconds, ram in found]
    settings = {"model": "tiny", "card": "rtx-3060-12gb", "rams": ["16GB", "32GB"], "ways": ["All", "LoRA"]}
    settings |= {"batch": [4, 512], "left": 0.9}
    result = MADE | {"settings": settings}
    said = figures.by_ram([result | {"figures": {"rows": rows}}]).splitlines()
    assert said[2:4] == ["| `tiny` | LoRA | no | yes |", "| `tiny` | All | no | no |"]
    assert "90% of the RAM" in said[-1]
