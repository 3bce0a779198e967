"""The report of a run, from its folder: with a plan and without, finished and not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lt_offload.report.page import MAX_POINTS, thinned
from lt_offload.report.run_page import curves, write_run_report
from lt_offload.report.runs import read_run, write_part
from tests.support.reports.pages import Page, content, plain
from tests.support.reports.run_folders import ENDED, make_run, rows, write_metrics


def report(folder: Path) -> str:
    path = write_run_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def titles(folder: Path) -> list[str]:
    return [note.text for note in curves(read_run(folder)).layout.annotations]


def test_a_run_with_a_plan(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    html = report(folder)
    assert not re.search(r"https?://|@import|url\(", content(html))
    Page(html)
    text = plain(html)
    for said in (
        "smollm2-135m-instruct in 440 MB training report · 40 steps",
        "held-out loss, first 3.5000",
        "held-out loss, last 1.2109",
        "tokens/s 579.5",
        "tokens/s that are trained on 429.5",
        "iteration, planned 1.81 s iteration 1.83 s",
        "device budget 440 MB device peak 423 MB RAM budget 24 GB RAM peak 2.29 GB RAM of the process 3 GB",
        "The whole run took 100 s. 40,960 real tokens were seen, 30,000 of them trained on.",
        "validation 10 s 10%",
        "torch 2.13.0",
        "ram 64 GB",
        "trainer.callbacks ModelCheckpoint",
    ):
        assert said in text
    labels = [figure["aria-label"] for figure in Page(html).all("figure")]
    assert "device_peak_gb 0.42 to 0.42" in str(labels[0])


def test_curves_over_steps_with_what_was_planned_and_allowed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    figure = curves(read_run(folder))
    assert titles(folder) == [
        "Loss per token", "Learning rate", "Gradient norm", "Tokens per second", "Step time, planned 1.81 s",
        "Device memory, budget 440 MB", "RAM, budget 24 GB",
    ]  # fmt: skip
    drawn = {trace.name: trace for trace in figure.data}
    assert list(drawn["training"].y) == [row["train_loss"] for row in rows(0, 40) if "train_loss" in row]
    assert drawn["held out"].x == (0, 10, 20, 30, 40)
    assert drawn["peak of device memory"].y[-1] == 420_000_000
    assert [shape.y0 for shape in figure.layout.shapes] == [1.81, 440_000_000, 24_000_000_000]


def test_planned_and_measured_are_subtracted(tmp_path: Path) -> None:
    text = plain(report(make_run(tmp_path / "run"))).split("Planned and measured")[1].split("Where the time")[0]
    assert re.search(r"last iteration \d+ ms 673 ms [+−]\d+ ms", text)
    assert re.search(r"compute, busy \d+ ms \d+ ms [+−][\d.]+ ms", text)
    assert re.search(r"device memory \d+ MB 423 MB [+−][\d.]+ MB", text)
    assert re.search(r"median iteration \d+ ms 1.83 s \+1.2\d? s", text)


def test_a_run_without_a_plan_shows_what_is_known(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", planned=False)
    text = plain(report(folder))
    assert "There was no plan." in text
    assert "RAM of the process 3 GB" in text
    assert "Planned and measured" not in text
    assert titles(folder) == ["Loss per token", "Learning rate", "Tokens per second", "Step time"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (replace(ENDED, last_step=7, ended="interrupted"), "The run was interrupted after step 7; --resume goes on"),
        (replace(ENDED, last_step=7, ended="failed", error="E: <b>"), "The run failed after step 7: E: <b>."),
    ],
)
def test_a_run_that_ended_early(tmp_path: Path, part: object, said: str) -> None:
    html = report(make_run(tmp_path / "run", steps=7, part=part))  # type: ignore[arg-type]
    assert said in plain(html)
    assert "<b>" not in content(html)


def test_a_run_that_was_killed_or_logs_elsewhere(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    assert "this is as far as it came" in plain(report(folder))
    (folder / "metrics.csv").write_text("step,epoch\n0,0\n")
    assert "Training" not in plain(report(folder)).replace("training report", "")
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
    assert html.split("<details>")[0].count("<blockquote>") == 2
    assert "return &lt;x + 40&gt;\n" in html.split("<details>")[0]
    assert "4 before" in html
    assert "before training, held-out loss 3.100" in html
    assert '<span class="prompt">other</span> text' in html


def test_many_points_are_thinned_out_and_extremes_stay() -> None:
    values = [float(i % 7) for i in range(10 * MAX_POINTS)]
    values[1234], values[4321] = 99.0, -99.0
    points = thinned(list(enumerate(values)))
    assert len(points) <= MAX_POINTS
    assert {(1234, 99.0), (4321, -99.0)} <= set(points)
    assert points == sorted(points)
    assert thinned(points[:10]) == points[:10]
