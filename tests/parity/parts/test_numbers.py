"""Blocks that take a batch in parts give, bit for bit, what plain PyTorch gives with ``micro_batched_reference``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lt_offload
from lt_offload.schema.profile import Profile
from tests import sampling
from tests.parity.engine import test_reruns as reruns
from tests.parity.parts import nets
from tests.support import engines, models
from tests.support.engines import Case, Result, changed, differences, make_optimizer, plain, planned, trained_on
from tests.support.hostile.device import HostileDevice

PARTS = 4
SHAPES = ((7, 12), (4, 9), (3, 11))
"""Uneven parts, one sample each, and fewer samples than parts."""


def reference(case: Case, parts: int = PARTS) -> Result:
    with ExitStack() as within:

        def prepare(model: nn.Module) -> None:
            within.enter_context(lt_offload.micro_batched_reference(model, parts))

        return plain(case, prepare)


def ours(case: Case) -> Result:
    device = HostileDevice(engines.BUDGET, mode=case.mode, seed=case.seed, check=True)
    return trained_on(device, case, replace(planned(case), parts=PARTS))[0]


CASES = [
    *(
        Case(family=family, options=(option,), places=("host", "device", "paged"), shapes=SHAPES)
        for family in ("llama", "llama-tied")
        for option in ("keep", "recompute", "offload", "mixed", "reload")
    ),
    *(
        Case(family="phi", options=("keep", "recompute", "offload", "mixed", "reload"), shapes=SHAPES, **more)
        for more in (
            {"dropout": 0.1},
            {"dtype": "bfloat16"},
            {"lora": True, "dropout": 0.1},
            {"places": ("host",), "dropout": 0.1, "dtype": "bfloat16"},
        )
    ),
    # Its bias of attention has a row per sample and head.
    *(
        Case(family="bloom", options=(option, "keep"), places=("host", "device", "paged"), shapes=SHAPES, **more)
        for option in ("recompute", "offload", "mixed")
        for more in ({}, {"lora": True}, {"dtype": "bfloat16", "dropout": 0.1})
    ),
]


@pytest.mark.parametrize("case", sampling.some(CASES, 8), ids=str)
def test_all_options_give_the_numbers_of_the_reference(case: Case) -> None:
    found = ours(case)
    assert differences(reference(case), found) == []
    assert changed(case, found) or case.lora


def test_the_reference_sums_in_another_order_than_the_whole_batch() -> None:
    case = Case(shapes=SHAPES)
    assert differences(plain(case), reference(case)) != []
    assert differences(plain(case), reference(case, parts=1)) == []


# -- budgets ----------------------------------------------------------------------------------------------------------


def start() -> nn.Module:
    return models.build("llama-tied", dropout=0.1)


def sample(samples: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    return models.batch(start(), batch_size=samples, sequence_length=24, seed=seed)


@pytest.fixture(scope="module")
def profile() -> Profile:
    model = start()
    return lt_offload.profile(
        model, sample(), optimizer=make_optimizer(model, "adamw-fused"), run=loss_of(model), micro_batches=PARTS
    )


def loss_of(model: nn.Module) -> Any:
    return lambda batch: model(**batch).loss


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "accumulate"), sampling.grid(["tight", "middle", "resident"], [1, 2], count=4))
def test_every_budget_gives_the_numbers_of_the_reference(profile: Profile, budget: str, accumulate: int) -> None:
    plan = nets.plan_for(profile, budget, spare=0.02, accumulate=accumulate)
    results = []
    for plainly in (True, False):
        model = start()
        optimizer = make_optimizer(model, "adamw-fused")
        context: Any = lt_offload.micro_batched_reference(model, PARTS)
        if not plainly:
            context = lt_offload.offloaded(
                model, optimizer, sample(), plan=plan, micro_batches=PARTS, accelerator="cpu", accumulate=accumulate
            )
        losses = []
        with context:
            torch.manual_seed(1)
            for step in range(3):
                for number in range(accumulate):
                    loss = model(**sample(8 - step, seed=2 * step + number)).loss
                    loss.backward()
                    losses.append(loss.detach().clone())
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    losses.append(model(**sample(2, seed=99)).loss)  # a validation: of the whole batch
        results.append(Result(losses, model, optimizer))
    assert differences(*results) == []


@pytest.mark.parametrize("budget", ["tight", "middle", "resident"])
def test_memory_stays_within_what_the_plan_says(profile: Profile, budget: str) -> None:
    plan = nets.plan_for(profile, budget)
    model = start()
    device = HostileDevice(plan.budget_bytes, mode="lazy", check=True)
    batches = [sample(8, seed=seed) for seed in range(3)]
    _, peak = engines.trained_by(device, plan, model, make_optimizer(model, "adamw-fused"), batches)
    assert 0.6 * plan.predicted.device_peak_bytes < peak <= plan.predicted.device_peak_bytes


@pytest.mark.parametrize("chains", [reruns.nested, reruns.from_the_first])
def test_forwards_of_several_blocks_run_again(chains: Any) -> None:
    profile = reruns.profiled("llama")
    plan = reruns.planned(profile, *chains(profile), place="host")
    found, _ = reruns.by_plan(replace(plan, parts=2), "llama")
    assert differences(reruns.plainly("llama", parts=2), found) == []


# -- arguments and outputs --------------------------------------------------------------------------------------------


LAYERS = [nets.Nested, nets.Learned, nets.Skip]
SWITCHES: list[dict[str, bool]] = [{}, {"recompute": False}, {"activation_offload": False}]


@pytest.mark.parametrize(("layer", "switches"), sampling.grid(LAYERS, SWITCHES, count=4))
def test_arguments_in_tuples_and_dictionaries_are_cut_and_tables_shared(layer: Any, switches: dict[str, Any]) -> None:
    net = nets.net(layer)
    batches = [nets.ids(samples, tokens, seed) for seed, (samples, tokens) in enumerate([(8, 5), (7, 6), (2, 3)])]
    found = nets.trained(net, 3, batches, plainly=False, planner="offmate", **switches)
    assert differences(nets.trained(net, 3, batches, plainly=True), found) == []
    assert not torch.equal(found.model.get_parameter("row"), net.row) or layer is not nets.Learned


def test_rows_of_tokens_are_known_from_other_batches() -> None:
    """With five samples of five tokens only what was seen before tells the table from a row per sample."""
    net = nets.net(nets.Nested)
    batches = [nets.ids(8, 5), nets.ids(5, 5, seed=1)]
    assert differences(*(nets.trained(net, 4, batches, plainly=plainly) for plainly in (True, False))) == []
    with (
        pytest.raises(lt_offload.UnsupportedError, match="5 samples of 5 tokens"),
        lt_offload.micro_batched_reference(net, 4),
    ):
        net(nets.ids(5, 5))


def test_weights_travel_once_for_all_parts(profile: Profile) -> None:
    """Whereas one micro-batch after the other fetches them each time."""
    plan = nets.plan_for(profile, "tight")
    fetched = sum(op.bytes * count for op, count in zip(plan.ops, plan.counts, strict=True) if _fetches(op))
    model = start()
    part = lt_offload.profile(
        model, sample(8 // PARTS), optimizer=make_optimizer(model, "adamw-fused"), run=loss_of(model)
    )
    window = nets.plan_for(part, "tight", accumulate=PARTS)
    often = sum(op.bytes * count for op, count in zip(window.ops, window.counts, strict=True) if _fetches(op))
    assert 0 < fetched < 0.4 * often


def _fetches(op: Any) -> bool:
    return bool(op.kind == "prefetch" and op.payload == "weight")
