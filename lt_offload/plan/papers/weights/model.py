"""The abstract problem of weight offloading: layers, one memory, one link; and the choice of what is absent when.

After "Weight offloading strategies for training large DNN models" (Beaumont, Eyraud-Dubois, Shilova, Zhao, 2022). The
forward of layer ``k`` of ``L`` is step ``k``, its backward, which includes its update, step ``2L - 1 - k``. A weight is
on the device in these two steps; it may be absent in the gap after either of them.

Which gaps are chosen is the paper's algorithm 1, with two differences from the print. The excess there, ``E_o = M_o +
sum_i w_i - M``, counts the step's own weight twice, because ``M_o`` contains it already (eq. 1); here it is counted
once, and ``margin`` bytes may be kept free on purpose. A margin of one layer is the printed excess (exactly, if all
layers have one size): the slack in which the next prefetch can run beside a computation. And a gap that frees nothing
is never chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_offload.errors import InfeasibleError
from lt_offload.units import format_bytes

Phase = Literal["forward", "backward"]


class Gap(NamedTuple):
    """The time between two uses of a weight: the paper's choice ``(k, 1)`` after the forward, ``(k, 0)`` otherwise."""

    layer: int
    after: Phase

    def steps(self, layers: int) -> range:
        """Return the steps strictly inside, cyclic: those from ``2 * layers`` on belong to the next iteration."""
        if self.after == "forward":
            return range(self.layer + 1, 2 * layers - 1 - self.layer)
        return range(2 * layers - self.layer, 2 * layers + self.layer)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightChain:
    """One problem; sequences are per layer or per step."""

    weights: tuple[int, ...]
    """Bytes per layer."""
    working: tuple[int, ...]
    """Bytes per step that are held besides weights: activations, gradient, workspace."""
    memory: int
    """Bytes for all of it."""
    compute_s: float
    """Seconds of an iteration without any wait."""
    changed: tuple[int, ...]
    """Per layer, the bytes that go to the host after a backward if the weight is absent in the gap after it."""
    states: tuple[int, ...]
    """Per layer, bytes of optimizer states, on the device always if none of its gaps is chosen; none in the paper."""
    states_return: tuple[bool, ...]
    """Per layer with a chosen gap, whether its states come to the device for the backward, or never."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.weights)

    @property
    def steps(self) -> int:
        """Number of steps of an iteration."""
        return len(self.working)

    def gaps(self) -> list[Gap]:
        """Return every gap in which a weight's absence frees memory in some step."""
        freeing = []
        for layer, nbytes in enumerate(self.weights):
            phases: tuple[Phase, ...] = ("forward", "backward")
            # The first layer's backward and next forward follow each
            # other, as do the last one's two: no steps lie between.
            freeing += [gap for after in phases if nbytes and (gap := Gap(layer, after)).steps(self.layers)]
        return freeing


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
    # Bytes that are freed where memory is not short count for nothing: profits end at the excess.
    while excess.max() > 0:
        profits = np.minimum(np.maximum(excess, 0), freed).sum(axis=1) / copied
        best = int(profits.argmax())
        chosen.append(gaps[best])
        excess -= freed[best]
        # Chosen once; the other gap of the layer frees less from now on, as states have left, and costs less.
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
    freed = np.zeros(chain.steps, dtype=np.int64)
    if first:
        freed += chain.states[gap.layer]
        if chain.states_return[gap.layer]:
            freed[chain.steps - 1 - gap.layer] = 0
    inside, nbytes = gap.steps(chain.layers), chain.weights[gap.layer]
    # What belongs to the next iteration comes first in this one.
    freed[inside.start : inside.stop] += nbytes
    freed[: max(inside.stop - chain.steps, 0)] += nbytes
    return freed


def _copied(chain: WeightChain, gap: Gap, *, states: bool, discount: bool) -> int:
    total = chain.weights[gap.layer] + (0 if discount else chain.changed[gap.layer])
    return total + (2 * chain.states[gap.layer] if states and chain.states_return[gap.layer] else 0)
