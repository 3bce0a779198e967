"""The loss of an update of several batches: the mean over their tokens, against plain PyTorch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BartConfig, BartForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.optimizers import LossAverage, mean_over, undivided
from tests.support import tiny
from tests.support.trainers import trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You (defined a `validation_step`|passed in a `val_dataloader`)"),
]

Batch = dict[str, Tensor]
LENGTHS = [63, 63, 5, 17, 63, 30, 2, 44, 12, 63, 1, 21, 63, 9, 33]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows of many lengths."""
    folder = tiny.model(tmp_path_factory.mktemp("model"))
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": ("abcdefg " * 8)[:n]}) for n in LENGTHS))
    return folder


class Update:
    """What came of one update: its batches, the weights before it, its gradients and the loss that was logged."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.weights: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self.logged: Tensor | None = None


class Recording(FineTune):
    """Keeps its updates."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.updates = [Update()]
        self.counted = False
        """Whether batches said how many tokens their update has."""
        self.positions: list[tuple[int, int]] = []

    @property
    def parts(self) -> list[int]:
        """Batches of every update."""
        return [len(update.batches) for update in self.updates if update.grads]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert batch.keys() <= {"input_ids", "labels", "attention_mask", "position_ids"}
        self.counted |= self._untold is not None
        names = ("input_ids", "labels", "attention_mask", "position_ids")
        self.updates[-1].batches.append({name: batch[name] for name in names if name in batch})
        order = self.trainer.datamodule.state_dict().get("order", {})  # type: ignore[attr-defined]
        self.positions.append((batch_idx, order.get("batches", -1)))
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.model is not None
        self.updates[-1].weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            self.updates[-1].grads[name] = parameter.grad.clone()

    def on_train_batch_end(self, *args: Any) -> None:
        if self.updates[-1].grads:
            self.updates[-1].logged = self.trainer.callback_metrics["train_loss"].clone()
            self.updates.append(Update())


def quiet(**settings: Any) -> Any:
    return trainer("auto", **{"max_epochs": 1, "limit_val_batches": 0} | settings)


def fit(folder: Path, *, data: dict[str, Any] | None = None, ckpt: Path | None = None, **settings: Any) -> Recording:
    loss_average: LossAverage | None = settings.pop("loss_average", None)
    lightning.pytorch.seed_everything(7, verbose=False)
    defaults = {"max_length": 64, "batch_size": 2, "validation_rows": 1, "pack": False}
    source = FineTuneData(str(folder), path=str(folder / "rows.jsonl"), **defaults | (data or {}))
    module = Recording(str(folder), lr=1e-2, schedule="constant", loss_average=loss_average)
    quiet(**settings).fit(module, datamodule=source, ckpt_path=ckpt, weights_only=True)
    return module


def trained(batch: Batch) -> int:
    return sum(1 for row in batch["labels"].tolist() for label in row[1:] if label != -100)


def plainly(model: Any, batches: list[Batch]) -> None:
    """Accumulate the gradients of the mean over the tokens of ``batches``."""
    tokens = sum(trained(batch) for batch in batches)
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits
        losses = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
        (losses / tokens).backward()


def by_transformers(model: Any, batches: list[Batch]) -> Tensor:
    """The same with the loss function of transformers; return the sum of its losses."""
    tokens = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum()
    total = torch.zeros(())
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits
        loss = ForCausalLMLoss(logits, batch["labels"], logits.shape[-1], num_items_in_batch=tokens)
        loss.backward()
        total += loss.detach()
    return total


