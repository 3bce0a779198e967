"""bfloat16 weights with fp32 masters, or rounded with noise: what the engine does, and where, changes no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lt_offload import AdamW
from tests.support import engines
from tests.support.engines import Case, changed, differences, offloaded, plain
from tests.support.trainers import BATCHES, Forced, Module, fit, seeded_module, state_differences

NAME = "adamw-masters"
NOISY = "adamw-noisy"


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.OPTIMIZERS, NAME, lambda groups: AdamW(groups, lr=1e-3))
    monkeypatch.setitem(engines.OPTIMIZERS, NOISY, lambda groups: AdamW(groups, lr=1e-3, stochastic_rounding=True))


@pytest.mark.parametrize("places", [("host",), ("device",), ("paged",), ("device", "paged", "host")], ids="-".join)
@pytest.mark.parametrize("mode", ["lazy", "random", "thread"])
def test_equal_to_plain_pytorch(places: tuple[str, ...], mode: str) -> None:
    case = Case(places=places, mode=mode, dtype="bfloat16", optimizer=NAME, options=("keep", "recompute"))
    expected = plain(case)
    actual = offloaded(case)
    assert differences(expected, actual) == []
    assert changed(case, actual)
    state: dict[str, Any] = next(iter(actual.optimizer.state.values()))
    assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(state, torch.float32)
    masters = [(p, s["master"]) for p, s in actual.optimizer.state.items()]
    assert all(torch.equal(p, master.to(p.dtype)) for p, master in masters)
    assert not all(torch.equal(p.float(), master) for p, master in masters), "masters that hold no more than weights"


@pytest.mark.parametrize("places", [("host",), ("device",), ("paged",), ("device", "paged", "host")], ids="-".join)
def test_noise_equal_to_plain_pytorch(places: tuple[str, ...]) -> None:
    case = Case(places=places, mode="lazy", dtype="bfloat16", optimizer=NOISY, options=("keep", "recompute"))
    expected = plain(case)
    actual = offloaded(case)
    assert differences(expected, actual) == []
    assert changed(case, actual)
    assert all("master" not in state for state in actual.optimizer.state.values())
    assert differences(expected, plain(replace(case, optimizer=NAME))) != []


@pytest.mark.parametrize("noisy", [False, True], ids=["masters", "noise"])
@pytest.mark.parametrize("first", ["stock", "offmate"])
@pytest.mark.parametrize("second", ["stock", "offmate"])
def test_resumed_training_equals_one_run(
    first: str, second: str, noisy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint keeps the masters, whoever writes it and whoever reads it; noise needs no more than the step."""
    made = Module.configure_optimizers

    def with_masters(module: Any) -> dict[str, Any]:
        found = made(module)
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in found["optimizer"].param_groups]
        optimizer = AdamW(groups, lr=1e-3, stochastic_rounding=noisy)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    monkeypatch.setattr(Module, "configure_optimizers", with_masters)
    makers = {"stock": lambda: "auto", "offmate": Forced}
    options = {"shuffle": False, "dtype": torch.bfloat16}
    whole = fit("auto", seeded_module(**options))
    saver = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=BATCHES)
    fit(makers[first](), seeded_module(**options), callbacks=[saver], enable_checkpointing=True, max_epochs=1)
    resumed = fit(makers[second](), seeded_module(99, **options), ckpt=tmp_path / "half.ckpt")
    assert resumed.trainer.global_step == 2 * BATCHES
    assert whole.module.lrs[BATCHES:] == resumed.module.lrs
    assert state_differences(whole, resumed) == []
    state = next(iter(resumed.optimizer.state.values()))
    assert ("master" in state) != noisy
    assert all(value.dtype == torch.float32 for value in state.values())
