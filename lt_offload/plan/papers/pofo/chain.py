"""The problem of POFO (NeurIPS 2021): a chain of layers in bytes and seconds, and sequences of operations on it.

A paper's symbol stands beside each field. The operations are those of table 1. ``in_slots`` gives the same chain in
slots of memory, as the dynamic program sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

OperationKind = Literal["all", "checkpoint", "none", "loss", "backward", "offload", "prefetch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLayer:
    """One layer of a chain; sizes in bytes. Overheads are beyond what the operation reads, writes and keeps."""

    forward_s: float
    """uF."""
    backward_s: float
    """uB."""
    output_bytes: int
    """a: what the next layer reads."""
    saved_bytes: int
    """abar: what a forward that saves all leaves for the backward, the output included, the input not."""
    gradient_bytes: int
    """delta: the gradient of the output."""
    saving_overhead_bytes: int = 0
    """of, in a forward that saves all."""
    forward_overhead_bytes: int = 0
    """of, in a forward that does not; the paper has one figure for both."""
    backward_overhead_bytes: int = 0
    """ob."""
    checkpoints: bool = True
    """True if its forward may leave nothing but its input."""
    discards: bool = True
    """True if its forward may leave nothing at all."""
    input_travels: bool = True
    """True if its input alone may be offloaded."""
    saved_travels: bool = True
    """True if what it saves may be offloaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Layers 1 to L, the loss behind them, and the link that activations may travel over."""

    layers: tuple[ChainLayer, ...]
    loss: ChainLayer
    """Its output and gradient are empty; what it saves is held from its forward to its backward."""
    input_bytes: int = 0
    """a of layer 0."""
    input_gradient_bytes: int = 0
    """delta of layer 0."""
    bytes_per_s: float = 0.0
    """beta, in either direction; 0: nothing can be offloaded."""

    def output(self, layer: int) -> int:
        """Return a of ``layer``, in 0 to L."""
        return self.layers[layer - 1].output_bytes if layer else self.input_bytes

    def gradient(self, layer: int) -> int:
        """Return delta of ``layer``, in 0 to L."""
        return self.layers[layer - 1].gradient_bytes if layer else self.input_gradient_bytes


class SlotSizes(NamedTuple):
    """A chain in whole slots of memory and in the time that the link needs for one; index 0 is the chain's input.

    Each requirement (the script M of appendix B, less the gradient of the last layer) is rounded up as a whole.
    """

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    before: NDArray[np.float64]
    """Time of all computations of the layers before."""
    moved_forward: NDArray[np.float64]
    """Slots that the link moves during a forward: its time, which may be rounded."""
    moved_backward: NDArray[np.float64]
    output: NDArray[np.int64]
    saved: NDArray[np.int64]
    gradient: NDArray[np.int64]
    needs_saving: NDArray[np.int64]
    """Needs of a forward that saves all."""
    needs_backward: NDArray[np.int64]
    needs_first: NDArray[np.int64]
    """Needs of a forward that saves nothing and reads the stored input."""
    needs_next: NDArray[np.int64]
    """Needs of a forward that saves nothing and reads the output of the one before."""
    last: NDArray[np.int64]
    """The last layer that may be run again from the stored input of this one; smaller than it: none."""
    input_travels: NDArray[np.bool_]
    saved_travels: NDArray[np.bool_]


def in_slots(chain: Chain, slot_bytes: float, *, offload: bool = True, recompute: bool = True) -> SlotSizes:
    """Return ``chain`` in slots of ``slot_bytes``; layer L + 1 is the loss.

    Sizes, and what the link moves during a computation, are rounded to the nearest slot, and what is lost or gained is
    carried to the next layer: errors that add up over the layers would count for more. Data that wait are whole slots.
    """
    layers = (*chain.layers, chain.loss)
    count = len(chain.layers)
    read = [0, *(chain.output(at) for at in range(count + 1))]
    around = [0, *(layer.gradient_bytes + chain.gradient(at) for at, layer in enumerate(layers))]
    offload = offload and chain.bytes_per_s > 0
    rate = chain.bytes_per_s / slot_bytes if offload else 1.0

    def slots(sizes: Sequence[int], *, carried: bool = False) -> NDArray[np.int64]:
        exact = np.maximum(0, np.array(sizes)) / slot_bytes
        return np.array(_carried(exact) if carried else np.rint(exact), dtype=np.int64)

    forward = [0.0, *(layer.forward_s for layer in layers)]
    backward = [0.0, *(layer.backward_s for layer in layers)]
    saving = [layer.saved_bytes + layer.saving_overhead_bytes for layer in layers]
    passing = [layer.output_bytes + layer.forward_overhead_bytes for layer in layers]
    return SlotSizes(
        forward=np.array(forward) * rate,
        backward=np.array(backward) * rate,
        before=np.cumsum([0.0, *forward]) * rate + np.cumsum([0.0, *backward]) * rate,
        moved_forward=_carried(np.array(forward) * rate),
        moved_backward=_carried(np.array(backward) * rate),
        output=slots([chain.input_bytes, *(layer.output_bytes for layer in layers)], carried=True),
        saved=slots([0, *(layer.saved_bytes for layer in layers)], carried=True),
        gradient=slots([chain.input_gradient_bytes, *(layer.gradient_bytes for layer in layers)]),
        needs_saving=slots([0, *saving]),
        needs_backward=slots(
            [0, *(o.saved_bytes + o.backward_overhead_bytes + around[at] for at, o in enumerate(layers, 1))]
        ),
        needs_first=slots([0, *passing]),
        needs_next=slots([0, *(size + read[at] for at, size in enumerate(passing, 1))]),
        last=np.array([0, *_last(chain, recompute)], dtype=np.int64),
        input_travels=np.array([False, *(offload and layer.input_travels for layer in layers)]),
        saved_travels=np.array([False, *(offload and layer.saved_travels for layer in layers)]),
    )


def _carried(exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return whole numbers whose sums are those of ``exact``, rounded."""
    return np.diff(np.rint(np.cumsum(exact)), prepend=0.0)


