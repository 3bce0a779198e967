"""Samples at each validation: what the model writes, and that training does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lt_offload import OffmateStrategy
from lt_offload.errors import ConfigError
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.generation import continuation
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.run.summary import TOKENS, TOKENS_AT_END, RunSummary
from tests.unit.finetune.conftest import data, trainer

EVERY_SECOND = {"val_check_interval": 2, "check_val_every_n_epoch": None}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "offmate"])
def test_training_is_bit_for_bit_the_same_with_and_without(strategy: str, folder: str, text: str) -> None:
    ends = []
    for prompt in (None, ["the quick", "a dog"]):
        module = FineTune(folder, lr=1e-2, dropout=0.2)
        chosen = OffmateStrategy(memory="2MB") if strategy == "offmate" else "auto"
        summary = RunSummary()
        trainer(4, summary, strategy=chosen, **EVERY_SECOND).fit(
            module, datamodule=data(folder, text, sample_prompt=prompt)
        )
        assert [sample.step for sample in summary.samples] == ([] if prompt is None else [2, 2, 4, 4])
        ends.append((module.state_dict(), torch.get_rng_state(), module.training))
    (first, state, mode), (second, other, other_mode) = ends
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert torch.equal(state, other)
    assert mode is other_mode


class Modes(Callback):
    """Freezes a part's mode, as users who train a part only do, and sees whether it stays."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.model.model.norm.eval()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        assert not module.model.model.norm.training
        assert module.model.training


def test_what_is_written(folder: str, text: str, tmp_path: Path) -> None:
    summary = RunSummary(tmp_path)
    module, source = FineTune(folder, lr=1e-2), data(folder, text, sample_prompt="the quick")
    run = trainer(4, summary, Modes(), num_sanity_val_steps=-1, **EVERY_SECOND)
    run.fit(module, datamodule=source)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4, 4]
    assert lines[-1]["val_loss"] == lines[-2]["val_loss"] == float(run.callback_metrics["val_loss"])
    assert lines[-1]["text"].startswith(lines[-2]["text"])
    ids, end = source.prompt("the quick")["input_ids"], [source.tokenizer.eos_token_id]
    for line, tokens in zip(lines[-2:], (TOKENS, TOKENS_AT_END), strict=True):
        expected = continuation(module.model, ids, max_new_tokens=tokens, end=end)
        assert line["text"] == source.tokenizer.decode(expected)
    assert summary.clock.seconds["samples"] > 0


def test_validating_alone_and_a_short_sanity_check_write_none(folder: str, text: str) -> None:
    summary = RunSummary()
    source = data(folder, text, sample_prompt="the quick")
    run = trainer(1, summary, num_sanity_val_steps=1)
    run.validate(FineTune(folder), datamodule=source, verbose=False)
    assert summary.samples == []
    run.fit(FineTune(folder), datamodule=source)
    assert {sample.step for sample in summary.samples} == {1}


def test_a_prompt_that_cannot_be_used_is_an_error_before_training(folder: str, text: str) -> None:
    module = FineTune(folder)
    with pytest.raises(ConfigError, match="prompt is empty"):
        trainer(1, RunSummary()).fit(module, datamodule=data(folder, text, sample_prompt=["the quick", ""]))
    assert module.trainer.global_step == 0


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"text": "  The first line\nand another one."}, ["The first line"]),
        ({"prompt": "The capital of France is", "completion": " Paris."}, ["The capital of France is"]),
        ({"instruction": "Add them.", "input": "2 and 3", "output": "5"}, ["Add them.\n\n2 and 3"]),
        ({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"},
                       {"role": "assistant", "content": "Yes."}]}, ["Hi?"]),
        ({"messages": [{"role": "assistant", "content": "Yes."}]}, []),
    ],
)  # fmt: skip
def test_a_prompt_of_the_data_themselves(row: dict[str, Any], prompt: list[str], folder: str, tmp_path: Path) -> None:
    """A recipe that comes with a prompt would ask one's own model about something else."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    template = None if {"text", "prompt"} & row.keys() else "chatml"
    source = FineTuneData(folder, path=str(tmp_path / "rows.jsonl"), template=template, sample_prompt="auto")
    assert source.prompts == prompt
    assert source.asks_questions is (template is not None)
