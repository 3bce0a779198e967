"""Which of several processes is the slowest, as pages and summaries say it."""

from __future__ import annotations

from pathlib import Path

from lt_offload.report.run_page import write_run_report
from lt_offload.report.runs import ProcessTimes, RunPart, read_run, told, write_part
from tests.support.reports.pages import plain

FAST = [ProcessTimes(rank=rank, host="alpha", step_s=1.0, waited_s=0.25) for rank in (0, 1)]
SLOW = ProcessTimes(rank=2, host="beta", step_s=1.0, waited_s=0.001)


def test_the_one_that_others_wait_for_is_named() -> None:
    said = told([*FAST, SLOW])
    assert said.startswith("process 2 on beta is the slowest: its part of a step takes 999 ms, the others' 750 ms;")
    assert said.endswith("process 0 on alpha waits 250 ms of each")


def test_none_is_named_where_none_is_clearly_slower() -> None:
    assert told([]) == ""
    assert told([SLOW]) == "none is slower than all others; they wait 1 ms of a step at most"
    assert told(FAST) == "none is slower than all others; they wait 250 ms of a step at most"


def test_the_page_of_a_run_says_it_and_has_a_table(tmp_path: Path) -> None:
    times = (*FAST, SLOW)
    write_part(tmp_path, RunPart(first_step=0, last_step=4, ended="finished", processes=times))
    (part,) = read_run(tmp_path).parts
    assert part.processes == times
    text = plain(write_run_report(tmp_path).read_text())
    assert f"Of 3 processes {told(times)}." in text
    assert text.index("process 2 on beta 1 s 999 ms 1 ms") < text.index("process 0 on alpha 1 s 750 ms 250 ms")


def test_one_process_has_no_such_table(tmp_path: Path) -> None:
    write_part(tmp_path, RunPart(first_step=0, last_step=4, ended="finished"))
    assert "Processes" not in write_run_report(tmp_path).read_text()