def check(folder: Path, updates: list[Update]) -> None:
    """Compare every update with plain PyTorch and with transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.train()
    done = [update for update in updates if update.grads]
    assert done
    for update in done:
        model.load_state_dict(update.weights)
        for reference in (plainly, by_transformers):
            model.zero_grad()
            loss = reference(model, update.batches)
            assert all(p.grad.equal(update.grads[name]) for name, p in model.named_parameters())
        assert loss is not None
        assert update.logged is not None
        assert loss.equal(update.logged)


MODES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "padded": ({}, [3, 3, 1]),
    "grouped": ({"group_by_length": True}, [3, 3, 1]),
    "workers": ({"num_workers": 1}, [3, 3, 1]),
    "packed": ({"pack": True, "batch_size": 1}, [3, 3, 2]),
    "wrapped": ({"pack": "wrapped", "batch_size": 1}, [3, 3, 2]),
    "streamed": ({"streaming": True, "stream_buffer": 6}, [3, 3, 3]),
    "streamed by a worker": ({"streaming": True, "stream_buffer": 6, "num_workers": 1}, [3, 3, 3]),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_token_of_an_update_counts_alike(folder: Path, mode: str) -> None:
    data, parts = MODES[mode]
    module = fit(folder, data=data, accumulate_grad_batches=3, max_steps=len(parts), max_epochs=-1)
    assert module.parts == parts
    counts = [[trained(batch) for batch in update.batches] for update in module.updates]
    assert mode == "wrapped" or any(len(set(each)) > 1 for each in counts), "otherwise both means are the same"
    check(folder, module.updates)


def test_updates_end_where_lightning_ends_them(folder: Path) -> None:
    limited = fit(folder, accumulate_grad_batches=2, limit_train_batches=5, max_epochs=2)
    assert limited.parts == [2, 2, 1] * 2
    check(folder, limited.updates)
    scheduled = fit(folder, callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})], max_epochs=2)
    assert scheduled.parts == [1] * 7 + [4, 3]
    check(folder, scheduled.updates)


def test_one_batch_is_its_own_mean(folder: Path) -> None:
    one = fit(folder)
    assert one.parts == [1] * 7
    check(folder, one.updates)
    counted = fit(folder, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])
    assert (one.counted, counted.counted) == (False, True)
    for other in (fit(folder, loss_average="batches"), counted):
        for left, right in zip(one.updates[:-1], other.updates[:-1], strict=True):
            assert all(grad.equal(right.grads[name]) for name, grad in left.grads.items())
            assert left.logged is not None
            assert right.logged is not None
            assert left.logged.equal(right.logged)


def test_the_mean_of_means_is_lightnings(folder: Path) -> None:
    module = fit(folder, loss_average="batches", accumulate_grad_batches=3)
    assert not module.counted
    assert module.parts == [3, 3, 1]
    model = AutoModelForCausalLM.from_pretrained(folder)
    for update in module.updates[:-1]:
        model.load_state_dict(update.weights)
        model.zero_grad()
        means = [model(**batch, use_cache=False).loss for batch in update.batches]
        for mean in means:
            (mean / 3).backward()
        assert all(p.grad.equal(update.grads[name]) for name, p in model.named_parameters())
        assert update.logged is not None
        assert (sum(mean.detach() for mean in means) / len(means)).equal(update.logged)


class Saving(Callback):
    """Saves after some batches of the first epoch."""

    def __init__(self, folder: Path, *after: int) -> None:
        self.folder, self.after = folder, after

    def on_train_batch_end(self, trainer: Any, module: LightningModule, outputs: Any, batch: Any, idx: int) -> None:
        if idx + 1 in self.after and not trainer.current_epoch:
            trainer.save_checkpoint(self.folder / f"{idx + 1}.ckpt")


@pytest.mark.parametrize("mode", ["padded", "streamed"])
def test_a_run_goes_on_in_the_middle(folder: Path, tmp_path: Path, mode: str) -> None:
    data = MODES[mode][0]
    settings: dict[str, Any] = {"data": data, "accumulate_grad_batches": 3, "max_steps": 4, "max_epochs": -1}
    whole = fit(folder, callbacks=[Saving(tmp_path, 3, 5)], **settings)
    if mode == "padded":
        # reading ahead is not getting ahead
        assert whole.positions == [(idx, idx + 1) for idx in [*range(7), *range(3)]]
    between = fit(folder, ckpt=tmp_path / "3.ckpt", **settings)
    assert between.parts == whole.parts[1:]
    for left, right in zip(whole.updates[1:-1], between.updates[:-1], strict=True):
        assert all(grad.equal(right.grads[name]) for name, grad in left.grads.items())
    # Lightning does not keep the gradients of batches before: the update is the mean over the others
    within = fit(folder, ckpt=tmp_path / "5.ckpt", **settings)
    assert within.parts == [1, *whole.parts[2:]]
    assert within.updates[0].batches[0]["labels"].equal(whole.updates[1].batches[2]["labels"])
    check(folder, within.updates)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_was_left_of_an_update_is_not_in_the_next(folder: Path) -> None:
    class Breaking(Recording):
        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
            return -1 if self.trainer.current_epoch == 0 and batch_idx == 2 else None

    source = FineTuneData(str(folder), path=str(folder / "rows.jsonl"), max_length=64, pack=False, batch_size=2)
    module = Breaking(str(folder), schedule="constant")
    quiet(accumulate_grad_batches=3, max_epochs=2, limit_train_batches=3).fit(module, datamodule=source)
    assert len(module.updates[0].batches) == 5, "two of the epoch that ended early, three of the next"
    module.updates[0].batches = module.updates[0].batches[2:]
    check(folder, module.updates)


def test_data_of_ones_own_may_say(folder: Path) -> None:
    rows = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)}] * 4
    run = quiet(accumulate_grad_batches=2)
    run.fit(FineTune(str(folder), schedule="constant"), DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    assert run.global_step == 1
    module = FineTune(str(folder), schedule="constant", loss_average="tokens")
    with pytest.raises(ConfigError, match="loss_average=tokens: the batches have no 'num_items_in_batch'") as error:
        quiet(accumulate_grad_batches=2).fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    assert "set model.loss_average=batches" in str(error.value)
    told = [{name: ids[None] for name, ids in row.items()} | {"num_items_in_batch": torch.tensor(10)} for row in rows]
    run = quiet(accumulate_grad_batches=2)
    run.fit(module, DataLoader(told, batch_size=None))  # type: ignore[arg-type]
    assert run.global_step == 2


def test_modules_of_ones_own_get_batches_as_they_are(folder: Path) -> None:
    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.keys: set[str] = set()

        def training_step(self, batch: Batch) -> Tensor:
            self.keys |= batch.keys()
            return self.layer(torch.ones(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Own()
    source = FineTuneData(str(folder), path=str(folder / "rows.jsonl"), max_length=64, pack=False, batch_size=2)
    quiet(accumulate_grad_batches=2).fit(module, datamodule=source)
    assert module.keys == {"input_ids", "labels", "attention_mask"}


class WholeBatch:
    """Gives the model the whole batch: were it told of the tokens, it would divide by them, and Lightning again."""

    updates: list[Update]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.updates[-1].batches.append(dict(batch))
        loss: Tensor = self.model(**batch, use_cache=False).loss  # type: ignore[attr-defined]
        self.log("train_loss", loss)  # type: ignore[attr-defined]
        return loss


class OwnStep(WholeBatch, Recording):  # type: ignore[misc]
    """Has its step from elsewhere."""


def test_steps_of_ones_own_get_lightnings_mean(folder: Path) -> None:
    source = FineTuneData(str(folder), path=str(folder / "rows.jsonl"), max_length=64, pack=False, batch_size=2)
    module = OwnStep(str(folder), schedule="constant")
    quiet(accumulate_grad_batches=3, max_steps=1).fit(module, datamodule=source)
    update = module.updates[0]
    assert len(update.batches) == 3
    model = AutoModelForCausalLM.from_pretrained(folder)
    for batch in update.batches:
        (model(**batch, use_cache=False).loss / 3).backward()
    assert all(p.grad.equal(update.grads[name]) for name, p in model.named_parameters())
    with pytest.raises(ConfigError, match=r"OwnStep\.training_step does not call that of FineTune.*=batches"):
        quiet(accumulate_grad_batches=3).fit(OwnStep(str(folder), loss_average="tokens"), datamodule=source)


def test_a_model_that_computes_its_loss_itself_is_refused() -> None:
    size = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 1, "decoder_ffn_dim": 8, "vocab_size": 9}
    model = BartForCausalLM(BartConfig(**size, max_position_embeddings=8, pad_token_id=1))
    ids = torch.tensor([[3, 4, 5]])
    before = model.loss_function
    with (
        pytest.raises(UnsupportedError, match="BartForCausalLM computes its loss itself.*loss_average=batches"),
        mean_over(model, torch.tensor(4)),
    ):
        model(input_ids=ids, labels=ids)
    with pytest.raises(UnsupportedError, match="Linear computes its loss itself"), mean_over(nn.Linear(1, 1), ids):
        pass
    assert model.loss_function is before


def test_the_division_of_lightning_is_undone_to_the_bit() -> None:
    def slope(count: int, times: Any) -> Tensor:
        loss = torch.tensor(3.7, requires_grad=True)
        (times(loss, count) / count).backward()
        assert loss.grad is not None
        return loss.grad

    assert all(slope(count, undivided).equal(torch.ones(())) for count in range(1, 300))
    assert not all(slope(count, torch.mul).equal(torch.ones(())) for count in range(1, 300))
