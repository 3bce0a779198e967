"""batch_size="auto": the chosen size reaches loaders and schedules in time, and the run is that of the same integer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lt_offload import OffmateStrategy, micro_batched_reference
from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.execute.user_code.logits import LossInBlock
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.plan import Choices, Settings, make_plan
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.strategy import batch_size
from lt_offload.strategy.first import planning, sample
from tests.support import tiny
from tests.support.trainers import BATCHES, Module, Run, Tokens, differences, fit, seeded_module, trainer

MEMORY = "200MB"
ROWS = 2 * BATCHES


class Scheduled(Module):
    """Its schedule depends on the number of steps."""

    def configure_optimizers(self) -> dict[str, Any]:
        self.horizon = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (1 + self.horizon))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(LightningDataModule):
    """Shuffles with a generator of its own."""

    def __init__(self, model: torch.nn.Module, batch_size: int = 1) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.rows = Tokens(model, ROWS, 0)
        self.generator = torch.Generator().manual_seed(4)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.rows, batch_size=self.batch_size, shuffle=True, generator=self.generator)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.rows, batch_size=2)


def scheduled(**options: Any) -> Scheduled:
    lightning.pytorch.seed_everything(7, verbose=False)
    return Scheduled(**options)


def auto(**options: Any) -> OffmateStrategy:
    return OffmateStrategy(memory=MEMORY, batch_size="auto", **options)


def size_of(run: Run) -> int:
    plan = run.trainer.strategy.plan
    assert plan.batch_size == run.trainer.strategy.profile.batch_size
    return int(plan.batch_size)


def no_choice(*args: Any, **kwargs: Any) -> Any:
    pytest.fail("a batch size was chosen")


# -- equality --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("memory", [MEMORY, "400KB"])
def test_a_run_of_the_chosen_size(memory: str) -> None:
    run = fit(OffmateStrategy(memory=memory, batch_size="auto", solver_time_limit=1000), scheduled(dropout=0.1))
    size = size_of(run)
    assert run.module.batch_size == size
    assert run.module.horizon == run.trainer.global_step == 2 * -(-ROWS // size)
    assert differences(fit(OffmateStrategy(memory=MEMORY, batch_size=size), scheduled(dropout=0.1)), run) == []
    (chosen,) = [point for point in run.trainer.strategy.plan.batch_curve if point.reason == "chosen"]
    assert chosen.batch_size == size
    assert max(point.batch_size for point in run.trainer.strategy.plan.batch_curve) <= ROWS


def test_a_run_in_parts_and_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def split(profile_at: Any, settings: Settings, choices: Choices, **others: Any) -> tuple[Profile, Plan]:
        assert choices == Choices(most=3, parts="auto")
        profile = profile_at(2, 2)
        return profile, make_plan(profile, replace(settings, accumulate=2))

    monkeypatch.setattr(batch_size, "choose_batch", split)
    run = fit(auto(micro_batches="auto", max_batch_size=3), scheduled(shuffle=False), max_epochs=1)
    assert (run.trainer.strategy.plan.parts, run.trainer.strategy.plan.accumulate) == (2, 2)
    plain = scheduled(shuffle=False, batch_size=2)
    with micro_batched_reference(plain.model, 2):
        stock = fit("auto", plain, accumulate_grad_batches=2, max_epochs=1)
    assert differences(stock, run) == []
    run.trainer.save_checkpoint(tmp_path / "split.ckpt")
    monkeypatch.setattr(batch_size, "choose_batch", no_choice)
    resumed = fit(auto(micro_batches="auto"), scheduled(shuffle=False), ckpt=tmp_path / "split.ckpt")
    assert (resumed.module.batch_size, resumed.trainer.strategy.plan.accumulate) == (2, 2)


def test_a_measured_step_in_the_memory_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose memory all logits would not fit in, the loss is measured as plans compute it."""
    monkeypatch.setattr(planning, "early_loss", lambda structure, **others: LossInBlock.early(structure, 0))
    run = fit(auto(max_batch_size=2), scheduled(dropout=0.1), max_epochs=1)
    size, profile = size_of(run), run.trainer.strategy.profile
    assert [option.name for option in profile.blocks[-1].options] == ["fused"]
    plain = fit("auto", scheduled(dropout=0.1, batch_size=size), max_epochs=1)
    assert differences(plain, run) == []


def test_samples_that_are_given_and_more_than_the_bound() -> None:
    with pytest.raises(ConfigError, match="max_batch_size=3 is less than the 4 samples per update that batch_size=2 "):
        fit(auto(max_batch_size=3), scheduled(batch_size=2), accumulate_grad_batches=2)
    with pytest.raises(ConfigError, match="max_batch_size=3 is less than the 4 samples .* micro_batches=4 and "):
        fit(auto(max_batch_size=3, micro_batches=4), scheduled())
    later = GradientAccumulationScheduler({0: 1, 1: 8})
    with pytest.raises(ConfigError, match="max_batch_size=2 is less than the 8 samples .* accumulate_grad_batches=8"):
        fit(auto(max_batch_size=2), scheduled(), callbacks=[later])


