"""Interrupted runs of a recipe and --resume."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lt_offload.cli.app import last_run
from lt_offload.cli.main import main
from lt_offload.cli.static.settings import joined
from lt_offload.errors import ConfigError
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.report.runs import read_run
from tests.support.commands import fails
from tests.support.reports.pages import plain

pytestmark = pytest.mark.slow

RECIPE = """\
# A tiny model on a little text
base: configs/base.yaml
trainer:
  accelerator: cpu
  strategy: {{class_path: lt_offload.OffmateStrategy, init_args: {{memory: 2MB}}}}
  max_epochs: -1
  max_steps: 8
  val_check_interval: 3
  check_val_every_n_epoch: null
  limit_val_batches: 2
model: {{name: {model}, lr: 0.01, dropout: 0.1}}
data: {{path: {folder}/text.txt, max_length: 32, batch_size: 8}}
"""  # 6 batches per epoch


@pytest.fixture
def recipe(recipe: str) -> Iterator[str]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield recipe
    signal.signal(signal.SIGINT, before)


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int, step: int) -> None:
    """Let a signal come in the middle of the given step."""
    training_step = FineTune.training_step

    def step_with_signal(module: FineTune, batch: Any, batch_idx: int) -> Any:
        if module.global_step == step and not module.trainer.sanity_checking and module.trainer.training:
            os.kill(os.getpid(), number)
        return training_step(module, batch, batch_idx)

    monkeypatch.setattr(FineTune, "training_step", step_with_signal)


def interrupted(
    number: int, code: int, recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """Run ``recipe`` until a signal comes, which must end it with ``code``; return the run's folder."""
    with monkeypatch.context() as patched:
        # the signal handler is there from the first step on, profiling runs the step before that
        patched.setattr(FineTune, "on_train_start", lambda self: interrupt(patched, number, 3), raising=False)
        assert main([recipe]) == code
    error = capsys.readouterr().err
    assert "interrupted after step 4" in error
    [folder] = Path("runs").iterdir()
    assert f"continue with\nlt-finetune {folder} --resume\n" in error
    assert "was interrupted after step 4" in plain((folder / "report.html").read_text())
    assert torch.load(folder / "checkpoints" / "interrupted.ckpt")["global_step"] == 4
    return folder


