"""MemFerry (2024): all parameters are updated on the host, and read there too where a copy would cost more.

The forward copies weights to the device or reads them in host memory (direct host access), whichever lets it end
first; what was read directly may be copied for the backward; gradients are copied to the host as the backward makes
them, or written there by it. Proposes choices that fit; how good they are is for the simulator to say.

The paper's forward begins when all parameters have been updated. Here copies may begin in the backward before, as soon
as theirs have; then few weights but embeddings are worth reading directly, which is why that is a variant of its own.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Literal

from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.memory import budget_for, least_host_bytes
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.papers.memferry.chain import ProfileChain, Reading, chain, to_decisions
from lt_offload.plan.papers.memferry.model import CopiedWeights, best_forward, kept_gradients, switched_weights
from lt_offload.plan.papers.memferry.savings import Given, savings, with_savings
from lt_offload.plan.planners.ladder import ladder
from lt_offload.plan.planners.request import NotApplicable, Proposal, Request, self_contained
from lt_offload.plan.planners.tables import embedding_steps
from lt_offload.plan.planners.timed_plan import estimated_s
from lt_offload.schema.plan import UpdatePlace
from lt_offload.schema.profile import OptionName, TensorProfile
from lt_offload.units import format_bytes

_RESERVES = (1.0, 0.5, 0.0)
"""Parts of the gradients that are kept on the device, if the user does not say."""
_MANNERS = ((1.0, 1.0), (1.0, 0.1), (0.85, 1.0), (0.85, 0.1), (0.7, 1.0))
"""Part of the memory that is filled, and what a second of copying may cost: all of it if the computations wait for the
link, little if they do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Variant:
    name: str
    zero_copy: Literal["best", "small", "none"]
    """Weights that the forward reads directly: where it is best, embeddings and vectors (norms, biases), or none."""
    switch: bool = True
    """True if weights read directly in the forward may be copied for the backward."""


_VARIANTS = (
    _Variant(name="memferry, best forward", zero_copy="best"),
    _Variant(name="memferry, no copies after the forward", zero_copy="best", switch=False),
    _Variant(name="memferry, embeddings and norms read directly", zero_copy="small", switch=False),
    _Variant(name="memferry, all weights copied", zero_copy="none"),
)


def propose_memferry(request: Request) -> list[Proposal]:
    """Return MemFerry's plans for ``request``: the paper's, and variants that do without some of its means.

    Raises:
        NotApplicable: if the host may not update, there are no figures for direct host access, or nothing fits.
    """
    profile = request.profile
    if not request.settings.host_update:
        raise NotApplicable("host_update=False, and it updates all parameters on the host")
    if all(tensor.zero_copy is None for tensor in profile.tensors):
        raise NotApplicable("the profile has no figures for direct host access")
    planner = _Planner(request)
    proposals: list[Proposal] = []
    seen: list[Given] = []
    for variant in _VARIANTS:
        start = planner.given(variant)
        # Variants differ on some profiles only: without gain from direct reads they all copy everything.
        if start in seen:
            continue
        # While nothing fits it goes on: MemFerry shall have a plan, be it not the best.
        if proposals and request.late:
            break
        seen.append(start)
        sets = planner.fastest(start)
        if sets is not None:
            proposals.append(Proposal(name=variant.name, sets=sets))
    if not proposals:
        raise NotApplicable(planner.why_nothing_fits())
    return proposals


