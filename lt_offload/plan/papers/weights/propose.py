"""The planners ``greedy`` and ``l2l``: weight offloading (2022) applied to a profile. They propose sets.

The paper knows weights only. It leaves open what is decided here:

- A layer is a block with the parameters that it alone uses. Parameters of several blocks stay on the device.
- Optimizer states stay on the device for layers whose weight never leaves. For the others they are fetched for the
  backward and go back after it, which counts as copied bytes in the choice of gaps; or the host updates the layer: then
  its gradient leaves instead of its weight, the weight is absent after the backward in any case, and states never
  travel. There are proposals of both kinds.
- Activations are kept as long as that is fastest, and given up for the fewest seconds per byte.
- When copies begin, and where they go, is found as for every plan: just in time. The paper has rules of its own for it,
  which reproduce its tables in ``scripts/papers``.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lt_offload.errors import InfeasibleError
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.assembly.work import LaneWork
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.papers.weights.decisions import Setting
from lt_offload.plan.papers.weights.model import select_gaps
from lt_offload.plan.planners.baselines import option_sets, streaming_decisions
from lt_offload.plan.planners.ladder import ladder
from lt_offload.plan.planners.request import NotApplicable, Proposal, Request, cannot_win, held_bytes, self_contained
from lt_offload.plan.planners.timed_plan import estimated_s
from lt_offload.schema.profile import BlockProfile, OptionName, OptionProfile
from lt_offload.units import format_bytes

_MARGINS = {"device": (0, 1, 2, 3, 4), "host": (0, 2)}
"""Numbers of layers, by the place of updates. The paper's own excess amounts to one; whole steps need more memory than
moments do. Where the host updates, it mostly sets the pace, and margins matter little."""
_LEVELS = 20
"""In how many stages activations are given up."""
_PATIENCE = 10
"""Number of selections in a row, none of them better, that end the search for one place of updates; those with the
least work for any lane come first."""
_HASTE = 2
"""The same while another planner's plan is out of reach."""
_BEST = 3
"""Number of proposals, each of another margin or place of update."""


def propose_l2l(request: Request) -> list[Proposal]:
    """Return L2L: every weight is fetched for its forward and again for its backward, and dropped after each.

    The host updates, or the device with states that are fetched too; activations are recomputed where they may be.

    Raises:
        NotApplicable: if even this does not fit.
    """
    profile = request.profile
    usable = zip(profile.blocks, self_contained(request.allowed), strict=True)
    options = tuple(_recomputing(block, options).name for block, options in usable)
    decisions = streaming_decisions(profile, options, host_update=request.settings.host_update)
    sets = Sets(decisions, profile)
    needed = sets.room_needed
    if needed > request.capacity_bytes:
        missing = format_bytes(needed - request.capacity_bytes)
        raise NotApplicable(f"one layer at a time with its activations recomputed needs {missing} more device memory")
    _require_ram(request, decisions)
    return [Proposal(name="l2l", sets=sets)]


def propose_greedy(request: Request) -> list[Proposal]:
    """Return the best of the paper's greedy selections for several margins, and for both places of update.

    Raises:
        NotApplicable: if memory is too short for any of them.
    """
    selections, short = _selections(request)
    if not selections:
        raise NotApplicable(
            f"with every weight absent between its uses, {format_bytes(short)} are needed "
            f"and there are {format_bytes(max(request.capacity_bytes, 0))}"
        )
    fitting = [
        s for s in selections if s.proposal.decisions.least_host_bytes(request.profile) <= request.host_budget_bytes
    ]
    if not fitting:
        _require_ram(request, selections[0].proposal.decisions)
    estimated: list[tuple[float, Proposal]] = []
    least = math.inf
    failed: Counter[str] = Counter()
    # The order is by what no schedule can beat: the search ends where even that is too long.
    for selection in sorted(fitting, key=lambda selection: selection.least_s):
        if estimated and (selection.least_s >= min(least, request.beat_s) or request.late):
            break
        if failed[selection.place] >= (_HASTE if cannot_win(least, request.beat_s) else _PATIENCE):
            continue
        seconds = estimated_s(selection.proposal.sets, request)
        estimated.append((seconds, selection.proposal))
        # Places of updates are given up one by one: where one leads nowhere, the other may still get better.
        failed[selection.place] = 0 if seconds < least else failed[selection.place] + 1
        least = min(least, seconds)
    best: dict[str, Proposal] = {}
    for seconds, proposal in sorted(estimated, key=lambda item: item[0]):
        if not best or not cannot_win(seconds, request.beat_s):
            best.setdefault(proposal.name, proposal)
    return list(best.values())[:_BEST]


@dataclass(frozen=True, kw_only=True, slots=True)
class _GreedySelection:
    proposal: Proposal
    place: str
    """The place of updates."""
    least_s: float
    """No schedule is shorter."""


def _selections(request: Request) -> tuple[list[_GreedySelection], int]:
    """Return the different selections that fit, and how much memory those need that do not, at least."""
    selections: list[_GreedySelection] = []
    seen: set[tuple[object, ...]] = set()
    short = sys.maxsize
    levels = tuple(dict.fromkeys(_option_levels(request)))
    for where in ("device", "host") if request.settings.host_update else ("device",):
        for options in levels:
            setting = Setting(profile=request.profile, options=options, host=where == "host")
            chain = setting.chain(request.capacity_bytes)
            if selections and (chain.compute_s >= request.beat_s or request.late):
                break
            for margin in _MARGINS[where]:
                try:
                    gaps = select_gaps(chain, margin=margin * max(chain.weights))
                except InfeasibleError as error:
                    short = min(short, error.needed_bytes or short)
                    break
                decisions = setting.decisions(gaps)
                if (decisions.tensors, decisions.options) in seen:
                    continue
                seen.add((decisions.tensors, decisions.options))
                name = f"greedy, margin of {margin} {'layer' if margin == 1 else 'layers'}, update on the {where}"
                proposal = Proposal(name=name, sets=Sets(decisions, request.profile))
                least_s = LaneWork(proposal.sets, request.profile).least_s
                selections.append(_GreedySelection(proposal=proposal, place=where, least_s=least_s))
                if least_s >= request.beat_s:
                    break  # with wider margins more weights travel
            else:
                if not gaps:
                    break  # all weights stay with the widest margin: to give up more activations only takes longer
    return selections, short


def _option_levels(request: Request) -> Iterator[tuple[OptionName, ...]]:
    """Yield ways to treat activations, from the fastest to the one that holds the least."""
    steps = ladder(request.profile, request.allowed)
    for level in range(_LEVELS + 1):
        yield steps.after(level * len(steps.rungs) // _LEVELS)
    yield option_sets(request.profile, request.allowed)[0]


def _recomputing(block: BlockProfile, options: tuple[OptionProfile, ...]) -> OptionProfile:
    return min(options, key=lambda o: (o.name != "recompute", o.offload_bytes > 0, held_bytes(block, o)))


def _require_ram(request: Request, decisions: Decisions) -> None:
    missing = decisions.least_host_bytes(request.profile) - request.host_budget_bytes
    if missing > 0:
        raise NotApplicable(f"host copies need {format_bytes(missing)} more RAM")