def test_a_run_that_is_to_end_writes_a_checkpoint(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(signal.SIGTERM, 143, recipe, monkeypatch, capsys)


def test_an_interrupted_run_is_taken_up_and_ends_like_one_that_was_not(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([recipe, "--trainer.default_root_dir", "whole"]) == 0
    folder = interrupted(signal.SIGINT, 130, recipe, monkeypatch, capsys)
    first = (folder / "metrics.csv").read_text()

    assert main([recipe, "--resume"]) == 0
    assert list(Path("runs").iterdir()) == [folder]
    assert (folder / "metrics-1.csv").read_text() == first
    assert main(["compare", str(folder), "whole"]) == 0
    assert "have equal losses in all 8 steps, bit for bit." in " ".join(capsys.readouterr().out.split())
    run = read_run(folder)
    assert [(part.first_step, part.last_step, part.ended) for part in run.parts] == [
        (0, 4, "interrupted"),
        (4, 8, "finished"),
    ]
    assert run.curve("lr") == read_run("whole").curve("lr")
    assert "It was resumed after step 4." in plain((folder / "report.html").read_text())
    ends = [torch.load(run / "checkpoints" / "step8.ckpt") for run in (Path("whole"), folder)]
    for name, tensor in ends[0]["state_dict"].items():
        assert torch.equal(tensor, ends[1]["state_dict"][name]), name
    left, right = (end["optimizer_states"][0]["state"] for end in ends)
    assert all(torch.equal(left[i][key], right[i][key]) for i in left for key in left[i])


def test_resume_needs_a_checkpoint_and_only_one(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--resume: there is no complete checkpoint in" in fails(capsys, recipe, "--resume")
    Path("a.ckpt").touch()
    assert "both name a checkpoint" in fails(capsys, recipe, "--resume", "--ckpt_path", "a.ckpt")
    assert not list(Path("runs").glob("*"))


def test_settings_that_a_run_cannot_be_continued_with_are_not_kept(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([recipe, "--trainer.default_root_dir", "run", "--trainer.max_steps", "2"]) == 0
    folder = Path("run").rename("moved")  # which the settings in it do not know
    before = {path: path.read_bytes() for path in (folder / "config.yaml", folder / "metrics.csv")}
    capsys.readouterr()
    line = fails(capsys, "moved", "--resume", "--data.seed", "5", "--trainer.max_steps", "3")
    assert "seed was 0, now it is 5" in line
    assert {path: path.read_bytes() for path in before} == before
    assert not list(folder.glob("metrics-*.csv"))
    assert main(["moved", "--resume", "--trainer.max_steps", "3"]) == 0
    assert (folder / "metrics-1.csv").read_bytes() == before[folder / "metrics.csv"]
    assert not Path("run").exists()


class Greets(FineTune):
    """A module of a user's own, whose hook does not call that of the base."""

    def on_train_start(self) -> None:
        pass


def test_a_subclass_with_a_hook_of_its_own_goes_on_with_another_learning_rate(recipe: str, model: Path) -> None:
    folder, rates = str(model), []
    for lr, steps, ckpt in ((1e-2, 2, None), (2e-3, 4, "two.ckpt")):
        module = Greets(folder, lr=lr, schedule="constant", warmup_steps=0)
        trainer = Trainer(max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False)
        source = FineTuneData(folder, path="text.txt", max_length=32, batch_size=2)
        trainer.fit(module, datamodule=source, ckpt_path=ckpt, weights_only=True)
        trainer.save_checkpoint("two.ckpt")
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates == [1e-2, 2e-3]


def test_a_run_is_not_overwritten_by_another_one(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [recipe, "--trainer.default_root_dir", "run", "--trainer.max_steps", "2"]
    fails(capsys, *flags, "--data.path", "none.txt")  # before its first step: nothing of it is worth keeping
    assert main(flags) == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert "'run' has a run already, which would be overwritten; go on with it by" in fails(capsys, *flags)
    newest = str(Path("run/checkpoints/step2.ckpt"))
    assert "has a run already" in fails(capsys, *flags, "--ckpt_path", newest)
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert main([*flags, "--resume", "--trainer.max_steps", "3"]) == 0


def test_resuming_what_is_at_its_end_says_so(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [recipe, "--trainer.default_root_dir", "run", "--trainer.max_steps", "2"]
    assert main(flags) == 0
    assert "nothing left to train" not in capsys.readouterr().err
    assert main([*flags, "--resume"]) == 0
    assert "nothing left to train at step 2, in epoch 0, with trainer.max_steps=2" in capsys.readouterr().err


def test_a_recipe_with_other_data_than_its_last_run_is_not_resumed(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.txt").write_text("a cat sat on a mat and looked at a rat. " * 40)
    assert main([recipe, "--data.path", "mine.txt", "--trainer.max_steps", "2"]) == 0
    [folder] = Path("runs").iterdir()
    capsys.readouterr()
    line = fails(capsys, recipe, "--resume")
    assert f"is not that of the run in {folder}, 'mine.txt'; 'lt-finetune {folder} --resume' has all" in line
    assert main([str(folder), "--resume", "--trainer.max_steps", "3"]) == 0
    assert main([recipe, "--resume", "--data.path", "mine.txt", "--trainer.max_steps", "4"]) == 0
    assert list(Path("runs").iterdir()) == [folder]
    assert torch.load(folder / "checkpoints" / "step4.ckpt")["global_step"] == 4


def complete(path: Path) -> None:
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": {}, "optimizer_states": [], "lr_schedulers": [], "loops": {}}, path)


def test_which_run_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-20260101-000000", "tiny-20260102-000000", "other-20260103-000000", "tiny-big-20260104-000000"):
        complete(Path("runs") / name / "checkpoints" / "step1.ckpt")
    (Path("runs") / "tiny-20260105-000000").mkdir()  # stopped before its first checkpoint
    assert last_run(Path("tiny.yaml"), None)[0] == Path("runs/tiny-20260102-000000")
    assert last_run(Path("runs/tiny-20260101-000000/config.yaml"), None)[0].name == "tiny-20260101-000000"
    root = Path("runs/other-20260103-000000")
    assert last_run(Path("tiny.yaml"), root) == (root, root / "checkpoints" / "step1.ckpt")
    with pytest.raises(ConfigError, match="no complete checkpoint in .*/gone-"):
        last_run(Path("gone.yaml"), None)


def test_some_flags_need_no_value() -> None:
    assert joined([]) == []
    assert joined(["--resume"]) == ["--resume=true"]
    assert joined(["--resume", "--x", "1"]) == ["--resume=true", "--x=1"]
    assert joined(["--resume", "false"]) == ["--resume=false"]
    assert joined(["--explain", "--merge", "false"]) == ["--explain=true", "--merge=false"]
    assert joined(["--wandb"]) == ["--wandb=lt-offload"]
    assert joined(["--wandb", "--resume"]) == ["--wandb=lt-offload", "--resume=true"]
    assert joined(["--x", "-3GB", "--y", "-1", "--z=-2"]) == ["--x=-3GB", "--y=-1", "--z=-2"]
    assert joined(["--wandb", "mine", "--x", "1"]) == ["--wandb=mine", "--x=1"]