@dataclass(frozen=True, kw_only=True, slots=True)
class _Manner:
    """A way to choose what is given up."""

    share: float
    """Part of the memory that sets may take; the rest is for copies on their way."""
    link_price: float
    written: frozenset[int]
    """The tensors whose gradients the backward writes to host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    manner: _Manner
    sets: Sets
    seconds: float
    given_up: int
    """Number of savings that it took."""
    least_bytes: int
    """Bytes that are needed after all of them."""


def _rank(attempt: _Attempt) -> tuple[float, int]:
    return attempt.seconds, attempt.least_bytes


class _Planner:
    """One request: what to begin with, and what has been found."""

    def __init__(self, request: Request) -> None:
        self.request, self.profile = request, request.profile
        places: tuple[UpdatePlace, ...]
        places = tuple("host" if tensor.trainable else "none" for tensor in self.profile.tensors)
        self.options = ladder(self.profile, request.allowed).top
        reserve = request.settings.gradient_reserve
        # If the user does not say, all that can be is kept while that fits without giving anything else up.
        costs = chain(self.profile, self.options, [Reading()] * len(self.profile.tensors))
        written = [self._written(part, costs) for part in (_RESERVES if reserve is None else (reserve,))]
        ram = min(least_host_bytes(self.options, places, some, self.profile) for some in written)
        if ram > request.host_budget_bytes:
            budget = format_bytes(request.host_budget_bytes)
            raise NotApplicable(f"weights, gradients and optimizer states need {format_bytes(ram)} of {budget} of RAM")
        self.written = [some for some in written if self._fits(self.options, places, some)]
        self.allowed = self_contained(request.allowed)
        most = tuple(max(options, key=lambda o: o.offload_bytes).name for options in self.allowed)
        # If RAM is too short for copies of all activations, only blocks whose fastest option copies may do so.
        if not all(self._fits(most, places, some) for some in self.written):
            self.allowed = tuple(
                tuple(option for option in options if option.name == fastest or not option.offload_bytes)
                for fastest, options in zip(self.options, self.allowed, strict=True)
            )
        self.least = sys.maxsize
        """Bytes that the smallest plan needs, as far as is known."""
        self._manner: _Manner | None = None

    def fastest(self, start: Given) -> Sets | None:
        """Return the fastest sets found that begin with ``start`` and fit; None if there are none.

        The best manner of making room is looked for with the first variant, and kept for the others.
        """
        if self._manner is not None:
            attempts = [self._attempt(start, self._manner)]
        else:
            manners = [_Manner(share=share, link_price=price, written=self.written[0]) for share, price in _MANNERS]
            attempts = [self._attempt(start, manners[0])]
            if attempts[0].given_up:
                attempts += [self._attempt(start, manner) for manner in manners[1:]]
                best = min(attempts, key=_rank)
                attempts += [self._attempt(start, replace(best.manner, written=other)) for other in self.written[1:]]
        best = min(attempts, key=_rank)
        self.least = min(self.least, *(attempt.least_bytes for attempt in attempts))
        if best.least_bytes > self.request.capacity_bytes:
            return None
        self._manner = best.manner
        return best.sets

    def _attempt(self, start: Given, manner: _Manner) -> _Attempt:
        """Give up what has to be, the cheapest first."""
        profile, capacity_bytes = self.profile, self.request.capacity_bytes
        offers = savings(profile, start, self.allowed, link_price=manner.link_price)

        def sets(count: int) -> Sets:
            now = with_savings(start, offers[:count])
            return Sets(to_decisions(profile, now.options, now.readings, written=manner.written), profile)

        least_bytes = sets(len(offers)).room_needed
        # Not below what is needed with everything given up, or no number of savings would be enough.
        room = max(int(manner.share * capacity_bytes), min(least_bytes, capacity_bytes))
        low, high = 0, len(offers)
        # Halving works, as less room is needed the more is given up.
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sets(middle).least_room <= room else (middle + 1, high)
        smallest = sets(low)
        return _Attempt(
            manner=manner,
            sets=smallest,
            seconds=estimated_s(smallest, self.request),
            given_up=low,
            least_bytes=least_bytes,
        )

    def _fits(self, options: tuple[OptionName, ...], places: tuple[UpdatePlace, ...], written: frozenset[int]) -> bool:
        """Return whether the host has room for what these decisions need."""
        return least_host_bytes(options, places, written, self.profile) <= self.request.host_budget_bytes

    def why_nothing_fits(self) -> str:
        """Return a clause with numbers."""
        needed = format_bytes(budget_for(self.least, self.profile))
        return f"its smallest plan needs {needed} of the {format_bytes(self.request.budget_bytes)} on the device"

    def given(self, variant: _Variant) -> Given:
        profile, steps = self.profile, timeline(self.profile)
        readings = [Reading(always=not tensor.trainable) for tensor in profile.tensors]
        if variant.zero_copy != "none":
            for index, tensor in enumerate(profile.tensors):
                if len(tensor.blocks) > 1 and tensor.trainable and self._reads_table(tensor):
                    readings[index] = Reading(zero_copy=embedding_steps(profile, tensor))
        costs = chain(profile, self.options, readings)
        if variant.zero_copy == "best":
            copied = best_forward(costs.layers)
        elif variant.zero_copy == "small":
            copied = self._small(costs)
        else:
            copied = tuple((True,) * len(layer.weights) for layer in costs.layers)
        switched = switched_weights(costs.layers, copied) if variant.switch else frozenset()
        for block, tensors in enumerate(costs.tensors):
            for at, index in enumerate(tensors):
                if not copied[block][at]:
                    backward = () if (block, at) in switched else (steps.backward(block),)
                    readings[index] = Reading(zero_copy=(steps.forward(block), *backward))
        return Given(options=self.options, readings=tuple(readings), zero_copy=variant.zero_copy != "none")

    def _reads_table(self, tensor: TensorProfile) -> bool:
        """Return whether embeddings better read a tied tensor directly."""
        if tensor.zero_copy is None:
            return False
        reads = [tensor.read(block) for block in tensor.blocks if self.profile.blocks[block].kind == "embedding"]
        transfer_s = tensor.bytes / self.profile.hardware.h2d_bytes_per_s
        return bool(reads) and sum(read.forward_s + read.backward_s for read in reads) < transfer_s

    def _small(self, costs: ProfileChain) -> CopiedWeights:
        """Copy everything but embeddings, and vectors such as the weights of norms."""
        blocks, tensors = self.profile.blocks, self.profile.tensors
        return tuple(
            tuple(
                weight.forward_s == float("inf") or (block.kind != "embedding" and len(tensors[index].shape) > 1)
                for weight, index in zip(layer.weights, indices, strict=True)
            )
            for block, layer, indices in zip(blocks, costs.layers, costs.tensors, strict=True)
        )

    def _written(self, reserve: float, costs: ProfileChain) -> frozenset[int]:
        """Return the tensors whose gradients the backward writes to host memory, so that ``reserve`` of all are kept.

        ``costs``: of blocks and tensors.

        Raises:
            NotApplicable: if that cannot be, because too many have no figures for it.
        """
        profile = self.profile
        trainable = [index for index, tensor in enumerate(profile.tensors) if tensor.trainable]
        weight_of = {
            index: weight
            for layer, indices in zip(costs.layers, costs.tensors, strict=True)
            for index, weight in zip(indices, layer.weights, strict=True)
        }
        free = [index for index in trainable if weight_of[index].gradient_s < float("inf")]
        total = sum(profile.tensors[index].bytes for index in trainable)
        forced = total - sum(profile.tensors[index].bytes for index in free)
        # Gradients that the backward cannot write itself are on the device in any case, and count first.
        left = int(reserve * total) - forced
        if left < 0 and self.request.settings.gradient_reserve is not None:
            least = math.ceil(1000 * forced / total) / 1000
            raise NotApplicable(
                f"gradient_reserve={reserve:g}, and the backward cannot write {format_bytes(forced)} of "
                f"{format_bytes(total)} of gradients to host memory; {least:g} or more can be had"
            )
        kept = kept_gradients([weight_of[index] for index in free], max(left, 0))
        return frozenset(index for index, keep in zip(free, kept, strict=True) if not keep)
