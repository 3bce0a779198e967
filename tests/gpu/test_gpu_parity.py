"""Training with the engine equals plain training on the same device bit for bit, under deterministic algorithms.

Updates on the host are compared with plain training that updates the same weights on the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import lt_offload
from lt_offload.optim import AdamW
from tests.gpu.machine import between
from tests.gpu.reference import trained_plainly
from tests.gpu.target import ROOM, Target, delayed
from tests.parity.engine import test_zero_copy_plans as zero_copy
from tests.parity.engine.test_engine import OPTIONS, PLACES, drawn
from tests.parity.engine.test_head import CHUNK, use_reference
from tests.parity.tables.tied import in_two_parts
from tests.support import models
from tests.support.engines import Case, changed, differences, equal, make_optimizer, planned, trained_on
from tests.support.models import FAMILIES
from tests.support.user_nets import ordinary

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.no_cover]

ALL_OPTIONS = OPTIONS[-1]
EVERYWHERE = ("device", "paged", "host")
SEED = 20251117

CASES = [
    Case(options=ALL_OPTIONS, places=EVERYWHERE, family="llama-tied", dropout=0.1, seed=1),
    Case(options=ALL_OPTIONS, places=("device", "paged"), dtype="bfloat16", dropout=0.1, seed=2),
    Case(options=("mixed", "offload"), places=("host",), family="bloom", lora=True, dropout=0.1, seed=3),
    Case(
        options=("recompute", "reload"), places=("paged",), optimizer="sgd", shapes=((2, 12), (3, 20), (1, 7)), seed=4
    ),
    Case(options=("keep",), places=("device",), optimizer="adam", family="phi", lag=0, lead=0, seed=5),
    Case(options=("offload",), places=("paged", "host"), dtype="bfloat16", family="mistral", roomy=True, seed=6),
    Case(options=ALL_OPTIONS, places=EVERYWHERE, lora=True, dropout=0.1, tile_tokens=5, seed=7),
]


def sample(count: int) -> list[Case]:
    """Where updates are at several places, the optimizer's implementation must not depend on which others there are."""
    axes: dict[str, list[Any]] = {
        "family": list(FAMILIES),
        "options": OPTIONS,
        "places": PLACES,
        "dtype": ["float32", "bfloat16"],
        "dropout": [0.0, 0.1],
        "lora": [False, True],
        "optimizer": ["adamw-fused", "adamw-fused", "adamw"],
        "lag": [0, 1],
        "lead": [0, 1],
        "roomy": [False, True],
    }
    return drawn(axes, count, SEED)


def compare(case: Case, target: Target) -> None:
    plan = planned(case)
    expected = trained_plainly(case, plan, target.torch_device)
    actual, _ = trained_on(target.open(seed=case.seed), case, plan)
    assert differences(expected, actual) == []
    assert changed(case, actual)


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES, ids=str)
def test_representative_cases(case: Case, target: Target) -> None:
    compare(case, target)


@pytest.mark.quick
def test_logits_that_are_capped_between_projection_and_loss(target: Target) -> None:
    """Both are one block, which takes the cap in."""
    options = ("recompute", "mixed")
    compare(Case(options=options, places=("paged", "host"), family="gemma2", last_option="fused", seed=7), target)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_in_chunks(dtype: str, target: Target) -> None:
    """Whose gradients the forward makes: those of the reference on the same device."""
    layout = {"options": ("recompute", "mixed"), "places": ("paged", "host"), "last_option": "chunked"}
    case = Case(family="gemma2", dtype=dtype, chunk_tokens=CHUNK, seed=8, **layout)
    plan = planned(case)
    expected = trained_plainly(case, plan, target.torch_device, change=use_reference)
    actual, _ = trained_on(target.open(seed=case.seed), case, plan)
    assert differences(expected, actual) == []


@pytest.mark.parametrize("case", sample(36), ids=str)
def test_sampled_cases(case: Case, target: Target) -> None:
    compare(case, target)


@pytest.mark.quick
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_whatever_is_late(seed: int, target: Target) -> None:
    """Copies, updates and kernels take random times longer; no order may depend on their being fast."""
    case = replace(CASES[0], seed=seed)
    plan = planned(case)
    expected = trained_plainly(case, plan, target.torch_device)
    actual, _ = trained_on(delayed(target.open(), target, seed, 1e-3), case, plan)
    assert differences(expected, actual) == []


@pytest.mark.parametrize(
    ("case", "how", "grad_zero_copy"), zero_copy.CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_weights_read_in_host_memory(case: Case, how: zero_copy.How, grad_zero_copy: bool, target: Target) -> None:
    plan, _ = zero_copy.planned(case, how, grad_zero_copy=grad_zero_copy)
    expected = trained_plainly(case, plan, target.torch_device)
    actual, _ = trained_on(target.open(), case, plan)
    assert differences(expected, actual) == []


@pytest.mark.parametrize("optimizer", ["adamw-fused", AdamW])
def test_tied_embeddings_in_two_parts(optimizer: Any, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "VOCAB", 512)  # a smaller table travels with other tensors
    monkeypatch.setattr(models, "_built", {})
    case = Case(family="llama-tied", optimizer=optimizer, shapes=((2, 12), (3, 12), (2, 7)))
    plan = in_two_parts(case)
    expected = trained_plainly(case, plan, target.torch_device)
    actual, _ = trained_on(target.open(), case, plan)
    assert differences(expected, actual) == []


@pytest.mark.parametrize("optimizer", ["adamw-fused", AdamW])
def test_tied_embeddings_in_two_parts_in_windows(
    optimizer: Any, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "VOCAB", 512)
    monkeypatch.setattr(models, "_built", {})
    case = Case(family="llama-tied", optimizer=optimizer, shapes=((2, 12), (3, 12), (2, 7), (2, 12), (1, 5)))
    plan = in_two_parts(case, window=2)
    expected = trained_plainly(case, plan, target.torch_device, window=2)
    actual, _ = trained_on(target.open(), case, plan, window=2)
    assert differences(expected, actual) == []


@pytest.mark.quick
def test_plain_loop(target: Target) -> None:
    """A plan made here for less memory, in the loop that the README shows."""
    case = Case(options=("keep",), places=("paged",))
    batch = models.batch(models.build(layers=6))
    batch = {name: tensor.to(target.torch_device) for name, tensor in batch.items()}

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = models.build(layers=6, dropout=0.1)
        return model, make_optimizer(model, case.optimizer)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return ordinary(model, optimizer, [batch] * 3)

    model, optimizer = fresh()
    profile = lt_offload.profile(model, batch, optimizer=optimizer, device=target.torch_device)
    plan = lt_offload.solve(profile, memory=between(profile, 0.3, host_update=False), host_update=False)
    assert [op for op in plan.ops if op.lane in ("h2d", "d2h")], "nothing travels"
    # So little memory is less than what PyTorch's allocator takes at a time.
    roomy = replace(plan, budget_bytes=max(plan.budget_bytes, ROOM if target.cuda else 0))
    with lt_offload.offloaded(model, optimizer, batch, plan=roomy, accelerator=target.accelerator) as engine:
        losses = train(model, optimizer)
        assert engine.stats.iterations == 3
    reference, optimizer = fresh()
    expected = train(reference.to(target.torch_device), optimizer)
    assert all(equal(a, b) for a, b in zip(expected, losses, strict=True))
    assert all(equal(a, b) for a, b in zip(reference.parameters(), model.parameters(), strict=True))
