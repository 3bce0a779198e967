"""Run folders as they are read: parts of resumed runs joined, broken files named, nothing made up."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lt_offload.errors import ConfigError
from lt_offload.report.runs import RunSample, read_parts, read_run, without_later, write_part
from tests.support.reports.run_folders import ENDED, PLAN, make_run, rows, write_metrics


def test_what_a_run_left_behind(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert run.steps == 40
    losses = run.curve("train_loss")
    assert [step for step, _ in losses] == list(range(1, 41))
    assert losses[0][1] == rows(0, 1)[0]["train_loss"]
    assert [step for step, _ in run.curve("val_loss")] == [10, 20, 30, 40]
    assert run.curve("mfu") == ()
    assert run.median("tokens_per_s") == 550 + 29.5
    assert run.settings["trainer.strategy"] == "lt_offload.OffmateStrategy"
    assert run.settings["trainer.strategy.memory"] == "440MB"
    assert run.model == "smollm2-135m-instruct"
    assert run.plan == PLAN
    assert [sample.step for sample in run.samples] == [0, 10, 20, 30, 40]
    assert run.largest("device_peak_bytes") == 423_000_000
    assert run.warnings == ()


def test_steps_that_were_taken_again_count_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write_metrics(folder / "metrics-1.csv", rows(0, 12))
    write_metrics(folder / "metrics-2.csv", rows(10, 25, offset=1))
    write_metrics(folder / "metrics.csv", rows(20, 30, offset=2))
    run = read_run(folder)
    expected = [*rows(0, 10), *rows(10, 20, offset=1), *rows(20, 30, offset=2)]
    for name in ("train_loss", "val_loss", "lr"):
        assert run.curve(name) == tuple((row["step"] + 1, row[name]) for row in expected if name in row)
    assert read_run(folder).steps == 40  # what summary.json says


def test_a_part_that_begins_with_a_validation_leaves_the_step_before_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    whole = read_run(folder)
    first, second = rows(0, 10), rows(10, 40)
    [validation] = [row for row in first if "val_loss" in row and row["step"] == 9]
    write_metrics(folder / "metrics-1.csv", [{k: v for k, v in row.items() if k != "val_loss"} for row in first])
    write_metrics(folder / "metrics.csv", [{k: validation[k] for k in ("step", "val_loss")}, *second])
    run = read_run(folder)
    assert run.curve("train_loss") == whole.curve("train_loss")
    assert run.curve("val_loss") == whole.curve("val_loss")


def test_parts_that_are_taken_again_are_replaced(tmp_path: Path) -> None:
    first = replace(ENDED, last_step=20, ended="interrupted")
    for part in (first, replace(ENDED, first_step=20, last_step=30), replace(ENDED, first_step=20, ended="failed")):
        write_part(tmp_path, part)
    assert [(p.first_step, p.last_step, p.ended) for p in read_parts(tmp_path)] == [
        (0, 20, "interrupted"),
        (20, 40, "failed"),
    ]


def test_samples_of_steps_that_are_taken_again_go(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "val_loss": None, "prompt": "def f(x):", "text": "later"}) + '\n{"step": 3')
    without_later(folder / "samples.jsonl", 20)
    assert [(sample.step, sample.text[:5]) for sample in read_run(folder).samples] == [
        (0, " retu"),
        (10, " retu"),
        (20, "later"),
    ]


def test_texts_with_characters_that_end_lines_elsewhere(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    sample = RunSample(step=41, val_loss=None, prompt="a\u2028b", text="c\x85d\x0ce\nf")
    with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(sample), ensure_ascii=False) + "\n")
    without_later(folder / "samples.jsonl", 50)
    assert read_run(folder).samples[-1] == sample


def test_a_line_that_the_power_cut_short(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    text = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(text[: text.rindex("\n", 0, -30) + 1])
    assert 35 <= read_run(folder).curve("train_loss")[-1][0] <= 40


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "metrics.csv").write_text("step,train_loss\n0,many\n")
    (folder / "plan.json").write_text("{")
    (folder / "config.yaml").write_text("a: [")
    (folder / "environment.json").write_text("[]")
    run = read_run(folder)
    assert [warning.partition(" ")[0] for warning in run.warnings[:2]] == ["metrics.csv", "config.yaml"]
    assert "plan.json" in run.warnings[2]
    assert (run.curves, run.plan, dict(run.settings), dict(run.environment)) == ({}, None, {}, {})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("~nobody-of-this-name/run", "'~nobody-of-this-name/run' is not a run folder: there is no such folder"),
        ("x" * 5000, f"'{'x' * 5000}' is not a run folder: there is no such folder"),
        ("gone", "'gone' is not a run folder: there is no such folder"),
        ("file", "'file' is not a run folder: it is a file"),
        ("empty", "'empty' is not a run folder: it has neither config.yaml nor metrics.csv"),
    ],
)
def test_what_is_no_run_folder(path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("empty").mkdir()
    with pytest.raises(ConfigError) as raised:
        read_run(path)
    assert str(raised.value).startswith(message)


def test_a_process_killed_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_part(tmp_path, ENDED)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def killed(path: Path, text: str, **_: object) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        write_part(tmp_path, replace(ENDED, first_step=5))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert read_parts(tmp_path) == [ENDED]


def test_a_part_without_its_steps_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"parts": [{"ended": "finished"}, 3]}')
    assert read_parts(tmp_path) == []
