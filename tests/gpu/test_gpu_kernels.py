"""Liger's own kernels: the numbers of the same model in plain Lightning on the same GPU, at every budget."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lt_offload import OffmateStrategy
from lt_offload.finetune.adapters import LoraArgs
from lt_offload.finetune.module import FineTune
from lt_offload.plan.settings import Settings
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.gpu.target import ROOM
from tests.support import tiny
from tests.support.trainers import Forced, Run, finetuned, state_differences

pytestmark = [
    pytest.mark.only("cuda", fake=False),
    pytest.mark.skipif(find_spec("liger_kernel") is None, reason="pip install lt-offload[liger]"),
    pytest.mark.usefixtures("deterministic"),
]


class Mixed(Forced):
    places = ("device", "paged")
    options = ("mixed",)

    def _make_plan(self, profile: Profile, settings: Settings) -> Plan:
        return replace(super()._make_plan(profile, settings), budget_bytes=ROOM)


class Everything(Mixed):
    options = ("offload", "recompute", "keep", "mixed")


class OnHost(SingleDeviceStrategy):
    """Lightning's own, but modules are made where ours makes them: adapters begin with random numbers, by device."""

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        return nullcontext()


SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"dtype": "bfloat16", "lora": LoraArgs(r=4)},
}
STRATEGIES: dict[str, Any] = {
    "every option": Everything,
    "mixed": Mixed,
    "planned": lambda: OffmateStrategy(memory="4GB", host_update=False),
}


def trained(folder: str, name: str, strategy: Any) -> Run:
    L.seed_everything(3, verbose=False)
    module = FineTune(folder, kernels="liger", **SETTINGS[name], lr=1e-2, schedule="constant")
    return finetuned(strategy, module, accelerator="cuda", devices=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SETTINGS)
def test_kernels_train_as_in_plain_lightning(name: str, strategy: str, tmp_path: Path) -> None:
    folder = str(tiny.model(tmp_path, hidden_size=64, intermediate_size=128, num_hidden_layers=3))
    plain = trained(folder, name, OnHost(device=torch.device("cuda", 0)))
    assert state_differences(plain, trained(folder, name, STRATEGIES[strategy]())) == []


def test_kernels_are_near_what_transformers_computes(tmp_path: Path) -> None:
    """The same sums in another order, forward and backward: near, and not the same."""
    folder = str(tiny.model(tmp_path, hidden_size=64, intermediate_size=128))
    results = []
    for settings in ({"kernels": "liger"}, {}):
        model = FineTune(folder, **settings).build().to("cuda")
        ids = torch.arange(24, device="cuda").view(2, 12)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)
    assert not all(map(torch.equal, *results))
