"""Forwards without gradients, without a plan: weights come block by block as they are needed, and stay while they fit.

Used for validation, generation and sanity checks, before the first training iteration as well as between iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lt_offload.errors import OverBudget
from lt_offload.execute.device.base import Device
from lt_offload.execute.memory.groups import Layout
from lt_offload.execute.memory.live_group import LiveGroup, needed_by_compute
from lt_offload.execute.memory.residency import Residency, Transfer
from lt_offload.execute.memory.tensors import Weight
from lt_offload.model.state.contexts import ambient, within
from lt_offload.schema.plan import ALIGNMENT
from lt_offload.units import format_bytes, round_up


class Streaming:
    """Keeps the next block's weights on their way while one block runs."""

    def __init__(
        self, device: Device, blocks: Sequence[Sequence[Weight]], layout: Layout, residency: Residency
    ) -> None:
        self.device = device
        self._residency = residency
        self.blocks = blocks
        self._groups = [list(dict.fromkeys(weight.group for weight in block)) for block in blocks]
        """By block, the groups of its weights."""
        self._states = [group for group in layout.all if not isinstance(group.members[0], Weight)]
        """Groups of states and of sums of gradients, which no forward reads."""
        self._transfers: dict[tuple[LiveGroup, ...], Transfer] = {}
        self._called: set[int] = set()
        """Blocks that the present forward has called."""

    def begins(self, index: int) -> bool:
        """Return whether a forward begins with a call of block ``index``: the first one, or again."""
        # Not by the order of blocks, which is a guess before the first step.
        begins = not self._called or index in self._called
        if begins:
            self._called.clear()
        self._called.add(index)
        return begins

    def forward(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one block's forward; nothing is where a plan wants it any more afterwards."""
        self._residency.run_releases()
        self._residency.settled = False
        weights, groups = self.blocks[index], self._groups[index]
        # Behind the last block the first: the next batch, or the next token, begins with it.
        following = self._groups[(index + 1) % len(self.blocks)]
        on_host: list[LiveGroup] = []
        if not self._bring(groups, index, needed=groups):
            for group in [*self._states, *{group for block in self._groups for group in block}]:
                if group.buffer is not None:  # the ranges in use may have left gaps that are too small
                    self._evict(group)
            if not self._bring(groups, index, needed=groups):
                # The arena of a plan may hold less than a block, if the block's computations read the rest in host
                # memory.
                on_host = [group for group in groups if _is_readable(group)]
                groups = [group for group in groups if group not in on_host]
                if not on_host or not self._bring(groups, index, needed=groups):
                    nbytes = sum(weight.nbytes for weight in weights)
                    raise OverBudget(
                        f"block {index} needs {format_bytes(nbytes)} of weights, more than the arena holds"
                    )
        self._bring(following, index, needed=[*groups, *following])
        needed_by_compute(self.device, groups, on_host, by=f"block {index}")
        for weight in weights:
            view = weight.exposed(self.device) if weight.group in on_host else weight.view
            assert view is not None
            weight.param.data = view
        try:
            with within(ambient()):  # no cast of a weight outlives its block
                return forward(*args, **kwargs)
        finally:  # whoever looks at parameters between blocks, or after an error, sees the host copies
            for weight in weights:
                weight.param.data = weight.host

    def close(self) -> None:
        """Forget the prepared copies; what is in the arena stays for whoever plans next."""
        self._transfers.clear()

    def _bring(self, groups: Sequence[LiveGroup], index: int, needed: Sequence[LiveGroup]) -> bool:
        """Start to fetch ``groups``; return False, having fetched nothing, if they do not fit beside ``needed``."""
        missing = tuple(group for group in groups if group.buffer is None)
        for count, group in enumerate(missing):
            try:
                self._take(group, index, needed)
            except OverBudget:
                # Half of what is needed is of no use, and nothing has been copied there yet.
                for taken in missing[:count]:
                    taken.detach()
                return False
        if missing:
            if missing not in self._transfers:
                self._transfers[missing] = Transfer(self.device, missing, label=f"stream {index}")
            self._transfers[missing].fetch()
        return True

    def _take(self, group: LiveGroup, index: int, needed: Sequence[LiveGroup]) -> None:
        victims: list[LiveGroup] | None = None
        while True:
            try:
                group.attach(self.device.allocate(group.room, group.label))
                return
            except OverBudget:
                if victims is None:
                    victims = self._victims(index, needed)
                if not victims:
                    raise
                self._evict(victims.pop(0))

    def _victims(self, index: int, needed: Sequence[LiveGroup]) -> list[LiveGroup]:
        """Return what may leave: first what no forward reads, then the weights needed last."""
        distance: dict[LiveGroup, int] = {}
        for position, block in enumerate(self._groups):
            for group in block:
                ahead = (position - index) % len(self.blocks)
                distance[group] = min(ahead, distance.get(group, ahead))
        kept = set(needed)
        # Blocks run in turn: what ran just now is needed latest, and the least recently used is needed next.
        weights = sorted((p for p in distance if p.buffer is not None and p not in kept), key=lambda p: -distance[p])
        return [*(p for p in self._states if p.buffer is not None), *weights]

    def _evict(self, group: LiveGroup) -> None:
        Transfer(self.device, [group], label=f"evict {group.label}").write_back()
        group.detach()


def _is_readable(group: LiveGroup) -> bool:
    """Return whether computations of the plan read all of ``group`` in host memory: its arena has no room for it."""
    return all(isinstance(weight, Weight) and weight.zero_copy is not None for weight in group.members)


def room(blocks: Sequence[Sequence[Weight]], budget: int) -> int:
    """Return the arena to stream in: room for all weights if that leaves half of ``budget``, or two blocks, or one."""
    sizes = sorted(sum(round_up(weight.nbytes, ALIGNMENT) for weight in block) for block in blocks)
    everything = sum(round_up(weight.nbytes, ALIGNMENT) for weight in {w for block in blocks for w in block})
    return next((size for size in (everything, sum(sizes[-2:])) if size <= budget // 2), sizes[-1])
