"""A model whose logits are larger than its weights, planned and trained at budgets that leave them less and less."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import ModelOutput

from lt_offload.errors import InfeasibleError
from lt_offload.model import head
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import make_plan
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from lt_offload.schema.profile import Profile
from tests.parity.engine.test_head import use_reference
from tests.parity.windows.training import Training, budgets
from tests.support import models
from tests.support.engines import Case, Result, differences, make_optimizer, trained_by
from tests.support.engines import build as build_case
from tests.support.hostile.device import HostileDevice
from tests.support.profiles.budgets import least
from tests.support.user_nets import ordinary

VOCABULARY = 4096
CHUNK = 32


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_LEAST_TOKENS", CHUNK)
    monkeypatch.setattr(head, "_PART_BYTES", CHUNK * 4 * VOCABULARY)


def build() -> nn.Module:
    return models.build("llama-tied", layers=2, vocab_size=VOCABULARY)


def batches() -> list[dict[str, Any]]:
    return [models.batch(build(), batch_size=4, sequence_length=48, seed=seed) for seed in range(3)]


@cache
def measured() -> Profile:
    model = build()
    return profile(
        model,
        batches()[0],
        optimizer=make_optimizer(model, "adamw-fused"),
        device="cpu",
        hardware=replace(load_hardware("rtx-3060-12gb"), context_bytes=0),
        run=lambda batch: model(**batch).loss,
    )


def only(*names: str, of: Profile | None = None) -> Profile:
    """The profile with these options of the last block only."""
    found = of or measured()
    last = found.blocks[-1]
    options = tuple(option for option in last.options if option.name in names)
    assert {option.name for option in options} == set(names)
    return replace(found, blocks=(*found.blocks[:-1], replace(last, options=options)))


def plainly(*, in_chunks: bool) -> Result:
    model = build()
    if in_chunks:
        use_reference(model, CHUNK)
    optimizer = make_optimizer(model, "adamw-fused")
    return Result(ordinary(model, optimizer, batches()), model, optimizer)


def within(memory: int, **settings: Any) -> tuple[Result, str]:
    """Train in ``memory``; return the result and the last block's option."""
    plan = make_plan(measured(), Settings(memory=memory, solver_time_limit=1000, **settings))
    notes = " ".join(plan.notes)
    assert ("chunked_loss_reference" in notes) == (plan.options[-1] == "chunked")
    model = build()
    device = HostileDevice(plan.budget_bytes, "lazy", check=True)
    found, peak = trained_by(device, plan, model, make_optimizer(model, "adamw-fused"), batches())
    assert peak <= plan.predicted.device_peak_bytes <= memory
    assert peak >= 0.9 * plan.predicted.device_peak_bytes
    return found, plan.options[-1]


