"""Forwards without gradients: each block's weights come when they are needed, whatever fits stays. Needs no plan.

Used for validation, generation and sanity checks, before the first training iteration as well as between iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lt_offload.errors import OverBudget
from lt_offload.execute.device import Device
from lt_offload.execute.params import Copies, Weight, fetch, round_up, write_back
from lt_offload.plan.schedule import ALIGNMENT
from lt_offload.units import format_bytes


class Streaming:
    """Keeps the next block's weights on their way while one block runs."""

    def __init__(self, device: Device, blocks: Sequence[Sequence[Weight]]) -> None:
        self.device = device
        self.blocks = blocks

    def forward(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one block's forward."""
        weights = self.blocks[index]
        following = self.blocks[(index + 1) % len(self.blocks)]
        if not self._bring(weights, index, needed=weights):
            self._clear()  # what was there left holes of the wrong sizes
            if not self._bring(weights, index, needed=weights):
                nbytes = sum(weight.nbytes for weight in weights)
                raise OverBudget(f"block {index} needs {format_bytes(nbytes)} of weights, more than the arena holds")
        self._bring(following, index, needed=[*weights, *following])
        self.device.wait(
            *{w.ready for w in weights if w.ready is not None},
            reads=[w.buffer for w in weights if w.buffer is not None],
        )
        for weight in weights:
            assert weight.view is not None
            weight.param.data = weight.view
        try:
            return forward(*args, **kwargs)
        finally:
            for weight in weights:
                weight.param.data = weight.host

    def _bring(self, weights: Sequence[Weight], index: int, needed: Sequence[Weight]) -> bool:
        """Start to fetch ``weights``; return False, having fetched nothing, if there is no room beside ``needed``."""
        missing = [weight for weight in weights if weight.buffer is None]
        for at, weight in enumerate(missing):
            try:
                self._take(weight, index, needed)
            except OverBudget:
                for taken in missing[:at]:
                    taken.detach()
                return False
        fetch(self.device, missing, label=f"stream {index}")
        return True

    def _clear(self) -> None:
        for weight in {weight for block in self.blocks for weight in block}:
            for item in (weight, weight.states):
                if item.buffer is not None:
                    self._evict(item)

    def _take(self, weight: Weight, index: int, needed: Sequence[Weight]) -> None:
        victims: list[Copies] | None = None
        while True:
            try:
                weight.attach(self.device.allocate(round_up(weight.nbytes, ALIGNMENT), weight.label))
                return
            except OverBudget:
                if victims is None:
                    victims = self._victims(index, needed)
                if not victims:
                    raise
                self._evict(victims.pop(0))

    def _victims(self, index: int, needed: Sequence[Weight]) -> list[Copies]:
        """Return what may leave, states first, then the weights that are needed last."""
        distance: dict[Weight, int] = {}
        for at, block in enumerate(self.blocks):
            for weight in block:
                ahead = (at - index) % len(self.blocks)
                distance[weight] = min(ahead, distance.get(weight, ahead))
        states: list[Copies] = [w.states for w in distance if w.states.buffer is not None]
        kept = set(needed)
        weights = sorted((w for w in distance if w.buffer is not None and w not in kept), key=lambda w: -distance[w])
        return [*states, *weights]

    def _evict(self, item: Copies) -> None:
        write_back(self.device, [item], label=f"evict {item.label}")
        item.detach()


def room(blocks: Sequence[Sequence[Weight]], budget: int) -> int:
    """Return the arena to stream in: room for all weights if that leaves half of ``budget``, or two blocks, or one."""
    sizes = sorted(sum(round_up(weight.nbytes, ALIGNMENT) for weight in block) for block in blocks)
    everything = sum(round_up(weight.nbytes, ALIGNMENT) for weight in {w for block in blocks for w in block})
    return next((size for size in (everything, sum(sizes[-2:])) if size <= budget // 2), sizes[-1])
