"""Where metrics go: the run folder by default, one's own loggers, Weights & Biases."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch.loggers
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lt_offload.cli import app as module
from lt_offload.cli.app import loggers
from lt_offload.cli.main import main
from lt_offload.errors import ConfigError


def test_those_that_every_run_has(tmp_path: Path) -> None:
    for chosen in (None, True):
        one, other = loggers(chosen, tmp_path, None)  # type: ignore[misc]
        assert isinstance(one, CSVLogger)
        assert isinstance(other, TensorBoardLogger)
        assert Path(one.log_dir) == tmp_path


def test_ones_own(tmp_path: Path) -> None:
    mine = CSVLogger(str(tmp_path))
    assert loggers(mine, tmp_path, None) == [mine]
    assert loggers([mine], tmp_path, None) == [mine]
    assert loggers(False, tmp_path, None) is False


@pytest.mark.parametrize("mode", [None, "offline"])
def test_weights_and_biases(mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, **settings: Any) -> None:
            self.settings = settings

    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(lightning.pytorch.loggers, "WandbLogger", Fake)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    found = loggers(None, tmp_path / "quickstart-1", "mine")
    assert isinstance(found, list)
    assert [type(logger) for logger in found] == [CSVLogger, TensorBoardLogger, Fake]
    assert vars(found[-1])["settings"] == {
        "project": "mine", "name": "quickstart-1", "save_dir": str(tmp_path / "quickstart-1"), "offline": bool(mode)
    }  # fmt: skip


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_weights_and_biases_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--wandb mine needs the package wandb: pip install wandb"):
        loggers(None, tmp_path, "mine")


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainer.logger=false does not; leave one of them out"):
        loggers(False, tmp_path, "mine")
    with pytest.raises(ConfigError, match="the name of the project is empty"):
        loggers(None, tmp_path, " ")


def test_the_flag_reaches_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--model.name", str(model), "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    assert main(["quickstart", *args, "--wandb"]) == 2
    assert "--wandb lt-offload logs, and trainer.logger=false does not" in capsys.readouterr().err
