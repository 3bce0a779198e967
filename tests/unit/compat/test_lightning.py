"""Each private name of Lightning does what it is used for, with both of its packages."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lt_offload.compat import lightning as compat


def watched(namespace: str) -> tuple[Any, dict[str, list[Any]]]:
    """Return a module that notes what the names say at each batch of two epochs with two batches per update."""
    seen: dict[str, list[Any]] = {}

    class Net(importlib.import_module(namespace).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).sum()

        def validation_step(self, batch: Any, _: int) -> None:
            pass

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [*batch, "seen"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_batch_end(self, *_: object) -> None:
            trainer = self.trainer
            for name, value in (
                ("adds_up", compat.adds_up(trainer)),
                ("skips_backward", compat.skips_backward(trainer)),
                ("is_validation_due", compat.is_validation_due(trainer.fit_loop)),
                ("is_last_batch", compat.is_last_batch(trainer.fit_loop.epoch_loop)),
                ("is_training_done", compat.is_training_done(trainer)),
            ):
                seen.setdefault(name, []).append(value)
            compat.flush_metrics(trainer)
            loaders = compat.combined_loader(trainer.fit_loop)
            assert len(loaders.flattened) == 1
            assert not compat.in_turn(trainer.fit_loop)
            assert compat.data_fetcher(trainer.fit_loop).combined_loader is loaders
            assert compat.loaded_checkpoint(trainer) is None or compat.loaded_checkpoint(trainer) == {}

    return Net(), seen


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_what_the_trainer_says_of_itself(namespace: str, tmp_path: Path) -> None:
    module, seen = watched(namespace)
    trainer = importlib.import_module(namespace).Trainer(
        max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
        detect_anomaly=True,
    )  # fmt: skip
    assert compat.trainer_of(module) is None
    assert compat.detects_anomaly(trainer)
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=1)
    trainer.fit(module, data, data)
    assert seen == {
        "adds_up": [True, False, True, False],
        "skips_backward": [False] * 4,
        "is_validation_due": [False, False, False, True],
        "is_last_batch": [False, False, False, True],
        "is_training_done": [False, False, False, True],
    }
    assert compat.trainer_of(module) is trainer
    assert set(compat.OWNERS) <= vars(module).keys()
    assert not compat.data_source(trainer).is_module()
    assert compat.before_transfer(module, [1]) == [1, "seen"]
    assert compat.compiler_context(module) is None
    counts = trainer.fit_loop.state_dict()["epoch_loop.state_dict"]
    assert counts[compat.BATCHES_THAT_STEPPED] == 2
    loop, plugin = trainer.fit_loop.epoch_loop, trainer.precision_plugin
    assert callable(getattr(loop.automatic_optimization, compat.BEFORE_ZERO_GRAD))
    assert callable(getattr(loop, compat.BEFORE_BATCH))
    assert callable(getattr(plugin, compat.CLIP_GRADIENTS))
    assert callable(getattr(plugin, compat.AFTER_CLOSURE))
    assert not compat.take_up_states(trainer.fit_loop)
    for name, change in (("_has_run", compat.has_validated), ("_restarting", compat.goes_on)):
        changed = loop if change is compat.has_validated else trainer.fit_loop
        change(changed)
        assert getattr(loop.val_loop if changed is loop else changed, name) is (changed is loop)
    assert vars(trainer.fit_loop)[compat.COMBINED_LOADER] is compat.combined_loader(trainer.fit_loop)


@pytest.mark.parametrize("namespace", ["lightning", "pytorch_lightning"])
def test_classes_and_attributes_that_limits_ask_for(namespace: str) -> None:
    fabric = importlib.import_module("lightning.fabric" if namespace == "lightning" else "lightning_fabric")
    assert set(compat.WRAPPERS_OF_FABRIC) <= vars(fabric.wrappers).keys()
    callbacks = importlib.import_module("lightning.pytorch" if namespace == "lightning" else namespace).callbacks
    average = callbacks.WeightAveraging(device="cpu")
    assert str(compat.averages_on(average)) == "cpu"
    assert not compat.own_average(average)
    assert compat.own_average(callbacks.EMAWeightAveraging())
    assert compat.BATCH_NORM in {cls.__name__ for cls in torch.nn.BatchNorm1d.__mro__}
