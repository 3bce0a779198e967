"""MemFerry: the optimum of its chain against enumeration, and plans that pass every check."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from lt_offload.plan.assembly.just_in_time import Missed
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.papers.memferry.model import (
    CopiedWeights,
    MemFerryLayer,
    MemFerryWeight,
    backward_end,
    best_forward,
    forward,
    kept_gradients,
    switched_weights,
)
from lt_offload.plan.papers.memferry.propose import propose_memferry
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.planners.offmate.rounding import round_tensors
from lt_offload.plan.planners.request import NotApplicable, Request
from lt_offload.plan.planners.slots import share_slots
from lt_offload.plan.planners.tables import read_tables
from lt_offload.plan.settings import Settings
from lt_offload.plan.verify.check import check
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile, ReadProfile, TensorProfile, ZeroCopyProfile
from lt_offload.schema.trace import Trace
from tests import sampling
from tests.support.profiles.by_hand import timed_plan
from tests.support.profiles.fixtures import llama7b_b4
from tests.support.profiles.random_solutions import random_solution
from tests.support.profiles.small import small_profile


def random_weight(rng: np.random.Generator, *, reads: bool) -> MemFerryWeight:
    transfer = float(rng.choice([0.0, rng.uniform(0, 2), rng.uniform(0, 10)], p=[0.1, 0.4, 0.5]))
    return MemFerryWeight(
        transfer_s=transfer,
        forward_s=float(rng.choice([rng.uniform(0, 2), rng.uniform(0, 12), np.inf], p=[0.45, 0.45, 0.1])),
        backward_s=float(rng.uniform(0, 2)),
        forward_read_s=transfer * float(rng.uniform(0, 2)) if reads else 0.0,
        backward_read_s=transfer * float(rng.uniform(0, 1)) if reads else 0.0,
        gradient_bytes=int(rng.integers(1, 1000)),
        gradient_s=float(rng.uniform(0, 2)),
    )


def random_layers(
    rng: np.random.Generator, most: int, *, reads: bool = False, weights: int | None = 1
) -> list[MemFerryLayer]:
    """``weights``: how many each layer has; None: none to three."""
    return [
        MemFerryLayer(
            forward_s=float(rng.uniform(0.1, 3)),
            backward_s=float(rng.uniform(0.2, 6)),
            weights=tuple(
                random_weight(rng, reads=reads) for _ in range(int(rng.integers(0, 4)) if weights is None else weights)
            ),
        )
        for _ in range(int(rng.integers(1, most + 1)))
    ]


def all_decisions(layers: list[MemFerryLayer]) -> list[CopiedWeights]:
    decisions = [
        list(product(*[(True,) if w.forward_s == float("inf") else (False, True) for w in layer.weights]))
        for layer in layers
    ]
    return list(product(*decisions))


def seconds(layers: list[MemFerryLayer], copied: CopiedWeights) -> float:
    """Event by event, not by :func:`forward`: when the computations of all layers have ended."""
    queue = [
        (at, weight.transfer_s if is_copied else weight.forward_read_s, is_copied)
        for at, (layer, brought) in enumerate(zip(layers, copied, strict=True))
        for is_copied in (True, False)  # a layer's copies go before its reads
        for weight, one in zip(layer.weights, brought, strict=True)
        if one == is_copied
    ]
    arrived: dict[int, float] = {}
    clock = 0.0
    for at, occupied, is_copy in queue:
        clock += occupied
        if is_copy:
            arrived[at] = clock
    time = 0.0
    for at, (layer, brought) in enumerate(zip(layers, copied, strict=True)):
        longer = sum(w.forward_s for w, one in zip(layer.weights, brought, strict=True) if not one)
        time = max(time, arrived.get(at, 0.0)) + layer.forward_s + longer
    return time


@pytest.mark.parametrize("reads", [False, True], ids=["reads are free", "reads take the link"])
def test_the_program_equals_enumeration(reads: bool) -> None:
    rng = np.random.default_rng(1)
    for case in range(150):
        layers = random_layers(rng, 9, reads=reads)
        found = forward(layers, best_forward(layers, buckets=None)).seconds
        assert found == pytest.approx(min(seconds(layers, copied) for copied in all_decisions(layers))), case


def test_buckets_cost_next_to_nothing_in_long_chains() -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        layers = [random_layers(rng, 1, reads=True, weights=2)[0] for _ in range(120)]
        exact = forward(layers, best_forward(layers, buckets=None)).seconds
        quick = forward(layers, best_forward(layers, buckets=128)).seconds
        assert exact <= quick + 1e-9
        assert quick <= 1.01 * exact


def test_switched_weights_are_near_the_best_choice_and_never_harm() -> None:
    rng = np.random.default_rng(5)
    ratios, gains = [], []
    for _ in range(80):
        layers = random_layers(rng, 10, reads=True)
        copied = best_forward(layers)
        places = [(at, 0) for at, (was_copied,) in enumerate(copied) if not was_copied]
        best = min(
            backward_end(layers, copied, set(chosen))
            for count in range(len(places) + 1)
            for chosen in combinations(places, count)
        )
        switched = switched_weights(layers, copied)
        found, without = backward_end(layers, copied, switched), backward_end(layers, copied)
        assert switched <= set(places)
        assert best - 1e-9 <= found <= without + 1e-9
        ratios.append(found / best)
        gains.append(without / found)
    assert max(ratios) < 1.02
    assert np.mean(gains) > 1.005


def test_kept_gradients_are_the_best_choice_and_more_reserve_never_hurts() -> None:
    rng = np.random.default_rng(6)
    for _ in range(100):
        weights = [random_weight(rng, reads=False) for _ in range(int(rng.integers(0, 9)))]
        total = sum(weight.gradient_bytes for weight in weights)
        before = 0.0
        for reserve in (0.0, 0.2, 0.5, 0.7, 1.0):
            capacity = int(reserve * total)
            kept = kept_gradients(weights, capacity)
            assert sum(w.gradient_bytes for w, keep in zip(weights, kept, strict=True) if keep) <= capacity
            gain = sum(w.gradient_s for w, keep in zip(weights, kept, strict=True) if keep)
            best = max(
                sum(w.gradient_s for w in chosen)
                for count in range(len(weights) + 1)
                for chosen in combinations(weights, count)
                if sum(w.gradient_bytes for w in chosen) <= capacity
            )
            assert gain == pytest.approx(best)
            assert gain >= before - 1e-9
            before = gain
        assert kept_gradients(weights, total) == [True] * len(weights)


ROWS = llama7b_b4(1).blocks[0].output_bytes
"""Bytes of an embedding that one batch reads."""


def with_zero_copy(profile: Profile, *, tiles: float = 16.0, of_tied: bool = True) -> Profile:
    """``profile`` with figures for direct host access: rows of embeddings, ``tiles`` times every matrix.

    ``of_tied``: whether tied tensors have some.
    """
    link = profile.hardware.h2d_bytes_per_s

    def read(tensor: TensorProfile, block: int) -> ReadProfile:
        embedding = profile.blocks[block].kind == "embedding"
        passes = 1.0 if len(tensor.shape) == 1 else tiles
        forward = min(ROWS, tensor.bytes) if embedding else int(passes * tensor.bytes)
        backward = 0 if embedding else forward
        seconds = {"forward_s": forward / link, "backward_s": backward / link}
        return ReadProfile(forward_bytes=forward, backward_bytes=backward, **seconds)

    tensors = []
    for tensor in profile.tensors:
        reads = tuple(read(tensor, block) for block in tensor.blocks)
        zero_copy = ZeroCopyProfile(reads=reads, grad_s=tensor.bytes / profile.hardware.d2h_bytes_per_s)
        tensors.append(replace(tensor, zero_copy=zero_copy if of_tied or len(tensor.blocks) == 1 else None))
    return replace(profile, tensors=tuple(tensors))


def fast_host(profile: Profile) -> Profile:
    """``profile`` with a host that does not hold up the iteration."""
    return replace(profile, optimizer=replace(profile.optimizer, host_bytes_per_s=20e9))


def request(profile: Profile, budget: float, **kwargs: Any) -> Request:
    defaults: dict[str, Any] = {
        "host_budget_bytes": 10**12,
        "allowed": tuple(block.options for block in profile.blocks),
    }
    defaults |= {name: kwargs.pop(name) for name in ("host_budget_bytes", "allowed") if name in kwargs}
    return Request(profile=profile, budget_bytes=int(budget), settings=Settings(**kwargs), **defaults)


def planned(decisions: Decisions, asked: Request) -> tuple[Plan, Trace]:
    """The plan of ``decisions`` as select makes it, checked, and its simulation."""
    found = timed_plan("memferry", decisions, asked)
    assert not isinstance(found, Missed)
    plan, trace = share_slots(found.plan, asked.profile, found.trace)
    assert check(plan, asked.profile) == []
    return plan, trace


def proposals(asked: Request) -> dict[str, tuple[Decisions, Trace]]:
    """Proposals by name, each planned."""
    found = propose_memferry(asked)
    assert len({proposal.name for proposal in found}) == len(found)
    assert all(proposal.name.startswith("memferry, ") for proposal in found)
    return {proposal.name: (proposal.decisions, planned(proposal.decisions, asked)[1]) for proposal in found}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("reserve", [0.0, 0.3, 1.0])
def test_gradients_are_kept_within_the_reserve(reserve: float, tied: bool) -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(4, tied=tied)))
    total = sum(tensor.bytes for tensor in profile.tensors)
    for decisions, _ in proposals(request(profile, 30e9, gradient_reserve=reserve)).values():
        pairs = list(zip(profile.tensors, decisions.tensors, strict=True))
        kept = sum(tensor.bytes for tensor, decision in pairs if not decision.grad_zero_copy)
        assert 0.95 * reserve * total <= kept <= reserve * total


def test_activations_stay_off_the_host_if_ram_is_short() -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(6)))
    of_blocks = [sum(t.bytes for t in profile.tensors if block in t.blocks) for block in range(len(profile.blocks))]
    ram = sum(tensor.bytes + tensor.state_bytes for tensor in profile.tensors) + max(of_blocks)
    for decisions, _ in proposals(request(profile, 8e9, host_budget_bytes=ram)).values():
        assert set(decisions.options) == {"keep", "recompute"}
    with pytest.raises(NotApplicable, match=r"need .* GB of .* GB of RAM"):
        propose_memferry(request(profile, 8e9, host_budget_bytes=ram - 1))


def test_what_does_not_apply_says_why() -> None:
    profile = with_zero_copy(llama7b_b4(2))
    with pytest.raises(NotApplicable, match="host_update=False"):
        propose_memferry(request(profile, 40e9, host_update=False))
    with pytest.raises(NotApplicable, match="no figures for direct host access"):
        propose_memferry(request(llama7b_b4(2), 40e9))
    with pytest.raises(NotApplicable, match=r"its smallest plan needs 2\.\d+ GB of the 2 GB on the device"):
        propose_memferry(request(profile, 2e9))
    tied = with_zero_copy(llama7b_b4(2, tied=True), of_tied=False)
    with pytest.raises(NotApplicable, match=r"gradient_reserve=0.1, and the backward cannot write .*0\.\d+ or more"):
        propose_memferry(request(tied, 40e9, gradient_reserve=0.1))


# -- embeddings of other plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_streaming_plans_may_read_their_embedding_directly(tied: bool) -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(4, tied=tied)))
    asked = request(profile, 40e9)
    before = streaming_decisions(profile, ("keep",) * 6, host_update=True)
    after = dict(read_tables(before, asked)).get("embeddings")
    assert after is not None
    assert after.tensors[0].zero_copy == (0, 11)
    assert after.tensors[1:] == before.tensors[1:]
    assert all(5 <= stay.start <= stay.end <= 6 for stay in after.tensors[0].stays)
    assert bool(after.tensors[0].stays) == tied
    (_, old), (plan, new) = planned(before, asked), planned(after, asked)
    assert new.iteration_time < old.iteration_time
    assert [op.zero_copy for op in plan.ops if op.kind == "forward" and op.block == 0] == [(0,)]
    assert "embeddings" not in dict(read_tables(after, asked))


def test_streaming_plans_may_read_other_tables_directly() -> None:
    """The routed rows of experts cross the link in both passes, embeddings or not."""
    plain = with_zero_copy(llama7b_b4(4))
    index = next(i for i, tensor in enumerate(plain.tensors) if tensor.blocks == (2,) and len(tensor.shape) == 2)
    experts = plain.tensors[index]
    nbytes = experts.bytes // 8
    seconds = nbytes / plain.hardware.h2d_bytes_per_s
    read = ReadProfile(forward_bytes=nbytes, backward_bytes=nbytes, forward_s=seconds, backward_s=seconds)
    routed = replace(experts, trainable=False, state_bytes=0, zero_copy=ZeroCopyProfile(reads=(read,), grad_s=0.0))
    profile = replace(plain, tensors=(*plain.tensors[:index], routed, *plain.tensors[index + 1 :]))
    asked = request(profile, 40e9)
    before = streaming_decisions(profile, ("keep",) * 6, host_update=True)
    embeddings, tables = (dict(read_tables(before, asked))[name] for name in ("embeddings", "tables"))
    assert embeddings.tensors[index] == before.tensors[index]
    assert tables.tensors[index].zero_copy == (2, 9)
    assert not tables.tensors[index].stays
    (_, old), (plan, new) = planned(embeddings, asked), planned(tables, asked)
    assert sum(op.bytes for op in plan.ops if index in plan.zero_copy(op)) == 2 * nbytes
    assert new.device_peak < old.device_peak


def test_embeddings_of_arbitrary_plans() -> None:
    rng = np.random.default_rng(7)
    changes = 0
    for case in range(40):
        profile = with_zero_copy(llama7b_b4(int(rng.integers(1, 4)), tied=bool(rng.integers(2))))
        asked = request(profile, 10**12)
        before = round_tensors(random_solution(rng, profile), profile)
        after = dict(read_tables(before, asked)).get("embeddings")
        on_host = before.tensors[0].place == "host"
        assert (after is not None) == on_host, case
        if after is not None:
            changes += 1
            planned(after, asked)
    assert 5 < changes < 35


@pytest.mark.slow
def test_arbitrary_small_models() -> None:
    """Weights of one size, arbitrary costs of direct access, some without, and budgets from hopeless to ample."""
    rng = np.random.default_rng(8)
    planned_ones, reasons = 0, []
    for _ in range(60 if sampling.FULL else 30):
        blocks = int(rng.integers(1, 7))
        frozen = tuple(int(block) for block in np.flatnonzero(rng.uniform(size=blocks) < rng.choice([0.0, 0.4])))
        tied = blocks > 1 and 0 not in frozen and blocks - 1 not in frozen and bool(rng.uniform() < 0.3)
        no_backward = 0 if tied else next((at for at in range(blocks) if at not in frozen), blocks)
        if no_backward == blocks or (tied and frozen):
            continue
        profile = small_profile(blocks, tied=tied, frozen=frozen, no_backward=int(no_backward), launch_s=0.1)
        profile = with_random_direct(rng, profile)
        asked = request(profile, rng.choice([2000, 3000, 4500, 7000, 20000]), gradient_reserve=rng.choice([None, 1.0]))
        try:
            found = propose_memferry(asked)
        except NotApplicable as reason:
            reasons.append(str(reason))
            continue
        for proposal in found:
            planned(proposal.decisions, asked)
        planned_ones += 1
    assert planned_ones > 12
    assert all(reason.startswith(("its smallest plan", "the profile has no figures")) for reason in reasons)


def random_read(rng: np.random.Generator) -> ReadProfile:
    forward, backward = (float(x) for x in rng.uniform(0, 20, 2))
    sizes = {"forward_bytes": int(100 * forward), "backward_bytes": int(100 * backward)}
    return ReadProfile(forward_s=forward, backward_s=backward, **sizes)


def with_random_direct(rng: np.random.Generator, profile: Profile) -> Profile:
    tensors = []
    for tensor in profile.tensors:
        reads = tuple(random_read(rng) for _ in tensor.blocks)
        zero_copy = ZeroCopyProfile(reads=reads, grad_s=float(rng.uniform(0, 20)))
        tensors.append(replace(tensor, zero_copy=zero_copy if rng.uniform() < 0.8 else None))
    blocks = tuple(
        replace(block, kind="embedding" if at == 0 else block.kind) for at, block in enumerate(profile.blocks)
    )
    return replace(profile, tensors=tuple(tensors), blocks=blocks)
