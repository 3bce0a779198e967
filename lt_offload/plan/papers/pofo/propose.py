"""POFO (NeurIPS 2021): the fastest mix of running forwards again and offloading activations, weights on the device.

Solves the dynamic program once, turns the sequences for many memories into decisions about blocks and counts their
bytes exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import aligned, framework_bytes, state_room
from lt_offload.plan.papers.pofo.chain import Chain, Operation, kept_bytes, sequential
from lt_offload.plan.papers.pofo.convert import as_chain, as_decisions
from lt_offload.plan.papers.pofo.program import ChainProgram
from lt_offload.plan.planners.request import Allowed, NotApplicable, Proposal, Request
from lt_offload.plan.planners.timed_plan import estimated_s
from lt_offload.units import format_bytes

_MOST_SLOTS, _FEWEST_SLOTS = 56, 20
_SLOT_SECONDS = 2e-8
"""Time to solve the program, over the square of the layers times the cube of the slots."""
_SOLVE_SECONDS = 9.0
_SURPLUS = 1.15
"""Memory that the program is solved for, over what there is: what it counts is near to what a plan needs, not equal."""
_MIXES = ((True, True), (True, False), (False, True))
"""Offloading and running again, one without the other. The program lets all copies to the host end before the loss;
plans do not, so offloading alone may be better than it seems."""
_TRIED = 12
"""Decisions that fit, per mix, which are simulated."""
_BEST = 3


def propose_pofo(request: Request) -> list[Proposal]:
    """Return the fastest proposals of POFO, the best one first.

    Raises:
        NotApplicable: if weights and optimizer states leave too little of the device.
    """
    request = replace(request, allowed=_allowed(request))
    profile = request.profile
    arena = sum(aligned(tensor.bytes) + state_room(tensor.state_bytes) for tensor in profile.tensors)
    layout = as_chain(profile, request.allowed)
    capacity_bytes = request.capacity_bytes - arena - layout.held_bytes
    short = f"weights and optimizer states take {format_bytes(arena)} of {format_bytes(max(request.capacity_bytes, 0))}"
    if capacity_bytes <= 0:
        raise NotApplicable(f"{short}; this planner keeps them all on the device")

    def fitting(sequences: Iterable[tuple[Operation, ...]]) -> Iterator[Decisions]:
        for operations in sequences:
            decisions = as_decisions(operations, layout, profile, request.allowed)
            needed = arena + int(framework_bytes(decisions.usage(profile), profile).max())
            enough_ram = decisions.least_host_bytes(profile) <= request.host_budget_bytes
            if needed <= request.capacity_bytes and enough_ram:
                yield decisions

    # If everything fits there is nothing to decide, and no program to solve.
    for kept in fitting([sequential(layout.chain)]):
        return [Proposal(name="pofo, everything kept", sets=Sets(kept, profile))]
    estimated: list[tuple[float, Sets]] = []
    for sequences in _sequences(layout.chain, capacity_bytes, request):
        for decisions in islice(fitting(sequences), _TRIED):
            if all(decisions != other.decisions for _, other in estimated):
                sets = Sets(decisions, profile)
                estimated.append((estimated_s(sets, request), sets))
    if not estimated:
        raise NotApplicable(f"{short}; the rest is too little for the activations")
    best = sorted(estimated, key=lambda item: item[0])[:_BEST]
    return [
        Proposal(name="pofo" if place == 1 else f"pofo, choice {place}", sets=sets)
        for place, (_, sets) in enumerate(best, 1)
    ]


def _allowed(request: Request) -> Allowed:
    """Return the allowed options, and ``discard`` where forwards may run again: other planners cannot use it."""
    return tuple(
        (
            *options,
            *(o for o in block.options if request.settings.recompute and o.name == "discard" and o not in options),
        )
        for block, options in zip(request.profile.blocks, request.allowed, strict=True)
    )


def _sequences(chain: Chain, capacity_bytes: int, request: Request) -> Iterator[Iterator[tuple[Operation, ...]]]:
    """Yield sequences for one mix after the other; within a mix, those for more memory, which are faster, first."""
    # The finest slots for which there is time: it grows with their third power and the square of the layers.
    most = (min(_SOLVE_SECONDS, request.settings.solver_time_limit / 2) / (_SLOT_SECONDS * len(chain.layers) ** 2)) ** (
        1 / 3
    )
    for offload, recompute in _MIXES:
        if (request.settings.activation_offload or not offload) and (request.settings.recompute or not recompute):
            yield ChainProgram(
                chain,
                memory_bytes=min(int(_SURPLUS * capacity_bytes), kept_bytes(chain)),
                slots=min(max(int(most), _FEWEST_SLOTS), _MOST_SLOTS),
                offload=offload,
                recompute=recompute,
            ).sequences()
