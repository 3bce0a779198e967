"""Which Trainers become offloaded ones, and which arguments are refused when they are made."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import lt_offload
from lt_offload import limits
from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.hf.trainer import Offloaded
from scripts.hf import cases

CONSTRUCTOR = Trainer.__init__


def made(folder: Path, kind: type[Trainer] = Trainer) -> Any:
    return cases.plain(kind=kind)(folder)


def test_trainers_that_are_made_within_are_others_and_nothing_else_is(tmp_path: Path) -> None:
    class Mine(Trainer):
        pass

    elsewhere: list[Any] = []
    thread = threading.Thread(target=lambda: elsewhere.append(made(tmp_path)))
    before = made(tmp_path)
    with lt_offload.hf_trainer(memory="1GB"):
        inside = made(tmp_path, Mine)
        thread.start()
        thread.join()
        with lt_offload.hf_trainer(memory="2GB"):
            inner = made(tmp_path)
        again = made(tmp_path)
    after = made(tmp_path)
    assert [isinstance(t, Offloaded) for t in (before, inside, *elsewhere, inner, again, after)] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]
    assert isinstance(inside, Mine)
    assert type(inside).__name__ == "Mine"
    assert tuple(one.offmate.settings.device.nbytes for one in (inner, again)) == (2 * 10**9, 10**9)
    assert Trainer.__init__ is CONSTRUCTOR


def test_an_error_within_puts_the_constructor_back() -> None:
    with pytest.raises(ZeroDivisionError), lt_offload.hf_trainer(memory="1GB"):
        raise ZeroDivisionError
    assert Trainer.__init__ is CONSTRUCTOR


def test_a_mixin_stands_before_the_trainer() -> None:
    mixin = lt_offload.OffloadedTrainerMixin

    class Between(mixin):
        """Others may stand between."""

    class Mine(Between, Trainer):
        """In order."""

    with pytest.raises(ConfigError, match=r"class Wrong\(Trainer, OffloadedTrainerMixin\): .* put it first"):
        type("Wrong", (Trainer, mixin), {})
    with pytest.raises(ConfigError, match="memory='ten'"):
        Mine(offload={"memory": "ten"})
    assert Trainer.__init__ is CONSTRUCTOR


def test_a_setting_that_cannot_be_is_refused_before_the_trainer_is_made() -> None:
    with pytest.raises(ConfigError, match="memory"):
        lt_offload.hf_trainer(memory="ten")
    with pytest.raises(UnsupportedError, match="planner='fast'"):
        lt_offload.hf_trainer(planner="fast")  # type: ignore[arg-type]


CPU = torch.device("cpu")
REFUSED = {
    "torch_compile": True,
    "fp16_full_eval": True,
    "bf16_full_eval": True,
    "deepspeed": "zero3.json",
    "fsdp": True,
    "n_gpu": 2,
    "world_size": 4,
    "auto_find_batch_size": True,
    "use_liger_kernel": True,
    "activation_offloading": True,
    "optim": "galore_adamw_layerwise",
    "optim, paged": "paged_adamw_8bit",
    "optim, schedule_free": "schedule_free_adamw",
}


@pytest.mark.parametrize("row", REFUSED)
def test_an_argument_that_cannot_be_honoured_is_named(row: str) -> None:
    name = row.partition(",")[0]
    values = {"world_size": 1, "n_gpu": 1, "device": CPU, "optim": "adamw_torch"} | {name: REFUSED[row]}
    run = limits.Setup(trainer=SimpleNamespace(args=SimpleNamespace(**values)))
    with pytest.raises(UnsupportedError, match=rf"{name}\b.*; .*"):
        limits.check("hf", run)


def test_it_is_refused_where_the_trainer_is_made(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), auto_find_batch_size=True, use_cpu=True)
    with lt_offload.hf_trainer(memory="1GB"), pytest.raises(UnsupportedError, match=r"\(auto_find_batch_size=True\)"):
        Trainer(model=cases.llama(), args=args)
