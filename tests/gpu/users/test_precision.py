"""Weights in bf16, alone, with masters or rounded with noise; loaders with workers and pinned memory."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

import lt_offload
from tests.gpu.users.runs import USERS, Bench, in_both_ways, module
from tests.support.trainers import BATCHES, Run, Tokens, differences

pytestmark = [*USERS, pytest.mark.usefixtures("planned_once")]


def in_bf16(**options: Any) -> Any:
    """Return a module in bf16 whose optimizer is ours."""
    made = module(dtype=torch.bfloat16)

    def configure() -> Any:
        optimizer = lt_offload.AdamW(made.parameters(), lr=1e-3, weight_decay=0.1, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    made.configure_optimizers = configure
    return made


@in_both_ways
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stochastic_rounding": True},
        {"stochastic_rounding": True, "state_dtype": "8bit", "min_8bit_size": 300},
        {"state_dtype": "bfloat16"},
    ],
    ids=["masters", "stochastic rounding", "8 bits", "masters, bfloat16"],
)
def test_bf16_with_our_optimizer(options: dict[str, Any], way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, in_bf16(**options))

    expected, found = bench.compare(way, scene)
    assert differences(expected, found) == []
    state = next(iter(found.optimizer.state.values()))
    assert ("master" in state) != options.get("stochastic_rounding", False)
    dtypes = {state["exp_avg"].dtype for state in found.optimizer.state.values()}
    few = {"8bit": {torch.uint8, torch.float32}, "bfloat16": {torch.bfloat16}}
    assert dtypes == few.get(options.get("state_dtype"), {torch.float32})
    assert {p.dtype for p in found.module.parameters()} == {torch.bfloat16}


@in_both_ways
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_precisions_of_the_trainer(precision: Any, way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, module(dropout=0.1), precision=precision)

    assert differences(*bench.compare(way, scene)) == []


class Scales(L.Callback):
    """The scale after each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


@in_both_ways
@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_16_mixed(settings: dict[str, Any], way: str, bench: Bench) -> None:
    """Every second step is left out, beginning with the first."""

    def scene(strategy: Any) -> Run:
        made, device = module(dropout=0.1), bench.device.type

        def configure() -> Any:  # a fused optimizer would unscale in its step, and could not be clipped
            return torch.optim.SGD(made.parameters(), lr=1e-2, momentum=0.9)

        made.configure_optimizers = configure
        scaler = torch.amp.GradScaler(device, 2.0**30, 2.0**14, 2.0**-14, growth_interval=1)
        precision = MixedPrecision("16-mixed", device, scaler)
        return bench.fit(strategy, made, plugins=[precision], callbacks=[Scales()], max_epochs=3, **settings)

    expected, found = bench.compare(way, scene)
    assert differences(expected, found) == []
    expected, found = (run.trainer.callbacks[0].seen for run in (expected, found))
    assert found == expected
    assert set(found) == {2.0**30, 2.0**16}


@in_both_ways
def test_16_mixed_by_its_name(way: str, bench: Bench) -> None:
    """On a CPU Lightning computes in bfloat16 instead, and says so."""
    if bench.device.type == "cpu":
        pytest.skip("needs a GPU")

    def scene(strategy: Any) -> Run:
        return bench.fit(strategy, module(), precision="16-mixed")

    assert differences(*bench.compare(way, scene)) == []


# -- loaders -----------------------------------------------------------------------------------------------------------


@in_both_ways
def test_pinned_batches_of_a_worker(way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        made = module(dropout=0.1)
        rows = Tokens(made.model, 2 * BATCHES - 1, 0)  # the last batch of an epoch is a smaller one
        pin = bench.device.type == "cuda"
        made.train_dataloader = lambda: DataLoader(rows, batch_size=2, num_workers=1, pin_memory=pin)

        def transfer(batch: dict[str, Any], device: torch.device, dataloader_idx: int) -> dict[str, Any]:
            pinned.append(all(value.is_pinned() for value in batch.values()))
            return {name: value.to(device, non_blocking=True) for name, value in batch.items()}

        pinned: list[bool] = []
        made.transfer_batch_to_device = transfer
        run = bench.fit(strategy, made)
        assert sum(pinned) == pin * run.trainer.global_step, "the batches that train; the profile has a copy of one"
        return run

    assert differences(*bench.compare(way, scene)) == []
