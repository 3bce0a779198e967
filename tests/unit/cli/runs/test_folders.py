"""Folders of runs that begin, or go on, at the same time."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from lt_offload.cli import outputs
from lt_offload.cli.app import App
from lt_offload.cli.outputs import claimed, new_run
from lt_offload.cli.recipes import chain
from lt_offload.cli.table import VERBS
from lt_offload.errors import ConfigError
from lt_offload.machine.forked import in_a_fork
from tests.support.commands import fails


class OneSecond(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: object = None) -> OneSecond:
        return cls(2026, 1, 1, 23, 59, 58)


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outputs, "datetime", OneSecond)
    stamps = ("20260101-235958", "20260101-235959", "20260102-000000")
    assert [new_run("mine") for _ in stamps] == [Path("runs", f"mine-{stamp}") for stamp in stamps]
    assert new_run("other") == Path("runs/other-20260101-235958")


def test_a_folder_that_cannot_be_made_is_said_where_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to("nowhere")
    folder = new_run("mine")
    with pytest.raises(ConfigError, match=r"trainer.default_root_dir='runs/mine-.*' cannot be written"):
        outputs.make_folder(folder, "trainer.default_root_dir")


def test_only_training_makes_a_folder(recipe: str) -> None:
    file = Path(recipe)
    for verb, count in (("validate", 0), ("fit", 1), ("fit", 2)):
        App(VERBS[verb].load(), file, chain(file), [])
        assert len(list(Path().glob("runs/*"))) == count


def test_settings_are_those_of_before_until_the_new_ones_are_written(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed when it goes on has the settings with which it goes on again."""
    app = App(VERBS["plan"].load(), Path(recipe), chain(Path(recipe)), [])
    for lr in (0.5, 0.25):
        app.config["model"]["lr"] = lr
        app.parser.save(app.config, "config.yaml", skip_none=False, overwrite=True)
        assert f"lr: {lr}" in (before := Path("config.yaml").read_text())

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        app.parser.save(app.config, "config.yaml", overwrite=True)
    assert Path("config.yaml").read_text() == before
    app.parser.save(app.config, "memory://config.yaml", overwrite=True, multifile=False)


def test_a_run_that_has_not_ended_keeps_others_out_of_its_folder(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with claimed(folder, "folder"), claimed(tmp_path, "folder"):
        error = fails(capsys, recipe, "--trainer.default_root_dir", "run")
        assert "trainer.default_root_dir='run': a run in this folder has not ended; wait for it" in error
    assert list(folder.iterdir()) == []
    with claimed(folder, "folder"):
        pass


def test_a_worker_that_outlives_its_run_does_not_claim_the_folder(tmp_path: Path) -> None:
    """Processes that a run has forked have its open files, and so its locks."""
    with claimed(tmp_path, "folder"):
        assert len(outputs._claims) == 1
        assert in_a_fork(lambda: list(outputs._claims), what="a look", way_out="none") == []
    assert outputs._claims == set()


def test_where_there_are_no_locks_a_folder_is_anybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with claimed(tmp_path, "folder"), claimed(tmp_path, "folder"):
        pass
