"""``lt-finetune verify`` says EQUAL where all numbers are those of plain training, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lt_offload.cli.main import main
from lt_offload.cli.verbs import verify

pytestmark = pytest.mark.usefixtures("recipe")


def said(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["verify", *args, "--steps", "4"])
    out = capsys.readouterr().out
    return code, out, out.splitlines()[-1]


@pytest.mark.long
def test_plain_training_ours_and_a_resumed_run_are_equal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickstart without its package, in a quarter of the memory."""
    monkeypatch.setattr(verify, "find_spec", lambda _name: None)
    before = set(Path().iterdir())
    code, out, posted = said(capsys, "--trainer.accelerator", "cpu")
    assert code == 0
    assert out.count(" none\n") == 4
    assert posted.startswith("EQUAL bit for bit: a small random model, 4 steps of 256 tokens, in ")
    assert " that plain training takes (25%), " in posted
    assert "emulated device" in posted
    assert set(Path().iterdir()) == before


@pytest.mark.long
def test_other_numbers_are_noticed_and_named(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = verify.Runs.train

    def another_rate(self: verify.Runs, name: str, *strategy: str, **more: Any) -> verify.Trained:
        rate = [] if name == "plain" else ["--model.lr=0.01"]
        return train(self, name, *strategy, *rate, **more)

    monkeypatch.setattr(verify.Runs, "train", another_rate)
    code, out, posted = said(capsys, recipe, "--memory", "2MB")
    assert code == 1
    assert posted.startswith("NOT EQUAL bit for bit: ")
    assert "model.model.embed_tokens.weight" in out
    assert "in 2 MB of " in posted


def test_too_few_steps(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", recipe, "--steps", "3"]) == 2
    assert "--steps 3 is too few" in capsys.readouterr().err


def test_plain_training_alone_is_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", recipe, "--trainer.strategy", "auto"]) == 2
    assert "trainer.strategy is SingleDeviceStrategy, which is plain training" in capsys.readouterr().err


def test_an_interruption_is_no_difference(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify.Kept, "on_train_batch_end", interrupt)
    assert main(["verify", recipe, "--steps", "4"]) == 130