def _last(chain: Chain, recompute: bool) -> list[int]:
    """Return, per layer and for the loss, how far a part that begins with its checkpoint may reach."""
    count = len(chain.layers)
    last = [count]  # the loss is never run again
    reach = count
    # The walk is from the back: a layer whose forward must leave something ends every part that would run through it.
    for at in range(count, 0, -1):
        layer = chain.layers[at - 1]
        last.append(reach if recompute and layer.checkpoints else at - 1)
        if not layer.discards:
            reach = at - 1
    return last[::-1]


class Operation(NamedTuple):
    """``all`` saves what the backward needs, ``checkpoint`` keeps the input, ``none`` gives its input away.

    ``offload`` and ``prefetch`` are of the stored *input* of ``layer``. ``loss`` is forward and backward of the loss.
    """

    kind: OperationKind
    layer: int


def sequential(chain: Chain) -> tuple[Operation, ...]:
    """Return the sequence that saves all and runs nothing twice."""
    count = len(chain.layers)
    forward = (Operation("all", at) for at in range(1, count + 1))
    backward = (Operation("backward", at) for at in range(count, 0, -1))
    return (*forward, Operation("loss", count + 1), *backward)


def kept_bytes(chain: Chain) -> int:
    """Return the most bytes that a computation takes of the sequence that saves all and runs nothing twice."""
    held, most = chain.input_bytes, 0
    for at, layer in enumerate((*chain.layers, chain.loss)):
        held += layer.saved_bytes
        gradients = layer.gradient_bytes + chain.gradient(at)
        most = max(most, held + max(layer.saving_overhead_bytes, layer.backward_overhead_bytes + gradients))
    return most
