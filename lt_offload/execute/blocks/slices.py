"""A block as the plan runs it, and the samples of a batch that go through it together: mostly all of them.

The outer graph has one node per block. The graph of the operations inside is private to a slice: it begins at an entry
node per input and ends at edges that are noted when the forward returns. The backward of the outer node runs it, or
rebuilds it first if nothing of it was kept.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lt_offload import limits
from lt_offload.errors import UnsupportedError
from lt_offload.execute.blocks.inner_tensors import InnerTensors
from lt_offload.execute.blocks.repeats import Repeats
from lt_offload.execute.device.base import Device
from lt_offload.execute.memory.activations import Moved
from lt_offload.execute.memory.tensors import Weight
from lt_offload.model.calls import edges, is_entry_node, tensors_of
from lt_offload.model.parts import Cutter
from lt_offload.model.saving import CacheCostly
from lt_offload.model.snapshot import version
from lt_offload.model.state.effects import Effects, Snapshot
from lt_offload.schema.profile import OptionName


@dataclass(kw_only=True, slots=True)
class PlannedBlock:
    """A block as the plan runs it, in every iteration."""

    index: int
    name: str
    device: Device
    weights: Sequence[Weight]
    option: OptionName
    graphed: bool
    """It always runs with a graph: without one torch would run other code, perhaps with other last bits."""
    effects: Effects
    repeats: Repeats
    held: list[dict[str, Tensor | None]]
    """The buffers of each of its modules, as the modules hold them."""
    recomputed: bool = False
    """The plan recomputes the block before its backward, whatever its option."""
    steady: bool = False
    """Its weights stay at one address from the forward to the backward."""
    cutter: Cutter | None = None
    """Cuts its batches into parts; None: the block takes all of a batch at once."""

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of its modules at present: they are on the device anyway, and sending them away frees nothing."""
        return [buffer for held in self.held for buffer in held.values() if buffer is not None]


class Slice:
    """Everything that the runs of one slice leave behind for its backward.

    Between its forward and its backward a slice may run again any number of times, each time replacing what it has
    saved. The outer graph holds neither inputs nor outputs of a block, so what is let go of here is free.

    Nothing here refers to the block's run, which holds its slices: in a cycle both would stay until Python's collector
    comes, with all that they have saved. ``leaves`` are the arguments of the call, with None for activations
    (``inputs`` of them), which are given to each run.
    """

    def __init__(self, block: PlannedBlock, leaves: list[Any], inputs: int) -> None:
        self.block, self.leaves = block, leaves
        self.before: Snapshot | None = None
        """State that the first run has changed, as it was before."""
        self.inner: InnerTensors | None = None
        """Tensors that the first run has left in attributes."""
        self.sums: list[Tensor] | None = None
        """Bit sums of the outputs of the first run, if its second one is to be compared."""
        self.inputs: list[Tensor | Moved] | None = None
        """Saved, to recompute from."""
        self.versions: list[int] = []
        """Versions of the inputs before the forward."""
        self.rng: list[Tensor] = []
        """States of the generators before the first run."""
        self.cache: CacheCostly | None = None
        """Results that a second run need not compute again."""
        self.roots: list[GradientEdge | None] | None = None
        """Ends of the private graph, by output. Edges and not tensors, which would keep the outputs alive."""
        self.entries: list[GradientEdge | None] = []
        """Beginnings of the private graph, by input."""
        self.in_backward = False
        self.input_grads: list[Tensor | None] = [None] * inputs

    def take_saved(self) -> list[Tensor] | None:
        """Return the saved input, which is no longer saved then."""
        saved, self.inputs = self.inputs, None
        if saved is None:
            return None
        self.check_untouched(saved)
        return [x.restore() if isinstance(x, Moved) else x for x in saved]

    def close(self) -> None:
        """Let go of everything that was saved."""
        self.release()
        self.leaves, self.before, self.inner = [], None, None

    def release(self) -> None:
        """Let go of saved inputs, results and graph."""
        self.inputs, self.roots, self.cache, self.entries = None, None, None, []

    def check_untouched(self, inputs: Sequence[Tensor | Moved]) -> None:
        """Refuse inputs that were written to since the first run: nothing could repeat it."""
        # Autograd compares versions of what its graphs save. These inputs are in no graph, so that is done here.
        for x, known in zip(inputs, self.versions, strict=True):
            if isinstance(x, Tensor) and version(x) != known:
                raise UnsupportedError(
                    f"the input of block {self.block.name} was written to after the block was called with it, so "
                    "that the block cannot run again; write out of place"
                )

    def check_buffers(self) -> None:
        """Refuse a second run where a buffer was written to since the first one."""
        buffer = self.before.rest.rewritten() if self.before is not None else None
        if buffer is not None:
            raise limits.REWRITTEN.error(f"buffer {buffer} of block {self.block.name}")

    def check_outputs(self, out: Any) -> None:
        """Compare what a second run has returned with the first's; raises ``UnsupportedError`` if they differ."""
        if self.sums is not None:
            self.block.repeats.compare(self.block.name, self.sums, tensors_of(out))

    def check_inner(self) -> None:
        """Compare what the first run left in attributes with a run with a graph; refuses losses that have used it."""
        if self.inner is not None:
            self.inner.recomputed()


def catch(part: weakref.ref[Slice], slot: int, grad: Tensor) -> None:
    """Remember the gradient of an activation input; refuses one that comes from inside the block."""
    # The slice holds this graph. A reference back would close a cycle through C++, which Python's collector does not
    # see: every iteration's activations would stay.
    alive = part()
    assert alive is not None
    if not alive.in_backward:
        raise limits.INNER_TENSOR.error(f"the loss uses a tensor from inside block {alive.block.name}")
    alive.input_grads[slot] = grad


def count_uses(roots: Sequence[Any]) -> Counter[int]:
    """Return how often each activation input is used in the private graph below ``roots``, by its slot."""
    ends = [*roots, *(node for node, _ in edges(roots))]
    return Counter(node.slot for node in ends if is_entry_node(node))
