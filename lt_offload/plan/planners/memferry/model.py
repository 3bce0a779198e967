"""MemFerry (2024) on paper: a chain of layers whose weights are copied to the device or read in host memory.

The paper's layers have one tensor; here a layer has any number, each copied or read directly. Copies use one link per
direction, first come first served, in the order in which the computations need them. What is read directly crosses the
link to the device as well, which the paper leaves out: with ``read_s`` of zero it is as there. Knows seconds and
bytes; nothing of plans, steps or arenas.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

Decisions = tuple[tuple[bool, ...], ...]
"""Per layer, one decision per weight."""
Position = tuple[int, int]
"""Layer, weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemFerryWeight:
    """One tensor; seconds are what it adds to the computation of its layer, on the device."""

    transfer_s: float
    """To copy it to the device; ``T_trans``."""
    forward_s: float
    """What the forward takes longer if it is read directly, ``T_FP^H - T_FP``; infinite: it has to be copied."""
    backward_s: float = 0.0
    """What the backward takes longer if it is read directly, ``T_BP^H - T_BP``."""
    forward_read_s: float = 0.0
    """For how long a direct read occupies the link in the forward."""
    backward_read_s: float = 0.0
    """And in the backward."""
    gradient_bytes: int = 0
    gradient_transfer_s: float = 0.0
    """To copy its gradient to the host."""
    gradient_s: float = 0.0
    """What the backward takes longer if it writes the gradient to host memory itself, ``T_GBP - T_CBP``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemFerryLayer:
    """A computation that needs its weights; without any, one like the paper's ``A_{l,l+1}``."""

    forward_s: float
    backward_s: float = 0.0
    weights: tuple[MemFerryWeight, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """When the forward computes and copies, from its first moment on."""

    starts: tuple[float, ...]
    """Per layer."""
    ends: tuple[float, ...]
    copies: tuple[float, ...]
    """Per layer: when the copies of its weights begin."""
    link_s: float
    """When the link to the device is free."""

    @property
    def seconds(self) -> float:
        """When the last layer ends."""
        return self.ends[-1] if self.ends else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardReads:
    """When the backward ends, from the first moment of the forward on."""

    compute_s: float
    arrivals: tuple[float, ...]
    """Per layer: when its gradients are on the host."""


def uniform(layers: Sequence[MemFerryLayer], decision: bool) -> Decisions:
    """Return the same decision for every weight that leaves a choice; what has to be copied is copied."""
    return tuple(tuple(decision or w.forward_s == float("inf") for w in layer.weights) for layer in layers)


def forward(layers: Sequence[MemFerryLayer], copied: Decisions) -> Forward:
    """Run the forward: a layer starts when the one before has ended and its ``copied`` weights have arrived.

    Direct reads take their time on the link before any copy for a later layer.
    """
    time = link = 0.0
    starts, ends, copies = [], [], []
    for layer, brought in zip(layers, copied, strict=True):
        copies.append(link)
        seconds, reads = layer.forward_s, 0.0
        for weight, is_copied in zip(layer.weights, brought, strict=True):
            if is_copied:
                link += weight.transfer_s
            else:
                seconds += weight.forward_s
                reads += weight.forward_read_s
        starts.append(max(time, link) if any(brought) else time)
        time = starts[-1] + seconds
        ends.append(time)
        link += reads
    return Forward(starts=tuple(starts), ends=tuple(ends), copies=tuple(copies), link_s=link)


def backward(
    layers: Sequence[MemFerryLayer],
    copied: Decisions,
    switched: Collection[Position] = (),
    written: Collection[Position] = (),
) -> BackwardReads:
    """Run the backward after the forward.

    Args:
        layers: the chain.
        copied: the weights that were copied before the forward and are still there (GFGB).
        switched: weights read directly in the forward and copied after it (DFGB), the deepest first and none before
            its own forward has ended; their backwards wait for them.
        written: weights whose gradients the backward writes to host memory itself; the others are copied.
    """
    before = forward(layers, copied)
    time, link, out = before.seconds, before.link_s, 0.0
    arrivals: list[float] = []
    for at in reversed(range(len(layers))):
        seconds, reads, gradients = layers[at].backward_s, 0.0, 0.0
        for index, (weight, was_copied) in enumerate(zip(layers[at].weights, copied[at], strict=True)):
            if (at, index) in switched:
                link = max(link, before.ends[at]) + weight.transfer_s
                time = max(time, link)
            elif not was_copied:
                seconds += weight.backward_s
                reads += weight.backward_read_s
            if (at, index) in written:
                seconds += weight.gradient_s
            else:
                gradients += weight.gradient_transfer_s
        time += seconds
        link += reads
        if gradients:
            out = max(out, time) + gradients
        arrivals.append(out if gradients else time)
    return BackwardReads(compute_s=time, arrivals=tuple(reversed(arrivals)))
