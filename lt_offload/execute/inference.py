"""Forwards without gradients, without a plan: weights come block by block as they are needed, and stay while they fit.

Used for validation, generation and sanity checks, before the first training iteration as well as between iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lt_offload.errors import OverBudget
from lt_offload.execute.copies import Transfer
from lt_offload.execute.device.base import Device
from lt_offload.execute.groups import Layout, Parcel
from lt_offload.execute.tensors import States, Weight, distinct
from lt_offload.schema.plan import ALIGNMENT
from lt_offload.units import format_bytes, round_up


class Streaming:
    """Keeps the next block's weights on their way while one block runs."""

    def __init__(self, device: Device, blocks: Sequence[Sequence[Weight]], layout: Layout) -> None:
        self.device = device
        self.blocks = blocks
        self._parcels = [list(dict.fromkeys(weight.parcel for weight in block)) for block in blocks]
        """Of each block, the groups of its weights."""
        self._states = [parcel for parcel in layout.all if isinstance(parcel.members[0], States)]
        self._transfers: dict[tuple[Parcel, ...], Transfer] = {}

    def forward(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one block's forward."""
        weights, parcels = self.blocks[index], self._parcels[index]
        following = self._parcels[(index + 1) % len(self.blocks)]
        if not self._bring(parcels, index, needed=parcels):
            self._clear()  # the ranges in use may have left gaps that are too small
            if not self._bring(parcels, index, needed=parcels):
                nbytes = sum(weight.nbytes for weight in weights)
                raise OverBudget(f"block {index} needs {format_bytes(nbytes)} of weights, more than the arena holds")
        self._bring(following, index, needed=[*parcels, *following])
        arrivals = distinct(parcel.ready for parcel in parcels)
        self.device.wait(*arrivals, reads=[p.buffer for p in parcels if p.buffer is not None])
        for parcel in parcels:
            parcel.ready = None
        for weight in weights:
            assert weight.view is not None
            weight.param.data = weight.view
        try:
            return forward(*args, **kwargs)
        finally:  # whoever looks at parameters between blocks, or after an error, sees the host copies
            for weight in weights:
                weight.param.data = weight.host

    def close(self) -> None:
        """Forget the prepared copies; what is in the arena stays for whoever plans next."""
        self._transfers.clear()

    def _bring(self, parcels: Sequence[Parcel], index: int, needed: Sequence[Parcel]) -> bool:
        """Start to fetch ``parcels``; return False, having fetched nothing, if they do not fit beside ``needed``."""
        missing = tuple(parcel for parcel in parcels if parcel.buffer is None)
        for count, parcel in enumerate(missing):
            try:
                self._take(parcel, index, needed)
            except OverBudget:
                for taken in missing[:count]:
                    taken.detach()
                return False
        if missing:
            if missing not in self._transfers:
                self._transfers[missing] = Transfer(self.device, missing, label=f"stream {index}")
            self._transfers[missing].fetch()
        return True

    def _clear(self) -> None:
        for parcel in [*self._states, *{parcel for block in self._parcels for parcel in block}]:
            if parcel.buffer is not None:
                self._evict(parcel)

    def _take(self, parcel: Parcel, index: int, needed: Sequence[Parcel]) -> None:
        victims: list[Parcel] | None = None
        while True:
            try:
                parcel.attach(self.device.allocate(parcel.room, parcel.label))
                return
            except OverBudget:
                if victims is None:
                    victims = self._victims(index, needed)
                if not victims:
                    raise
                self._evict(victims.pop(0))

    def _victims(self, index: int, needed: Sequence[Parcel]) -> list[Parcel]:
        """Return what may leave: first optimizer states, which no forward reads, then the weights needed last."""
        distance: dict[Parcel, int] = {}
        for position, block in enumerate(self._parcels):
            for parcel in block:
                ahead = (position - index) % len(self.blocks)
                distance[parcel] = min(ahead, distance.get(parcel, ahead))
        kept = set(needed)
        weights = sorted((p for p in distance if p.buffer is not None and p not in kept), key=lambda p: -distance[p])
        return [*(p for p in self._states if p.buffer is not None), *weights]

    def _evict(self, parcel: Parcel) -> None:
        Transfer(self.device, [parcel], label=f"evict {parcel.label}").write_back()
        parcel.detach()


def room(blocks: Sequence[Sequence[Weight]], budget: int) -> int:
    """Return the arena to stream in: room for all weights if that leaves half of ``budget``, or two blocks, or one."""
    sizes = sorted(sum(round_up(weight.nbytes, ALIGNMENT) for weight in block) for block in blocks)
    everything = sum(round_up(weight.nbytes, ALIGNMENT) for weight in {w for block in blocks for w in block})
    return next((size for size in (everything, sum(sizes[-2:])) if size <= budget // 2), sizes[-1])
