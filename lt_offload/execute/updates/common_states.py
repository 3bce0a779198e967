"""Optimizer states of weights in common memory: their owner alone computes them, and every process sees them.

The first update of a weight makes its states, in the owner's memory. Then all processes put them into memory that the
owner makes (:meth:`CommonStates.move_in`): once per machine. In each process the optimizer holds tensors in an own
mapping of it (``memory/common.py``), so that ``optimizer.state_dict()`` is complete everywhere. States that were loaded
are each process's own until the next update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lt_offload.execute.device.base import Device
from lt_offload.execute.device.lanes import plain_torch
from lt_offload.execute.memory.common import Common, map_common
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.updates.optimizer import Updates
from lt_offload.model.objects import same
from lt_offload.model.optimizers import Place, tensors_of
from lt_offload.schema.plan import ALIGNMENT
from lt_offload.units import round_up


class CommonStates:
    """The states of ``common.trained``, and the updates that each process carries out of what it owns."""

    def __init__(self, common: Common, updates: Updates, device: Device) -> None:
        self._common, self._updates, self._device = common, updates, device
        common.states = self
        self._without: list[Weight] = []
        self._trained = {weight.index for weight in common.trained}
        self._own: dict[int, dict[Place, Tensor]] = {}
        """By weight: its states as users see them."""

    def replaced(self, weight: Weight) -> bool:
        """Return whether the states of ``weight`` are not those in common memory, or not there yet."""
        if weight.index not in self._trained:
            return False
        known, now = self._own.get(weight.index), tensors_of(self._updates.state(weight))
        return known is None or known.keys() != now.keys() or not same(known.values(), now.values())

    def pairs(self, weight: Weight) -> list[tuple[Tensor, Tensor]]:
        """Return the states of ``weight``: in common memory, and as users see them; none that were replaced."""
        if weight.common_states is None or self.replaced(weight):
            return []
        common = tensors_of(weight.common_states)
        return [(common[place], own) for place, own in self._own[weight.index].items()]

    def forget(self, weights: Sequence[Weight]) -> None:
        """Let updates of ``weights`` use what the optimizer holds: it is not, or no longer, in common memory."""
        for weight in weights:
            weight.common_states = None
            self._common.nbytes -= sum(own.nbytes for own in self._own.pop(weight.index, {}).values())

    def move_in(self, weights: Sequence[Weight]) -> None:
        """Let all processes hold the states that the owners of ``weights`` have; their updates are over."""
        machine = self._common.machine
        mine = {w.index: self._updates.state(w) for w in weights if w.owner == machine.rank}
        told = machine.gather(
            {
                index: {name: _Form(value) if isinstance(value, Tensor) else value for name, value in state.items()}
                for index, state in mine.items()
            }
        )
        by_index = {weight.index: weight for weight in weights}
        with plain_torch():
            for rank, of_one in enumerate(told):
                states = {index: state for index, state in of_one.items() if state}
                if any(_bytes(state) for state in states.values()):
                    self._map(rank, states, by_index)
            # Without this, a process would hand out states that their owner has not filled yet.
            machine.barrier()
            for index, own in self._own.items():
                if index in by_index:
                    weight = by_index[index]
                    self._updates.optimizer.state[weight.param] = {**(weight.common_states or {}), **own}
        self._updates.generation += 1
        self._updates.states_move = True

    def _map(self, rank: int, states: dict[int, dict[str, Any]], weights: dict[int, Weight]) -> None:
        machine = self._common.machine
        sizes = [_bytes(state) for state in states.values()]
        (pages,) = map_common(machine, [sum(sizes)], rank, name="states")
        begin = 0
        for (index, state), size in zip(states.items(), sizes, strict=True):
            weight, at = weights[index], begin
            begin += size
            own: dict[Place, Tensor] = {}
            common: dict[str, Any] = {}
            present = self._updates.state(weight)
            for name, value in state.items():
                if not isinstance(value, _Form):
                    common[name] = value
                    continue
                common[name] = pages.common.view(value.dtype, value.count, at).view(value.shape)
                own[name] = pages.own.view(value.dtype, value.count, at).view(value.shape)
                at += value.room
                if rank == machine.rank:
                    common[name].copy_(present[name])
            weight.common_states, self._own[index] = common, own
            self._common.nbytes += sum(tensor.nbytes for tensor in own.values())

    def begin_pass(self) -> None:
        """A forward with gradients begins in every process: let what users have written be everybody's."""
        self._common.publish()

    def begin(self, *, beside: bool) -> None:
        """The updates of a window begin in every process; ``beside``: beside the backward, see ``arrivals.py``."""
        # Others are about to change what a checkpoint of this process may still be reading.
        for weight in self._common.trained:
            if self._common.theirs(weight):
                self._updates.snapshots.changing((weight.host, *tensors_of(self._updates.state(weight)).values()))
        self._without = self._common.begin_updates(beside=beside)
        self.forget(self._without)

    def end(self) -> None:
        """All updates are queued."""
        if self._without:
            self._device.drain()
            self.move_in(self._without)
            self._without = []


class _Form:
    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.count = tuple(tensor.shape), tensor.dtype, tensor.numel()
        self.room = round_up(tensor.nbytes, ALIGNMENT)


def _bytes(state: dict[str, Any]) -> int:
    return sum(value.room for value in state.values() if isinstance(value, _Form))
