"""Which of several processes is the slowest, as reports and summaries say it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from lt_offload.report.processes import ProcessTimes, process_table, slowest, told
from lt_offload.report.run_page import write_run_report
from lt_offload.report.runs import RunPart, read_run, write_part

FAST = [ProcessTimes(rank=rank, host="alpha", step_s=1.0, waited_s=0.25) for rank in (0, 1)]
SLOW = ProcessTimes(rank=2, host="beta", step_s=1.0, waited_s=0.001)


def test_the_one_that_others_wait_for_is_named() -> None:
    assert slowest([*FAST, SLOW]) is SLOW
    said = told([*FAST, SLOW])
    assert said.startswith("process 2 on beta is the slowest: its part of a step takes 999 ms, the others' 750 ms;")
    assert said.endswith("process 0 on alpha waits 250 ms of each")


def test_none_is_named_where_none_is_clearly_slower() -> None:
    assert slowest(FAST) is None
    assert slowest([SLOW]) is None
    assert told([]) == ""
    said = told(FAST)
    assert "none is slower than all others" in said
    assert "250 ms" in said


def test_a_run_says_it_in_its_first_lines_and_in_a_table(tmp_path: Path) -> None:
    times = [*FAST, SLOW]
    part = RunPart(first_step=0, last_step=4, ended="finished", processes=[asdict(one) for one in times])
    write_part(tmp_path, part)
    (found,) = read_run(tmp_path).parts
    assert found.times == times
    text = write_run_report(tmp_path).read_text()
    assert "Of 3 processes process 2 on beta is the slowest" in text
    assert process_table(times) in text
    assert process_table(times).index("beta") < process_table(times).index("alpha")


def test_one_process_has_no_such_table(tmp_path: Path) -> None:
    write_part(tmp_path, RunPart(first_step=0, last_step=4, ended="finished"))
    assert "Processes" not in write_run_report(tmp_path).read_text()
