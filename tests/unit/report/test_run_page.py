"""The report of a run, from its folder: with a plan and without, finished and not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lt_offload.report.drawing import MAX_POINTS, Line, smoothed, thinned
from lt_offload.report.run_page import write_run_report
from lt_offload.report.runs import write_part
from tests.support.reports.pages import Page, content, figures, plain
from tests.support.reports.run_folders import ENDED, make_run, rows, write_metrics


def report(folder: Path) -> str:
    path = write_run_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def test_a_run_with_a_plan(tmp_path: Path) -> None:
    html = report(make_run(tmp_path / "run"))
    assert not re.search(r"https?://|@import|url\(", content(html))
    Page(html)
    text = plain(html)
    for said in (
        "smollm2-135m-instruct in 440 MB training report · 40 steps",
        "The loss on held-out data went from 3.5000 to 1.2109.",
        "One iteration took 1.83 s, 1.01 times the planned 1.81 s.",
        "Held-out loss 1.211 3.500 at step 0",
        "Tokens per second 579.5 429.5 of them trained on",
        "Device peak 423 MB of 440 MB allowed",
        "RAM peak 2.29 GB of 24 GB allowed; the process 3 GB",
        "The whole run took 100 s. 40,960 real tokens were seen, 30,000 of them trained on.",
        "validation 10 s (10%)",
        "torch 2.13.0",
        "ram 64 GB",
        "callbacks ModelCheckpoint",
    ):
        assert said in text
    drawn = figures(html)
    assert set(drawn) >= {"Loss", "Learning rate", "Gradient norm", "Tokens per second", "Step time", "Device memory"}
    loss = {trace["name"]: trace for trace in drawn["Loss"]["data"]}
    assert loss["training, each step"]["y"] == [row["train_loss"] for row in rows(0, 40) if "train_loss" in row]
    assert loss["held out"]["x"] == [0, 10, 20, 30, 40]
    assert [trace["name"] for trace in drawn["Device memory"]["data"]] == ["Device memory", "budget 440 MB"]
    assert drawn["Device memory"]["data"][1]["y"] == [440, 440]
    assert "planned 1.81 s" in [trace["name"] for trace in drawn["Step time"]["data"]]


def test_differences_of_times_are_explained(tmp_path: Path) -> None:
    text = plain(report(make_run(tmp_path / "run"))).split("Planned and measured")[1].split("Where the time")[0]
    assert re.search(r"planned iteration \d+ ms the plan, simulated", text)
    assert re.search(r"drawn iteration 673 ms \+\d+ ms the last .*, as recorded: the device (computes|waits) \d", text)
    assert re.search(r"median iteration 1.83 s \+1.16 s median of all .* 8 of 10 took 1.83 s to 1.83 s", text)
    assert "median step 1.85 s +20 ms the loss read back" in text
    assert "from start to start 1.9 s +50 ms the next batch" in text


def test_a_run_without_a_plan_shows_what_is_known(tmp_path: Path) -> None:
    html = report(make_run(tmp_path / "run", planned=False))
    text = plain(html)
    assert "One step took 1.85 s; there was no plan." in text
    assert "RAM peak 3 GB of the process" in text
    assert "The gradient norm was not logged" in text
    assert "Planned and measured" not in text
    assert set(figures(html)) == {"Loss", "Learning rate", "Tokens per second", "Step time"}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (replace(ENDED, last_step=7, ended="interrupted"), "The run was interrupted after step 7; --resume goes on"),
        (replace(ENDED, last_step=7, ended="failed", error="E: <b>"), "The run failed after step 7: E: <b>."),
    ],
)
def test_a_run_that_ended_early(tmp_path: Path, part: object, said: str) -> None:
    html = report(make_run(tmp_path / "run", steps=7, part=part))  # type: ignore[arg-type]
    assert said in plain(html).replace("&lt;", "<").replace("&gt;", ">")
    assert "<b>" not in content(html)
    assert len(figures(html)["Loss"]["data"]) == 2, "too few points to be smoothed"


def test_a_run_that_was_killed_or_logs_elsewhere(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    assert "this is as far as it came" in plain(report(folder))
    (folder / "metrics.csv").unlink()
    assert "No metrics were logged" in plain(report(folder))


def test_a_resumed_run_is_one_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", part=replace(ENDED, last_step=20, ended="interrupted"))
    write_metrics(folder / "metrics-1.csv", rows(0, 20))
    write_metrics(folder / "metrics.csv", rows(20, 40))
    write_part(folder, replace(ENDED, first_step=20))
    text = plain(report(folder))
    assert "It was resumed after step 20." in text
    assert "The whole run took 3 min 20 s, in 2 parts. 81,920 real tokens" in text


def test_samples_are_shown_over_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 40, "val_loss": 1.2, "prompt": "other", "text": " text"}) + "\n")
    html = report(folder).split("<h2>Samples</h2>")[1].split("<h2>")[0]
    assert html.count("<blockquote>") == 6
    assert "return &lt;x + 40&gt;\n" in html.split("<details>")[0]
    assert "4 earlier samples" in html
    assert "before training, held-out loss 3.100" in html
    assert '<span class="prompt">other</span> text' in html


def test_a_table_says_what_the_curves_show(tmp_path: Path) -> None:
    html = report(make_run(tmp_path / "run")).split("As a table")[1].split("</table>")[0]
    assert html.count("<tr>") <= 15
    assert re.search(r"<th class=\"n\" scope=\"row\">40</th>.*1.211", html)


def test_many_points_are_thinned_out_and_extremes_stay() -> None:
    values: list[float | None] = [float(i % 7) for i in range(10 * MAX_POINTS)]
    values[1234], values[4321], values[5000] = 99.0, -99.0, None
    xs, ys = thinned(Line(name="", xs=range(len(values)), ys=values))
    assert len(xs) <= MAX_POINTS
    assert {(1234, 99.0), (4321, -99.0)} <= set(zip(xs, ys, strict=True))
    assert list(xs) == sorted(xs)


def test_smoothing_looks_back_only() -> None:
    assert smoothed([]) == []
    assert smoothed([5.0] * 100) == pytest.approx([5.0] * 100)
    step = smoothed([0.0] * 50 + [1.0] * 50)
    assert step[:50] == [0.0] * 50
    assert step[50:] == sorted(step[50:])
    assert step[50] == pytest.approx(0.25)
    assert step[-1] > 0.9