@pytest.mark.slow
def test_budgets() -> None:
    """Fused where all copies of the logits do not fit (it may be faster elsewhere), chunked where fused does not."""
    plain = plainly(in_chunks=False)
    kept, fused, chunked = least(only("keep", "offload")), least(only("fused")), least(measured())
    logits = 4 * 48 * VOCABULARY * 4
    assert kept - fused > 1.5 * logits
    assert fused - chunked > 0.5 * logits
    for memory, options in ((4 * kept, {"keep", "fused"}), ((kept + fused) // 2, {"fused"}), (fused, {"fused"})):
        found, used = within(memory)
        assert used in options
        assert differences(plain, found) == []
    reference = plainly(in_chunks=True)
    for memory in (fused - 1, chunked):
        found, used = within(memory)
        assert used == "chunked"
        assert differences(reference, found) == []
    with pytest.raises(InfeasibleError, match="is enough"):
        within(chunked - 1)


@pytest.mark.slow
@pytest.mark.sampled
def test_chunks_as_asked() -> None:
    """With ``chunked_loss`` at any budget, from the smallest, which is that of the last resort."""
    reference = plainly(in_chunks=True)
    least_chunked = least(measured(), chunked_loss=True)
    assert least_chunked == least(measured())
    for memory in (least_chunked, 2 * least_chunked, 4 * least(only("keep", "offload"))):
        found, used = within(memory, chunked_loss=True)
        assert used == "chunked"
        assert differences(reference, found) == []


def test_chunks_that_cannot_be() -> None:
    plan = make_plan(only("keep", "fused"), Settings(memory="1GB", chunked_loss=True, solver_time_limit=1000))
    assert plan.options[-1] != "chunked"
    assert any("chunked_loss=True has no effect" in note for note in plan.notes)


WINDOWS = [
    Case(family="llama-tied"),
    Case(family="llama", dtype="bfloat16"),
    Case(family="gemma2", dtype="bfloat16", lora=True),
    Case(family="gemma2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_chunks_in_windows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches per update: the gradient of each loss is a third, which no dtype has."""
    monkeypatch.setattr(head, "_LEAST_TOKENS", 16)
    monkeypatch.setattr(head, "_PART_BYTES", 16 * 4 * models.VOCAB)
    windows = [[(2, 12)] * 3, [(2, 12)] * 3, [(2, 9), (2, 12)]]
    start = build_case(case)
    training = Training(start=start, windows=windows)
    settings = {"accumulate": 3, "chunked_loss": True}
    optimizer, batch = make_optimizer(start, "adamw-fused"), models.batch(start, batch_size=2, sequence_length=12)
    card = replace(load_hardware("rtx-3060-12gb"), context_bytes=0)
    found = profile(
        start, batch, optimizer=optimizer, device="cpu", hardware=card, run=lambda batch: start(**batch).loss
    )
    for memory in budgets(found, **settings):
        plan = make_plan(found, Settings(memory=memory, solver_time_limit=1000, **settings))
        assert plan.options[-1] == "chunked"
        assert plan.chunk_tokens == 16
        trained, _ = training.by(plan)
        assert differences(training.plainly(lambda model: use_reference(model, 16)), trained) == []


def test_no_chunks_without_recomputation_nor_where_another_planner_fits() -> None:
    fused = least(only("fused"))
    with pytest.raises(InfeasibleError, match="recompute=True may help"):
        make_plan(measured(), Settings(memory=fused, recompute=False))
    with pytest.raises(InfeasibleError, match="planner='resident' keeps everything"):
        make_plan(measured(), Settings(memory=fused, planner="resident"))
    with pytest.raises(InfeasibleError):
        make_plan(measured(), Settings(memory=fused - 1), exact=True)


class WithAnother(nn.Module):
    """A model and a second one outside the blocks, whose loss is computed after the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.other = models.build(layers=3), models.build(layers=2, seed=5)

    def forward(self, **batch: Any) -> Any:
        return ModelOutput(loss=self.model(**batch).loss + 0.5 * self.other(**batch).loss)


@pytest.mark.slow
def test_what_follows_the_models_own_loss_has_room() -> None:
    """Its activations wait beside a last block that computes that loss."""
    start = WithAnother()
    batches = [models.batch(start.model, batch_size=2, sequence_length=12, seed=seed) for seed in range(3)]
    optimizer = make_optimizer(start, "adamw-fused")
    found = only(
        "fused", of=profile(start, batches[0], optimizer=optimizer, device="cpu", run=lambda b: start(**b).loss)
    )
    plain = copy.deepcopy(start)
    optimizer = make_optimizer(plain, "adamw-fused")
    expected = Result(ordinary(plain, optimizer, batches), plain, optimizer)
    for settings in ({"activation_offload": False}, {}):
        plan = make_plan(found, Settings(memory=least(found, **settings), solver_time_limit=1000, **settings))
        model = copy.deepcopy(start)
        used = make_optimizer(model, "adamw-fused")
        device = HostileDevice(plan.budget_bytes, "lazy", check=True)
        result, peak = trained_by(device, plan, model, used, batches, after=used.zero_grad)
        assert differences(expected, result) == []
        # Gradients outside the blocks are planned for all the time, and gone here when the second model runs.
        gradients = sum(p.nbytes for p in start.other.parameters())
        predicted = plan.predicted.device_peak_bytes
        assert 0.95 * predicted - gradients <= peak <= predicted


class WithClassifier(nn.Module):
    """A model and a small classifier outside the blocks, most of whose memory is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.build(layers=3)
        self.other = nn.Sequential(nn.Embedding(97, 16), nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 97))

    def forward(self, **batch: Any) -> Any:
        loss = self.model(**batch).loss
        found = self.other(batch["input_ids"]).flatten(0, 1)
        return ModelOutput(loss=loss + F.cross_entropy(found, batch["labels"].flatten()))


@pytest.mark.slow
def test_gradients_that_are_added_to_others_have_room() -> None:
    """In a window, gradients outside the blocks are there for a moment beside their sums."""
    model = WithClassifier()
    batches = [models.batch(model.model, batch_size=2, sequence_length=12, seed=seed) for seed in range(4)]
    optimizer = make_optimizer(model, "adamw-fused")
    found = only(
        "fused", of=profile(model, batches[0], optimizer=optimizer, device="cpu", run=lambda b: model(**b).loss)
    )
    plan = make_plan(found, Settings(memory=least(found, accumulate=2), solver_time_limit=1000, accumulate=2))
    device = HostileDevice(plan.budget_bytes, "lazy", check=True)
    _, peak = trained_by(device, plan, model, optimizer, batches, after=optimizer.zero_grad, window=2)
    assert peak <= plan.predicted.device_peak_bytes


class WithBias(nn.Module):
    """A model whose logits' loss has a large table beside it, which is no block."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.table = models.build(layers=2), nn.Parameter(torch.randn(97, 256))

    def forward(self, **batch: Any) -> Any:
        return ModelOutput(loss=self.model(**batch).loss + self.table[0].mean())


def test_updates_outside_the_blocks_have_room_at_the_smallest_budget() -> None:
    """Torch's AdamW, if it is not fused, takes a root and a quotient of a tensor's size for a moment."""
    start = WithBias()
    batch = models.batch(start.model, batch_size=1, sequence_length=4)
    optimizer = torch.optim.AdamW(start.parameters(), lr=1e-2, foreach=False)
    found = profile(start, batch, optimizer=optimizer, device="cpu", run=lambda b: start(**b).loss)
    plan = make_plan(found, Settings(memory=least(found), solver_time_limit=1000))
    device = HostileDevice(plan.budget_bytes, "lazy", check=True)
    _, peak = trained_by(device, plan, start, optimizer, [batch, batch])
    assert start.table.nbytes < peak <= plan.predicted.device_peak_bytes
