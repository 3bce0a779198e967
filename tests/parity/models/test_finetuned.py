"""What recipes make of a model trains exactly: adapters of every kind, frozen parts, grown vocabularies."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lt_offload import OffmateStrategy
from lt_offload.finetune.adapters import LoraArgs
from lt_offload.finetune.module import FineTune
from tests import sampling
from tests.support import tiny
from tests.support.trainers import Forced, Run, finetuned, state_differences

SETTINGS: dict[str, dict[str, Any]] = {
    "dora": {"lora": LoraArgs(r=4, dora=True, dropout=0.1)},
    "rslora": {"lora": LoraArgs(r=4, rslora=True, bias="all")},
    "embeddings": {"lora": LoraArgs(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])},
    "frozen": {"freeze": ["model.embed_tokens", "model.layers.0", r".*norm\.weight"]},
    "vocabulary": {"new_tokens": ["<a>", "<b>"]},
}
STRATEGIES: dict[str, Any] = {
    "all places": lambda name: Forced(),
    "all memory": lambda name: OffmateStrategy(memory="1GB"),
    "little memory": lambda name: OffmateStrategy(memory="230KB" if name == "dora" else "170KB"),
}
"""Less than 203 kB for dora, or 156 kB for the others, is too little."""


@cache
def folder(tied: bool) -> str:
    import tempfile

    return str(tiny.model(Path(tempfile.mkdtemp()), tie_word_embeddings=tied, attention_bias=True))


def trained(name: str, tied: bool, strategy: Any) -> Run:
    L.seed_everything(3, verbose=False)
    module = FineTune(folder(tied), **SETTINGS[name], lr=1e-2, schedule="constant")
    return finetuned(strategy, module)


@cache
def plainly(name: str, tied: bool) -> Run:
    return trained(name, tied, "auto")


@pytest.mark.parametrize(("name", "strategy"), sampling.grid(SETTINGS, STRATEGIES, count=10))
def test_training_is_that_of_plain_lightning(name: str, strategy: str) -> None:
    tied = name in ("embeddings", "frozen") or strategy == "all places"
    plain = plainly(name, tied)
    ours = trained(name, tied, STRATEGIES[strategy](name))
    assert state_differences(plain, ours) == []
    before = FineTune(folder(tied), **SETTINGS[name]).build().state_dict()
    changed = [key for key, value in plain.module.model.state_dict().items() if not torch.equal(value, before[key])]
    assert changed
