"""Recipes with ``compile_blocks`` or ``kernels``: the numbers of the same model in plain Lightning, at every budget."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lt_offload import OffmateStrategy
from lt_offload.finetune import kernels
from lt_offload.finetune.adapters import LoraArgs
from lt_offload.finetune.module import FineTune
from tests import sampling
from tests.parity.engine.test_compiled import QUICKLY
from tests.parity.models import liger
from tests.support import tiny
from tests.support.trainers import Forced, Run, finetuned, state_differences

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "masters": {"dtype": "bfloat16", "master_weights": True},
    "lora": {"lora": LoraArgs(r=4, dropout=0.1)},
}
STRATEGIES: dict[str, Any] = {
    "all places": lambda name: Forced(),
    "all memory": lambda name: OffmateStrategy(memory="1GB"),
    "little memory": lambda name: OffmateStrategy(memory=LITTLE[name]),
}
LITTLE = {"full": "160KB", "masters": "125KB", "lora": "150KB"}
"""Less than 140, 101 and 123 kB is too little to train, and less than 115 for the loss of a validation with masters."""


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    with torch._inductor.config.patch(QUICKLY):
        yield
    torch._dynamo.reset()


@cache
def folder() -> str:
    import tempfile

    return str(tiny.model(Path(tempfile.mkdtemp())))


def trained(name: str, strategy: Any, **settings: Any) -> Run:
    torch._dynamo.reset()  # as in a process that starts
    L.seed_everything(3, verbose=False)
    module = FineTune(folder(), **{"compile_blocks": True} | SETTINGS[name] | settings, lr=1e-2, schedule="constant")
    return finetuned(strategy, module)


@cache
def plainly(name: str) -> Run:
    return trained(name, "auto")


@pytest.mark.long
@pytest.mark.parametrize(("name", "strategy"), sampling.grid(SETTINGS, STRATEGIES, count=3))
def test_training_is_that_of_the_compiled_model(name: str, strategy: str) -> None:
    plain = plainly(name)
    ours = trained(name, STRATEGIES[strategy](name))
    assert state_differences(plain, ours) == []
    before = FineTune(folder(), **SETTINGS[name]).build().state_dict()
    after = ours.module.model.state_dict()
    assert list(after) == list(before)  # checkpoints of either continue in the other
    assert [key for key, value in after.items() if not torch.equal(value, before[key])]


@pytest.mark.long
def test_dropout_shows_that_blocks_were_compiled() -> None:
    """Compiled code draws other random numbers: what is compared above is not the model as it is without."""
    assert state_differences(plainly("lora"), trained("lora", "auto", compile_blocks=False))


class Mixed(Forced):
    """Every block that can sends the results of its products to the host."""

    options = ("mixed",)


WITH_KERNELS: dict[str, Any] = {
    "all places": lambda name: Forced(),
    "mixed": lambda name: Mixed(),
    "all memory": lambda name: OffmateStrategy(memory="1GB"),
    "little memory": lambda name: OffmateStrategy(memory="155KB"),
}


@cache
def plainly_with_kernels(name: str) -> Run:
    return trained(name, "auto", compile_blocks=False, kernels="liger")


@pytest.mark.parametrize(("name", "strategy"), sampling.grid(SETTINGS, WITH_KERNELS, count=6))
def test_training_is_that_of_the_model_with_kernels(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what is saved travels, or is made again: the backward of a kernel writes over what it has saved."""
    monkeypatch.setattr(kernels, "liger_functions", lambda device: liger.FUNCTIONS)
    plain = plainly_with_kernels(name)
    ours = trained(name, WITH_KERNELS[strategy](name), compile_blocks=False, kernels="liger")
    assert state_differences(plain, ours) == []
    before = FineTune(folder(), **SETTINGS[name]).build().state_dict()
    after = ours.module.model.state_dict()
    assert list(after) == list(before)
    assert [key for key, value in after.items() if not torch.equal(value, before[key])]
    # Other last bits than without: the kernels were there.
    assert state_differences(plain, trained(name, "auto", compile_blocks=False))
