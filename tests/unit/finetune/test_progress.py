"""The line of progress: what it says, how it fits, and where it is written plainly instead."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from rich.console import Console

from lt_offload import OffmateStrategy
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.progress import ProgressLine, fitted
from lt_offload.finetune.run.summary import RunSummary
from lt_offload.finetune.terminal import TERMINAL
from tests.support import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.model(tmp_path_factory.mktemp("model"))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return folder


@pytest.fixture(autouse=True)
def _a_terminal_may_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def ticking(step: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step


def run(
    folder: Path,
    *,
    terminal: bool,
    width: int = 80,
    seconds: float = 0.0,
    every: int = 1,
    planned: bool = False,
    epoch: int | float = 1.0,
    validated: int = 2,
) -> str:
    """What four steps with a validation in the middle and before them write; the clock goes on by a second per look."""
    line = ProgressLine(seconds)
    clock = ticking(1.0)
    line.clock = lambda: next(clock)
    written = io.StringIO()
    TERMINAL.stream = Console(file=written, force_terminal=terminal, width=width, legacy_windows=False)
    strategy = OffmateStrategy(memory="2MB", solver_time_limit=1.0) if planned else "auto"
    fitting = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=4, max_epochs=-1, callbacks=[RunSummary(), line],
        logger=False, enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=-1,
        limit_val_batches=2, val_check_interval=validated, check_val_every_n_epoch=None, limit_train_batches=epoch,
        log_every_n_steps=every,
    )  # fmt: skip
    data = FineTuneData(
        str(folder), path=str(folder / "text.txt"), max_length=32, validation_share=0.2, sample_prompt="a"
    )
    try:
        fitting.fit(FineTune(str(folder)), datamodule=data)
    finally:
        TERMINAL.stream = None
    return written.getvalue()


@pytest.mark.slow
def test_plain_lines_elsewhere_than_on_a_terminal(folder: Path) -> None:
    text = run(folder, terminal=False, planned=True)
    assert not re.search(r"[\x1b\r]", text)
    losses = [line for line in text.splitlines() if "held-out" in line]
    steps = [line for line in text.splitlines() if "held-out" not in line]
    assert [line.split("  ")[0] for line in steps] == [f"step {n}/4" for n in (1, 2, 3, 4)]
    assert [line.split(":")[0] for line in losses] == ["step 2", "step 4"]
    memory = r"device [\d.]+( kB)?/2 MB  RAM [\d.]+( MB)?/[\d.]+ GB"
    assert re.fullmatch(rf"step 3/4  loss \d\.\d{{4}} \(mean of 3\)  eta [\d:]+  [\d.]+k? tok/s  {memory}", steps[2])
    assert "eta" not in steps[3]


def test_plain_lines_come_from_time_to_time(folder: Path) -> None:
    lines = [line for line in run(folder, terminal=False, seconds=1000.0).splitlines() if "held-out" not in line]
    assert [line.split("  ")[0] for line in lines] == ["step 1/4", "step 4/4"]


def test_a_terminal_has_one_line_that_is_drawn_anew(folder: Path) -> None:
    text = run(folder, terminal=True)
    assert "validating before training  batch 2/2" in text
    assert "validating after step 2  batch 1/2" in text
    assert re.search(r"step 2: held-out loss \d\.\d{4}\n", text)
    frames = re.split(r"[\r\n]|\x1b\[2K|\x1b\[\d*A|\x1b\[\?25[hl]", text)
    assert max(map(len, frames)) < 80
    assert "writing a sample ..." in frames
    assert [part for part in frames if part][-1].startswith("step 4/4"), "what stays"
    narrow = run(folder, terminal=True, width=30)
    assert max(len(part) for part in re.split(r"[\r\n]|\x1b\[2K|\x1b\[\d*A|\x1b\[\?25[hl]", narrow)) < 31


@pytest.mark.parametrize("terminal", [True, False])
def test_every_held_out_loss_stays(folder: Path, terminal: bool) -> None:
    text = run(folder, terminal=terminal, epoch=2, validated=1)
    assert re.findall(r"step (\d): held-out loss", text) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("name", ["NO_COLOR", "CI"])
def test_who_wants_it_plain_gets_it_plain(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert "\x1b" not in run(folder, terminal=True)


def test_the_loss_is_read_only_where_loggers_read_it(folder: Path) -> None:
    lines = [line for line in run(folder, terminal=False, every=3).splitlines() if "held-out" not in line]
    assert ["loss" in line for line in lines] == [False, False, True, True]


PARTS = ["step 12/60", "loss 2.6132", "eta 12m30s", "83 tok/s", "device 426/430 MB", "RAM 1.96/22.7 GB"]


def test_what_matters_least_goes_first() -> None:
    assert fitted(PARTS, 77) == "step 12/60  loss 2.6132  eta 12m30s  83 tok/s  device 426/430 MB"
    closer = "step 12/60 loss 2.6132 eta 12m30s 83 tok/s device 426/430 MB RAM 1.96/22.7 GB"
    assert {fitted(PARTS, width) for width in (78, 80, 82)} == {closer}
    on_gpu = ["step 1234/5000", "loss 1.2345", "eta 2h05m", "12.3k tok/s", "GPU 11.9/12 GB", "RAM 110/118 GB"]
    assert fitted(on_gpu, 80).endswith("GPU 11.9/12 GB RAM 110/118 GB")
    assert fitted(PARTS, 83) == "  ".join(PARTS)
    assert fitted(PARTS, 90).endswith("RAM 1.96/22.7 GB")
    assert fitted(PARTS, 30) == "step 12/60  loss 2.6132"
    assert fitted(PARTS, 8) == "step 12"
