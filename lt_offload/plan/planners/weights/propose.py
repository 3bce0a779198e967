"""The planners ``greedy`` and ``l2l``: weight offloading (2022) applied to a profile. They propose; others fit.

The paper knows weights only. What it leaves open is decided here:

- A layer is a block with the parameters that it alone uses. Parameters of several blocks stay on the device.
- Optimizer states stay on the device for layers whose weight never leaves. For the others they are fetched for the
  backward and go back after it, which counts as copied bytes in the choice of gaps; or the host updates the layer: then
  its gradient leaves instead of its weight, the weight is absent after the backward in any case, and states never
  travel. There are proposals of both kinds.
- Activations are kept as long as that is faster on paper, and given up for the fewest seconds per byte, copies counted
  as if nothing hid them: the link is what weights need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from lt_offload.errors import InfeasibleError
from lt_offload.plan.assembly.plan import room_needed
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.planners.baselines import option_sets, streaming_decisions
from lt_offload.plan.planners.request import NotApplicable, Proposal, Request, cheapest_swap, held_bytes, self_contained
from lt_offload.plan.planners.weights.decisions import Setting, chain_of, greedy_decisions, with_host_gaps
from lt_offload.plan.planners.weights.model import select_gaps
from lt_offload.plan.planners.weights.timing import schedule
from lt_offload.schema.profile import BlockProfile, HardwareProfile, OptionName, OptionProfile
from lt_offload.units import format_bytes

_MARGINS = {"device": (0, 1, 2, 3, 4), "host": (0, 2)}
"""Numbers of layers, by the place of updates. The paper's own excess amounts to one; whole steps need more memory than
moments do. Where the host updates, it mostly sets the pace, and margins matter little."""
_UNBROKEN = 0.95
"""Part of the memory that is planned for if there is a margin; the rest is for gaps between buffers."""
_LEVELS = 4
"""In how many steps activations are given up."""


def propose_l2l(request: Request) -> list[Proposal]:
    """Return L2L: every weight is fetched for its forward and again for its backward, in the step that needs it.

    The host updates, or the device with states that are fetched too; activations are recomputed where they may be.

    Raises:
        NotApplicable: if even this does not fit.
    """
    profile = request.profile
    usable = zip(profile.blocks, self_contained(request.allowed), strict=True)
    options = tuple(_recomputing(block, options).name for block, options in usable)
    decisions = streaming_decisions(profile, options, host_update=request.settings.host_update, lead=0, lag=1)
    least = streaming_decisions(profile, options, host_update=request.settings.host_update, lead=0, lag=0)
    needed = room_needed(least, profile)
    if needed > request.capacity_bytes:
        missing = format_bytes(needed - request.capacity_bytes)
        raise NotApplicable(f"one layer at a time with its activations recomputed needs {missing} more device memory")
    _require_ram(request, decisions)
    return [Proposal(name="l2l", decisions=decisions)]


def propose_greedy(request: Request) -> list[Proposal]:
    """Return the paper's greedy selection and schedule for several margins, and for both places of update.

    Raises:
        NotApplicable: if memory is too short for any of them.
    """
    found: list[Proposal] = []
    short: list[InfeasibleError] = []
    for where in ("device", "host") if request.settings.host_update else ("device",):
        for margin in _MARGINS[where]:
            try:
                decisions = _best(request, host=where == "host", margin=margin)
            except InfeasibleError as error:
                short.append(error)
                break
            if decisions not in [proposal.decisions for proposal in found]:
                layers = "layer" if margin == 1 else "layers"
                name = f"greedy, margin of {margin} {layers}, update on the {where}"
                found.append(Proposal(name=name, decisions=decisions))
    if not found:
        needed = min(error.needed_bytes or 0 for error in short)
        raise NotApplicable(
            f"with every weight absent between its uses, {format_bytes(needed)} are needed "
            f"and there are {format_bytes(max(request.capacity_bytes, 0))}"
        )
    fitting = [p for p in found if p.decisions.least_host_bytes(request.profile) <= request.host_budget_bytes]
    if not fitting:
        _require_ram(request, found[0].decisions)
    return fitting


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    period_s: float
    decisions: Decisions


def _best(request: Request, *, host: bool, margin: int) -> Decisions:
    """Return the decisions of the fastest schedule over all ways to treat activations.

    Raises:
        InfeasibleError: the one that is missing the least, if none fits.
    """
    found: list[_Found] = []
    short: list[InfeasibleError] = []
    capacity_bytes = round(_UNBROKEN * request.capacity_bytes) if margin else request.capacity_bytes
    for options in dict.fromkeys(_option_levels(request)):
        setting = Setting(profile=request.profile, options=options, host=host)
        chain = chain_of(setting, capacity_bytes)
        try:
            gaps = with_host_gaps(setting, select_gaps(chain, margin=margin * chain.largest))
        except InfeasibleError as error:
            short.append(error)
            continue
        planned = schedule(chain, gaps)
        found.append(_Found(period_s=planned.period_s, decisions=greedy_decisions(setting, gaps, planned)))
    if not found:
        raise min(short, key=lambda error: error.needed_bytes or 0)
    return min(found, key=lambda item: item.period_s).decisions


def _option_levels(request: Request) -> Iterator[tuple[OptionName, ...]]:
    """Yield ways to treat activations, from the fastest to the one that holds the least."""
    blocks, usable = request.profile.blocks, self_contained(request.allowed)
    price = partial(_seconds, request.profile.hardware)
    chosen = [min(options, key=price) for options in usable]
    swaps: list[tuple[float, int, OptionProfile]] = []
    for index, (block, options, now) in enumerate(zip(blocks, usable, chosen, strict=True)):
        swap = cheapest_swap(block, now, options, price)
        if swap is not None:
            swaps.append((swap[0], index, swap[1]))
    swaps.sort(key=lambda swap: swap[:2])
    yield tuple(option.name for option in chosen)
    for level in range(1, _LEVELS + 1):
        for _, index, option in swaps[(level - 1) * len(swaps) // _LEVELS : level * len(swaps) // _LEVELS]:
            chosen[index] = option
        yield tuple(option.name for option in chosen)
    yield option_sets(request.profile, usable)[0]


def _seconds(hardware: HardwareProfile, option: OptionProfile) -> float:
    """Return what an option costs if nothing hides its copies."""
    copies = option.offload_bytes / hardware.d2h_bytes_per_s + option.offload_bytes / hardware.h2d_bytes_per_s
    return option.forward_s + option.backward_s + copies


def _recomputing(block: BlockProfile, options: tuple[OptionProfile, ...]) -> OptionProfile:
    return min(options, key=lambda o: (o.name != "recompute", o.offload_bytes > 0, held_bytes(block, o)))


def _require_ram(request: Request, decisions: Decisions) -> None:
    missing = decisions.least_host_bytes(request.profile) - request.host_budget_bytes
    if missing > 0:
        raise NotApplicable(f"host copies need {format_bytes(missing)} more RAM")
