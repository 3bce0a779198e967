"""First steps whose sums are in another order than plain PyTorch's: of batches in parts, and of losses in chunks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lt_offload import OffmateStrategy, micro_batched_reference
from lt_offload.errors import UnsupportedError
from lt_offload.execute.blocks.run import BlockRun
from lt_offload.execute.user_code.logits import LossInBlock
from lt_offload.model import head
from lt_offload.model.blocks import find_blocks
from lt_offload.profiling.step.first import FirstStep
from lt_offload.schema.plan import Plan
from lt_offload.strategy.first.planning import Planning
from lt_offload.strategy.first.survey import early_loss
from tests.parity.engine.test_head import CHUNK, use_reference
from tests.support.trainers import Module, Run, differences, fit, tight

WAYS: dict[str, dict[str, Any]] = {
    "tight": {},
    "recomputed": {"activation_offload": False},
    "in a window": {"window": 2},
    "resident": {"memory": "1GB"},
}


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_LEAST_TOKENS", CHUNK)
    monkeypatch.setattr(head, "_PART_BYTES", CHUNK * 4 * 97)


def made(kind: type[Module] = Module, **options: Any) -> Any:
    L.seed_everything(7, verbose=False)
    return kind(**{"batch_size": 4, "dropout": 0.1} | options)


def trained(kind: type[Module] = Module, *, way: str = "tight", **options: Any) -> tuple[Run, Plan]:
    settings = dict(WAYS[way])
    window, module = settings.pop("window", 1), made(kind)
    strategy = OffmateStrategy(**{"memory": tight(module), "solver_time_limit": 2.0} | settings | options)
    run = fit(strategy, module, max_epochs=1, accumulate_grad_batches=window)
    assert strategy.plan is not None
    return run, strategy.plan


def window_of(way: str) -> dict[str, Any]:
    return {"max_epochs": 1, "accumulate_grad_batches": WAYS[way].get("window", 1)}


@pytest.mark.parametrize("room", ["room", "no room"])
@pytest.mark.parametrize("way", WAYS)
def test_parts(way: str, room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``no room``: activations of the first step do not wait in RAM, so that blocks run again, part by part."""
    again: set[str] = set()
    if room == "no room":
        as_first = BlockRun.as_first

        def counted(run: BlockRun, *args: Any, **options: Any) -> Any:
            again.add(run.name)
            return as_first(run, *args, **options)

        monkeypatch.setattr(BlockRun, "as_first", counted)
        monkeypatch.setattr(FirstStep, "host_room", lambda *_: 0)
    module = made()
    with micro_batched_reference(module.model, 2):
        plain = fit("auto", module, **window_of(way))
    run, plan = trained(way=way, micro_batches=2)
    assert plan.parts == 2
    assert differences(plain, run) == []
    assert again or room == "room"


class Half(Module):
    """Takes whole batches in the first step, and parts from then on, where stock Lightning trains it."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if self.trainer.global_step == 1 and type(self.trainer.strategy).__name__ == "SingleDeviceStrategy":
            self.parts = ExitStack()
            self.parts.enter_context(micro_batched_reference(self.model, 2))

    def on_fit_end(self) -> None:
        if hasattr(self, "parts"):
            self.parts.close()


def test_a_number_that_is_chosen_by_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(measure: Any, settings: Any) -> Any:
        from lt_offload.plan import make_plan

        measure(1)
        profile = measure(2)
        return profile, make_plan(profile, settings)

    monkeypatch.setattr("lt_offload.strategy.first.planning.choose_parts", two)
    plain = fit("auto", made(Half), max_epochs=1)
    run, plan = trained(Half, micro_batches="auto")
    assert plan.parts == 2
    assert differences(plain, run) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_whose_logits_do_not_all_fit_beside_their_logarithms(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of little memory the first step computes the loss as plans do, with the same numbers."""
    plain = fit("auto", made(), **window_of(way))
    monkeypatch.setattr(Planning, "_order_of_sums", lambda self, structure, *_: (1, LossInBlock.early(structure, 0)))
    run, plan = trained(way=way)
    assert plan.options[-1] == "fused"
    assert differences(plain, run) == []


def test_the_loss_saves_memory_only_on_a_gpu_where_all_logits_would_not_fit() -> None:
    structure, gpu = find_blocks(made().model), torch.device("cuda")
    saving = early_loss(structure, 64, 10**5, gpu)
    assert saving is not None
    assert saving.module.chunk == 0, "all tokens at once: plain PyTorch's numbers"
    assert early_loss(structure, 64, 10**9, gpu) is None
    assert early_loss(structure, 64, 10**5, torch.device("cpu")) is None


@pytest.mark.parametrize("way", WAYS)
def test_chunks(way: str) -> None:
    module = made()
    use_reference(module.model, CHUNK)
    plain = fit("auto", module, **window_of(way))
    run, plan = trained(way=way, chunked_loss=True)
    assert plan.chunk_tokens == CHUNK
    names = [name for name in differences(plain, run) if not name.startswith("validation")]  # of the reference's logits
    assert names == []


class OwnLoss(Module):
    """Has a loss of its own, for which all logits exist."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss


def test_logits_that_are_used_exist() -> None:
    run, plan = trained(OwnLoss, chunked_loss=True)
    assert any("chunked_loss=True has no effect" in note for note in plan.notes)
    assert differences(fit("auto", made(OwnLoss), max_epochs=1), run) == []


class Accuracy(Module):
    """Looks at logits of which the model has made its loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(**batch)
        out.logits.argmax(-1)
        return out.loss


class TwoLosses(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss + super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "what"), [(Accuracy, "logits were used by argmax"), (TwoLosses, "calls the model 2 times")]
)
def test_what_chunks_leave_no_room_for_is_named_before_training(kind: type[Module], what: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{what}.*leave out chunked_loss"):
        trained(kind, chunked_loss=True)