def test_a_run_that_goes_on_with_more_than_the_bound(tmp_path: Path) -> None:
    run = fit("auto", scheduled(batch_size=4), max_epochs=1)
    run.trainer.save_checkpoint(tmp_path / "four.ckpt")
    with pytest.raises(ConfigError):
        fit(auto(max_batch_size=2), scheduled(), ckpt=tmp_path / "four.ckpt")


def test_batches_per_update_are_chosen_for_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def several(profile_at: Any, settings: Settings, choices: Choices, **others: Any) -> tuple[Profile, Plan]:
        seen.append(choices)
        profile = profile_at(2, 1)
        return profile, make_plan(profile, replace(settings, accumulate=2))

    seen: list[Choices] = []
    monkeypatch.setattr(batch_size, "choose_batch", several)
    run = fit(auto(), scheduled(), max_epochs=1)
    assert run.trainer.accumulate_grad_batches == 1, "a next run of this Trainer chooses anew"
    fit(auto(), scheduled(), max_epochs=1, limit_train_batches=1)
    assert [choices.accumulate for choices in seen] == [None, 1], "an epoch may have too few batches"


def test_loaders_with_generators_of_their_own() -> None:
    def run(strategy: Any, batch_size: int = 1) -> tuple[Run, Data]:
        module = scheduled()
        data = Data(module.model, batch_size)
        made = lightning.pytorch.Trainer(
            strategy=strategy, accelerator="cpu", max_epochs=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        lightning.pytorch.seed_everything(8, verbose=False)
        made.fit(module, datamodule=data)
        return Run(module, made), data

    ours, data = run(auto())
    size = size_of(ours)
    assert data.batch_size == size
    stock, _ = run("auto", size)
    assert differences(stock, ours) == []


def test_sizes_that_do_not_fit_the_device_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = sample.measure

    def limited(trainer: Any, *args: Any, **kwargs: Any) -> Profile:
        if trainer.lightning_module.batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GB\nmore")
        return measured(trainer, *args, **kwargs)

    monkeypatch.setattr(sample, "measure", limited)
    run = fit(auto(), scheduled(), max_epochs=1)
    assert size_of(run) <= 2
    reasons = {point.batch_size: point.reason for point in run.trainer.strategy.plan.batch_curve}
    refused = "batch_size=3 does not fit while one block is measured: CUDA out of memory. Tried to allocate 2 GB"
    assert reasons[3] == refused
    monkeypatch.setattr(sample, "measure", lambda *args, **kwargs: bytearray(2**62))
    with pytest.raises(InfeasibleError, match="batch_size=1 does not fit while one block is measured"):
        fit(auto(), scheduled())


def test_other_errors_are_not_taken_for_sizes_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Profile:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(sample, "measure", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        fit(auto(), scheduled())


# -- continuing ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_keeps_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_epochs=1)
    settings = {"callbacks": [saver], "enable_checkpointing": True}
    first = fit(auto(), scheduled(shuffle=False), **settings)
    size = size_of(first)
    path = tmp_path / f"step={first.trainer.global_step // 2}.ckpt"
    assert torch.load(path)["lt_offload"]["batch_size"] == size

    monkeypatch.setattr(batch_size, "choose_batch", no_choice)
    resumed = fit(auto(), scheduled(shuffle=False), ckpt=path)
    assert size_of(resumed) == resumed.module.batch_size == size
    assert resumed.module.horizon == first.module.horizon
    first.module.losses = first.module.losses[-len(resumed.module.losses) :]
    first.module.lrs = first.module.lrs[-len(resumed.module.lrs) :]
    resumed.module.validation = first.module.validation = [torch.zeros(())]
    assert differences(first, resumed) == []

    other = 1 if size > 1 else 2
    with pytest.warns(UserWarning, match=f"checkpoint had batch_size={size}, this one has {other}"):
        fit(OffmateStrategy(memory=MEMORY, batch_size=other), scheduled(shuffle=False), ckpt=path)


@pytest.mark.slow
def test_fine_tuning_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tiny.model(tmp_path / "model"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    monkeypatch.setattr(batch_size, "_rows", lambda *args: 4)
    saver = ModelCheckpoint(tmp_path / "kept", filename="{step}", save_top_k=-1, every_n_train_steps=1)

    def run(strategy: Any, **settings: Any) -> Any:
        lightning.pytorch.seed_everything(1, verbose=False)
        module = FineTune(folder, lr=0.01, warmup_steps=2)
        data = FineTuneData(folder, path=str(tmp_path / "text.txt"), max_length=32)
        ckpt = settings.pop("ckpt", None)
        made = trainer(strategy, max_epochs=1, limit_val_batches=0, **settings)
        made.fit(module, datamodule=data, ckpt_path=ckpt)
        return made

    whole = run(auto(), callbacks=[saver], enable_checkpointing=True)
    size = whole.strategy.plan.batch_size
    sequences = len(whole.datamodule._train)
    assert whole.global_step == math.ceil(sequences / size) == whole.estimated_stepping_batches
    given = run(OffmateStrategy(memory=MEMORY, batch_size=size))
    resumed = run(auto(), ckpt=tmp_path / "kept" / "step=3.ckpt")
    assert resumed.datamodule.batch_size == size
    assert resumed.global_step == whole.global_step
    for other in (given, resumed):
        weights, others = whole.lightning_module.state_dict(), other.lightning_module.state_dict()
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_checkpoint_that_does_not_say_its_size(tmp_path: Path) -> None:
    stock = fit("auto", scheduled(), max_epochs=1)
    stock.trainer.save_checkpoint(tmp_path / "stock.ckpt")
    with pytest.raises(ConfigError, match="the checkpoint does not say which batch size its run had"):
        fit(auto(), scheduled(), ckpt=tmp_path / "stock.ckpt")


def test_a_saved_plan_brings_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fit(OffmateStrategy(memory=MEMORY, batch_size=3, report_dir=tmp_path), scheduled(), max_epochs=1)
    ours.trainer.save_checkpoint(tmp_path / "three.ckpt")
    monkeypatch.setattr(batch_size, "choose_batch", no_choice)
    replayed = fit(auto(plan=tmp_path / "plan.json"), scheduled(), max_epochs=1)
    assert size_of(replayed) == replayed.module.batch_size == 3
    assert differences(ours, replayed) == []
    assert Plan.load(tmp_path / "plan.json").batch_curve == ()

    fit(OffmateStrategy(memory=MEMORY, batch_size=2, report_dir=tmp_path), scheduled(), max_epochs=1)
    with pytest.raises(ConfigError, match=r"is for batch_size=2, the run of the checkpoint had batch_size=3"):
        fit(auto(plan=tmp_path / "plan.json"), scheduled(), ckpt=tmp_path / "three.ckpt")


# -- where it is -----------------------------------------------------------------------------------------------------


def test_hyperparameters_hold_it_too() -> None:
    class Kept(LightningDataModule):
        def __init__(self, batch_size: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> list[Tensor]:
            return [torch.ones(self.hparams["batch_size"], 2)]

    for both in (False, True):
        made = lightning.pytorch.Trainer(strategy="offmate", accelerator="cpu", logger=False)
        module = seeded_module()
        del module.batch_size
        made._data_connector.attach_data(module, datamodule=Kept())
        if both:
            made.datamodule.batch_size = 2
        made.strategy._lightning_module = module
        size = batch_size.BatchSize(made, "auto")
        assert size.value == 2
        with size.set_to(5):
            assert made.datamodule.train_dataloader()[0].shape == (5, 2)
        assert size.value == 2
        size.value = 3
        assert made.datamodule.hparams["batch_size"] == 3


def test_a_loader_made_already_is_refused() -> None:
    module = seeded_module()
    loader = module.train_dataloader()
    module.train_dataloader = None
    made = trainer(auto())
    with pytest.raises(ConfigError, match=r"batch_size='auto' cannot be set: the loader was given to fit\(\)"):
        made.fit(module, loader)


def test_no_batch_size_anywhere() -> None:
    module = seeded_module()
    del module.batch_size
    with pytest.raises(ConfigError, match="batch_size='auto' cannot be set: neither the datamodule nor"):
        fit(auto(), module)


def test_batches_that_do_not_follow_the_size() -> None:
    module = scheduled()
    two = next(iter(DataLoader(Tokens(module.model, 2, 0), batch_size=2)))
    module.sample_batch = lambda: two
    with pytest.raises(ConfigError, match=r"asked Scheduled for a batch of 1 and got 2; make .*sample_batch\(\)"):
        fit(auto(), module)


def test_collections_of_loaders_count_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    module = scheduled()

    def loaders() -> dict[str, Any]:
        return {
            "a": [DataLoader(torch.ones(9, 1), batch_size=module.batch_size)],
            "b": DataLoader(torch.ones(5, 1), batch_size=module.batch_size),
            "c": iter([]),
        }

    module.train_dataloader = loaders
    made = lightning.pytorch.Trainer(strategy="offmate", accelerator="cpu", logger=False)
    made._data_connector.attach_data(module)
    made.strategy._lightning_module = module
    assert batch_size._rows(made, batch_size.BatchSize(made, "auto")) == 5
    module.train_dataloader = lambda: iter([])
    assert batch_size._rows(made, batch_size.BatchSize(made, "auto")) == batch_size.LARGEST
