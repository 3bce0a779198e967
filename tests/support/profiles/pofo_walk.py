"""Needs of the computations of a sequence of POFO, one by one; the program itself knows its tables only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lt_offload.plan.papers.pofo.chain import Chain, Operation


@dataclass(eq=False, slots=True)
class Item:
    """One stored output, or all that one forward saved, from its first to its last operation."""

    layer: int
    """The layer that made it."""
    bytes: int
    uses: list[int] = field(default_factory=list)
    """Positions of the computations that make, read or hold on to it, ascending; it is gone after the last."""
    departs: int | None = None
    """Position after which it is offloaded; None: it stays."""
    returns: int | None = None
    """Position before which it has to be back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceWalk:
    """A sequence's computations in order, with what they need."""

    computations: tuple[Operation, ...]
    """The loss stands twice: its forward, its backward."""
    seconds: tuple[float, ...]
    passing: tuple[int, ...]
    """Bytes beside the items: overheads and gradients."""
    items: tuple[Item, ...]


def walk(operations: Sequence[Operation], chain: Chain) -> SequenceWalk:
    """Return what the computations of ``operations`` need, with the items that they say travel.

    Raises:
        ValueError: if an operation lacks its input.
    """
    return _Walker(chain).run(operations)


def memory(walked: SequenceWalk) -> list[int]:
    """Return the bytes that each computation takes, what travels counted as gone as long as it may be."""
    total = list(walked.passing)
    for item in walked.items:
        for at in resident(item):
            total[at] += item.bytes
    return total


def resident(item: Item) -> Iterator[int]:
    """Yield the positions at which ``item`` has to be on the device."""
    for at in range(item.uses[0], item.uses[-1] + 1):
        if item.departs is None or item.returns is None or not item.departs < at < item.returns:
            yield at


class _Walker:
    """Follows the items of one sequence."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.count = len(chain.layers)
        self.outputs: dict[int, Item] = {0: Item(0, chain.input_bytes)}
        """Stored outputs by layer."""
        self.saved: dict[int, Item] = {}
        self.items: list[Item] = [self.outputs[0]]
        self.computations: list[Operation] = []
        self.seconds: list[float] = []
        self.passing: list[int] = []
        self.gradient = 0
        """Bytes of the gradient that waits for the next backward."""

    def run(self, operations: Sequence[Operation]) -> SequenceWalk:
        travelling: dict[int, Item] = {}
        for operation in operations:
            if operation.kind == "offload":
                # It may leave during the forward that reads it, and has its place until that forward ends.
                travelling[operation.layer] = self._input(operation.layer)
            elif operation.kind == "loss":
                self._loss()
            elif operation.kind == "backward":
                self._backward(operation)
            elif operation.kind != "prefetch":
                self._forward(operation)
        for layer, item in travelling.items():
            item.departs, item.returns = _gap(item, self.computations, layer)
        return SequenceWalk(
            computations=tuple(self.computations),
            seconds=tuple(self.seconds),
            passing=tuple(self.passing),
            items=tuple(item for item in self.items if item.uses and item.bytes),
        )

    def _input(self, layer: int) -> Item:
        item = self.saved.get(layer - 1) or self.outputs.get(layer - 1)
        if item is None:
            raise ValueError(f"the input of layer {layer} is not stored")
        return item

    def _compute(self, operation: Operation, seconds: float, passing: int, *items: Item) -> None:
        for item in items:
            item.uses.append(len(self.computations))
        self.computations.append(operation)
        self.seconds.append(seconds)
        self.passing.append(passing)

    def _forward(self, operation: Operation) -> None:
        layer = self.chain.layers[operation.layer - 1]
        source = self._input(operation.layer)
        saves = operation.kind == "all"
        item = Item(operation.layer, layer.saved_bytes if saves else layer.output_bytes)
        self.items.append(item)
        overhead = layer.saving_overhead_bytes if saves else layer.forward_overhead_bytes
        self._compute(operation, layer.forward_s, self.gradient + overhead, source, item)
        if operation.kind == "none":
            # What a forward saved is not given away: its backward needs it.
            self.outputs.pop(operation.layer - 1, None)
        (self.saved if saves else self.outputs)[operation.layer] = item

    def _loss(self) -> None:
        loss, operation = self.chain.loss, Operation("loss", self.count + 1)
        source, item = self._input(self.count + 1), Item(self.count + 1, loss.saved_bytes)
        self.items.append(item)
        self.gradient = self.chain.gradient(self.count)
        self._compute(operation, loss.forward_s, loss.saving_overhead_bytes, source, item)
        self._compute(operation, loss.backward_s, loss.backward_overhead_bytes + self.gradient, source, item)
        self.outputs.pop(self.count, None)

    def _backward(self, operation: Operation) -> None:
        at = operation.layer
        if at not in self.saved:
            raise ValueError(f"layer {at} has not saved what its backward needs")
        layer, source = self.chain.layers[at - 1], self._input(at)
        gradients = self.gradient + self.chain.gradient(at - 1)
        self.gradient = self.chain.gradient(at - 1)
        self._compute(
            operation, layer.backward_s, layer.backward_overhead_bytes + gradients, source, self.saved.pop(at)
        )
        self.outputs.pop(at, None)
        if at - 1 not in self.saved:
            self.outputs.pop(at - 1, None)


def _gap(item: Item, computations: Sequence[Operation], layer: int) -> tuple[int, int]:
    """Return the uses of the stored input of ``layer`` between which it travels: around the loss."""
    loss = next(at for at, operation in enumerate(computations) if operation.kind == "loss")
    before = max(at for at in item.uses if at < loss)
    after = [at for at in item.uses if at > loss]
    if not after:
        raise ValueError(f"the input of layer {layer} is offloaded and not read again")
    return before, after[0]
