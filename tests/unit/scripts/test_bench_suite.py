"""The bench against other systems: its rows, limits and tables on made-up processes, and once the whole of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lt_offload import InfeasibleError, OverBudget, UnsupportedError
from lt_offload.plan.settings import PLANNERS
from scripts.bench import child, rows, workloads
from scripts.bench.contenders.case import Case
from scripts.bench.watch import Limits, Outcome, watch
from tests.support.bench_samples import ASKED, measured

PLENTY = Limits(seconds=1200.0, host_bytes=1 << 40)


def run(code: str, tmp_path: Path, limits: Limits = PLENTY, meter: Callable[[], int] | None = None) -> Outcome:
    return watch([sys.executable, "-c", code], limits, log=tmp_path / "log.txt", meter=meter)


# -- processes and what became of them ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_raises_is_a_row_with_the_last_line_it_wrote(tmp_path: Path) -> None:
    outcome = run("import sys; print('noise', file=sys.stderr); raise RuntimeError('no such kernel')", tmp_path)
    row = rows.make(ASKED, None, outcome, {"phases": [["starting", 1.0], ["step 1", 3.5]]})
    assert (outcome.code, outcome.ended) == (1, "")
    assert row["status"] == "failed"
    assert row["message"] == "exit code 1 in phase 'step 1'; RuntimeError: no such kernel"
    assert row["phases"] == {"starting": 2.5}
    assert row["budget_bytes"] == 1000


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    outcome = run("import signal; signal.pause()", tmp_path, Limits(seconds=0.3, host_bytes=1 << 40))
    row = rows.make(ASKED, None, outcome, {"phases": [["planning", 1.0]]})
    assert (row["status"], row["message"]) == ("time limit", "ended in phase 'planning'")


@pytest.mark.slow
def test_a_process_that_takes_too_much_memory_is_ended_with_its_children(tmp_path: Path) -> None:
    greedy = "b = bytearray(b'x') * (400 << 20); import signal; signal.pause()"
    start = f"child = subprocess.Popen([sys.executable, '-c', {greedy!r}])"
    code = f"import subprocess, sys; {start}; print(child.pid, flush=True); child.wait()"
    outcome = run(code, tmp_path, Limits(seconds=1200, host_bytes=200 << 20))
    row = rows.make(ASKED, None, outcome, {})
    assert (row["status"], row["message"]) == ("out of host memory", "ended")
    assert 200 << 20 < row["host_peak_bytes"] < 2 << 30
    child = int(outcome.tail.split()[0])
    for _ in range(1000):
        if not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("its child still runs")


@pytest.mark.slow
def test_the_driver_s_figure_counts_what_is_above_the_start(tmp_path: Path) -> None:
    readings, read = [500, 700, 1900], tmp_path / "read"

    def meter() -> int:
        if not readings:
            read.touch()
        return readings.pop(0) if readings else 600

    waits = f"import pathlib, time\nwhile not pathlib.Path({str(read)!r}).exists(): time.sleep(0.01)"
    outcome = run(waits, tmp_path, meter=meter)
    assert outcome.device_peak_bytes == 1400
    answer = {"status": "ok", "allocator_peak_bytes": 1200}
    row = rows.make(ASKED, answer, outcome, {"context_bytes": 50})
    assert (row["device_peak_bytes"], row["device_peak_by"]) == (1400, "driver")
    assert row["allocator_peak_bytes"] == 1200
    assert row["within_budget"] is False
    blind = Outcome(code=0, ended="", seconds=1.0, host_peak_bytes=1, device_peak_bytes=None, tail="")
    row = rows.make(ASKED, {"status": "ok", "allocator_peak_bytes": 900}, blind, {"context_bytes": 50})
    assert (row["device_peak_bytes"], row["device_peak_by"]) == (950, "allocator and context")
    assert row["within_budget"] is True


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (OverBudget("an arena does not fit"), "out of memory"),
        (RuntimeError("Error out of memory at line 380 in file pythonInterface.cpp"), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of host memory"),
        (MemoryError(), "out of host memory"),
        (InfeasibleError("too small"), "infeasible"),
        (UnsupportedError("planner does not apply"), "unsupported"),
        (ModuleNotFoundError("No module named 'lt_offload.plan.new'", name="lt_offload.plan.new"), "failed"),
        (ZeroDivisionError("division by zero\nmore"), "failed"),
    ],
)
def test_failures_are_told_apart(error: Exception, status: str) -> None:
    assert child.status_of(error) == status
    assert "\n" not in child.first_line(error)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_losses_are_compared_with_those_of_the_same_model_without_offload() -> None:
    reference = measured(contender="no-offload", budget_bytes=None)
    equal, near, other = measured(), measured(losses=[3.0, 2.25]), measured(model="another")
    rows.compare_losses([near, equal, other, reference])
    assert (equal["losses_equal"], equal["loss_difference"]) == (True, 0.0)
    assert (near["losses_equal"], near["loss_difference"]) == (False, 0.25)
    assert "losses_equal" not in other
    nan = measured(losses=[3.0, None])
    rows.compare_losses([reference, nan])
    assert (nan["losses_equal"], nan["loss_difference"]) == (False, None)


@pytest.mark.parametrize("config", ["llama2-7b", "bloom-3b", "phi3-mini"])
def test_a_model_is_the_same_in_every_process_and_ties_are_kept(config: str, tmp_path: Path) -> None:
    (workload,) = (w for w in workloads.workloads("papers", "cpu") if w.config == config)
    case = Case(
        workload=workload,
        device="cpu",
        budget_bytes=None,
        host_bytes=1 << 40,
        folder=tmp_path,
        progress=tmp_path / "progress.json",
        steps=2,
    )
    first, second = case.model(), case.model()
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert not a.is_meta
        assert a.dtype is case.dtype
        assert torch.equal(a, b), name
    tied = first.get_input_embeddings().weight is first.get_output_embeddings().weight
    assert tied is bool(workload.settings["tie_word_embeddings"])
    losses = [first(**batch).loss.item() for batch in case.batches()]
    assert losses[0] != losses[1]
    assert 3 < losses[0] < 8, "about the logarithm of the vocabulary"
    assert [name for name, _ in json.loads(case.progress.read_text())["phases"]] == ["building the model"] * 2


# -- the whole of it ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_bench_runs_on_the_emulated_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.suite", "--device", "cpu", "--out", str(tmp_path), "--steps", "1"]
    ran = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    plain, auto, fsdp2, transformers = json.loads((tmp_path / "bench-small-emulated.json").read_text())["figures"][
        "rows"
    ]
    assert (plain["status"], auto["status"], fsdp2["status"]) == ("ok", "ok", "ok"), (auto, fsdp2)
    assert plain["losses"] == auto["losses"] == fsdp2["losses"]
    assert transformers["status"] == "unsupported"
    assert "not run here: needs a GPU" in transformers["message"]
    assert len(set(plain["losses"])) == 3
    assert auto["losses_equal"] is True
    assert 0 < auto["device_peak_bytes"] <= auto["budget_bytes"] == 2_600_000
    assert auto["plan"]["lower_bound_s"] <= auto["plan"]["predicted_s"]
    assert auto["plan"]["planner"] in PLANNERS
    assert auto["tokens"] == plain["tokens"] == 32
