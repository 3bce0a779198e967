"""How a run ends: what is told, what is written, and what the planner is asked where that takes a small part of it."""

from __future__ import annotations

import getpass
import io
import json
import re
import socket
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.run.summary import RunSummary, environment, print_summary, run_gains, write_report
from lt_offload.plan import Settings, make_plan, solve
from lt_offload.report.runs import read_parts
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.support.reports.run_folders import make_run
from tests.support.samples import MB, make_profile
from tests.unit.finetune.conftest import data, trainer

PROFILE = make_profile(layers=4, tensors_per_layer=2)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(PROFILE, memory=400 * MB, solver_time_limit=5)


def planned(plan: Plan | None) -> Any:
    strategy = SimpleNamespace(plan=plan, profile=PROFILE, trace=None, settings=Settings(recompute=False))
    return SimpleNamespace(strategy=strategy, global_step=7, is_global_zero=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def after(seconds: float) -> RunSummary:
    summary = RunSummary()
    summary.clock.steps = array("d", [seconds / 100] * 100)
    return summary


def test_a_long_run_tells_what_more_would_have_bought(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Settings] = []

    def remember(profile: Profile, settings: Settings) -> Plan:
        asked.append(settings)
        return make_plan(profile, settings)

    monkeypatch.setattr("lt_offload.plan.make_plan", remember)
    found = run_gains(after(100.0), planned(plan))
    assert [gain.change.partition(" ")[0] for gain in found] == ["1", "8", "a", "host"]
    assert {settings.solver_time_limit for settings in asked} == {2.5}
    assert not any(settings.recompute for settings in asked)
    page = write_report(make_run(tmp_path / "run"), found)
    assert "What more would buy" in page.read_text()


def test_training_is_told_and_written(
    folder: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = RunSummary(tmp_path)
    run = trainer(4, *summary.callbacks, num_sanity_val_steps=-1, val_check_interval=2, check_val_every_n_epoch=None)
    run.fit(FineTune(folder, lr=5e-3), datamodule=data(folder, text, sample_prompt="the quick"))
    assert [step for step, _ in summary.losses] == [0, 2, 4]
    report = summary.end(run)
    assert report == tmp_path / "report.html"
    [part] = read_parts(tmp_path)
    assert (part.first_step, part.last_step, part.ended, part.error) == (0, 4, "finished", None)
    assert (part.tokens, part.trained_tokens) == (4 * 2 * 32, 4 * 2 * 31)
    assert part.loss_before == summary.losses[0][1]
    assert part.seconds["steps"] > 0
    facts = summary.facts(run)
    assert facts["held-out loss"].split(" -> ")[0] == f"{summary.losses[0][1]:.4f}"
    assert facts["steps"] == "4"
    print_summary(summary, run, report)
    out = capsys.readouterr().out
    assert re.search("sample +the quick", out)
    assert str(report) in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    before = summary.losses[0]
    del summary.losses[1:]
    assert summary.facts(run)["held-out loss"] == f"{before[1]:.4f} (before training; none since)"
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(len(str(report)) + 4))
    monkeypatch.setenv("TERM", "xterm")
    print_summary(summary, run, report)
    assert f"\n    {report}\n" in terminal.getvalue(), "a path is on one line as long as it fits into one"


def test_a_short_sanity_check_is_no_loss_before_training(folder: str, text: str) -> None:
    summary = RunSummary()
    trainer(1, *summary.callbacks, num_sanity_val_steps=1).fit(FineTune(folder), datamodule=data(folder, text))
    assert all(step > 0 for step, _ in summary.losses)
    assert summary.end(summary.metrics) is None  # type: ignore[arg-type]  # there is no folder


@pytest.mark.parametrize(
    ("error", "ended", "said"),
    [
        (RuntimeError("lost\nmore"), "failed", "RuntimeError: lost"),
        (KeyboardInterrupt(), "interrupted", None),
        (SystemExit(143), "interrupted", None),
    ],
)
def test_a_run_that_ends_early_is_written_as_far_as_it_came(
    folder: str, text: str, tmp_path: Path, error: BaseException, ended: str, said: str | None
) -> None:
    class Module(FineTune):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.global_step == 2:
                raise error

    summary = RunSummary(tmp_path)
    run = trainer(4, *summary.callbacks)
    with pytest.raises((type(error), SystemExit)):
        run.fit(Module(folder), datamodule=data(folder, text))
    assert summary.end(run, error) == tmp_path / "report.html"
    [part] = read_parts(tmp_path)
    assert (part.last_step, part.ended, part.error) == (2, ended, said)


def test_an_error_in_the_report_does_not_hide_what_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    summary = RunSummary(tmp_path / "file")
    assert summary.end(planned(None), RuntimeError()) is None, "it has not begun to train"
    summary.first_step = 0
    with pytest.warns(
        UserWarning,
        match="the report could not be written: ConfigError: .*summary.json. cannot be written: File exists",
    ):
        assert summary.end(planned(None), RuntimeError()) is None
    with pytest.raises(ConfigError, match="summary.json. cannot be written: File exists"):
        summary.end(planned(None))


def test_versions_and_machine_name_nobody() -> None:
    found = environment()
    assert {"lt_offload", "python", "torch", "lightning", "cores", "ram_bytes"} <= found.keys()
    written = json.dumps(found)
    for private in (str(Path.home()), str(Path.cwd()), socket.gethostname() + ".", getpass.getuser() + "@"):
        assert private not in written
