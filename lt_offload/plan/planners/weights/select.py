"""Chooses the gaps in which weights are absent: algorithm 1 of weight offloading (2022). Knows no times.

Two differences from the print. The excess there, ``E_o = M_o + sum_i w_i - M``, counts the step's own weight twice,
because ``M_o`` contains it already (eq. 1); here it is counted once, and ``margin`` bytes may be kept free on purpose.
A margin of one layer is the printed excess (exactly, if all layers have one size): the slack in which the next
prefetch can run beside a computation. And a gap that frees nothing is never chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lt_offload.errors import InfeasibleError
from lt_offload.plan.planners.weights.model import Gap, WeightChain
from lt_offload.units import format_bytes


def select_gaps(chain: WeightChain, *, margin: int = 0, discount: bool = True) -> tuple[Gap, ...]:
    """Return the gaps that bring every step into ``chain.memory - margin``, in the order of choice.

    The next choice is always the one that frees the most bytes in the most steps per byte copied. Optimizer states, if
    there are any, leave with the first choice of their layer. The second choice of a layer costs one copy
    instead of two (``discount``): what was copied to the host after the backward is current after the forward.

    Raises:
        InfeasibleError: if even all gaps together free too little.
    """
    gaps = chain.gaps()
    require_room(chain, gaps, margin)
    excess = held_bytes(chain, ()) + (margin - chain.memory)
    freed = np.array([_freed(chain, gap, first=True) for gap in gaps]).reshape(len(gaps), chain.steps)
    copied = np.array([_copied(chain, gap, states=True, discount=False) for gap in gaps], dtype=float)
    chosen: list[Gap] = []
    while excess.max() > 0:
        profits = np.minimum(np.maximum(excess, 0), freed).sum(axis=1) / copied
        best = int(profits.argmax())
        chosen.append(gaps[best])
        excess -= freed[best]
        freed[best] = 0
        for other, gap in enumerate(gaps):
            if gap.layer == gaps[best].layer and gap not in chosen:
                freed[other] = _freed(chain, gap, first=False)
                copied[other] = _copied(chain, gap, states=False, discount=discount)
    return tuple(chosen)


def held_bytes(chain: WeightChain, gaps: Iterable[Gap]) -> NDArray[np.int64]:
    """Return the bytes of each step, without any copy in flight, if weights are absent in ``gaps``."""
    held = np.array(chain.working, dtype=np.int64) + sum(chain.weights) + sum(chain.states)
    seen: set[int] = set()
    for gap in gaps:
        held -= _freed(chain, gap, first=gap.layer not in seen)
        seen.add(gap.layer)
    return held


def require_room(chain: WeightChain, gaps: Iterable[Gap], margin: int = 0) -> None:
    """Raise ``InfeasibleError`` if some step does not fit, though weights are absent in ``gaps``."""
    needed = int(held_bytes(chain, gaps).max()) + margin
    if needed > chain.memory:
        kept = f", {format_bytes(margin)} of it kept free," if margin else ""
        raise InfeasibleError(
            f"memory={format_bytes(chain.memory)} is too small: with the weights absent that can or shall be, "
            f"{format_bytes(needed)}{kept} are needed",
            needed_bytes=needed,
        )


def _freed(chain: WeightChain, gap: Gap, *, first: bool) -> NDArray[np.int64]:
    """Return the bytes that the absence frees, per step."""
    freed = np.zeros(chain.steps, dtype=np.int64)
    if first:
        freed += chain.states[gap.layer]
        if chain.states_return[gap.layer]:
            freed[chain.steps - 1 - gap.layer] = 0
    freed[[step % chain.steps for step in gap.steps(chain.layers)]] += chain.weights[gap.layer]
    return freed


def _copied(chain: WeightChain, gap: Gap, *, states: bool, discount: bool) -> int:
    """Return the bytes that the absence causes to be copied."""
    total = chain.weights[gap.layer] + (0 if discount else chain.changed[gap.layer])
    return total + (2 * chain.states[gap.layer] if states and chain.states_return[gap.layer] else 0)
