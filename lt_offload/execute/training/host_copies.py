"""The host's memory in training: how much it takes, and reading the host copies of weights and states meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from lt_offload.compat.torch import address_of
from lt_offload.errors import OverBudget
from lt_offload.execute.memory.activations import ROUNDING
from lt_offload.execute.memory.common import Common
from lt_offload.execute.memory.snapshots import HostSnapshot
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.program import Program
from lt_offload.execute.training.parts import EngineParts
from lt_offload.execute.updates.optimizer import Updates
from lt_offload.execute.user_code.guard import TrackedTensor
from lt_offload.model.optimizers import Place, tensor_at
from lt_offload.units import format_bytes

HostCopy = tuple[int, Place]
"""A host copy's name in all processes: the weight's number, and the place in its state; None: the weight."""
_SMALL = 8
"""Bytes of one element: whoever wants such a state as it is copies it at once."""


def host_limit(program: Program) -> int:
    """Return the bytes of RAM that training may take: what activations are rounded up by comes on top."""
    return program.host_budget_bytes + ROUNDING * program.blocks


class HostCopies:
    """The host memory of an engine."""

    def __init__(
        self, parts: EngineParts, updates: Updates | None, program: Program | None, common: Common | None
    ) -> None:
        self._common = common
        self._weights, self._updates, self._program = parts.weights, updates, program
        self._device, self._snapshots, self._guard = parts.recorder.device, parts.residency.snapshots, parts.guard
        self._updated_on_host: Collection[int] = program.updated_on_host if program is not None else ()

    @property
    def nbytes(self) -> int:
        """RAM of the process: its own, weights, gradients, optimizer states, activations, what is set aside."""
        updates = self._updates
        hosted = (w for w in self._weights if w.index in self._updated_on_host and w.common_states is None)
        states = updates.bytes(hosted) if updates else 0
        if self._common is not None:
            states += self._common.nbytes // self._common.machine.size
        own = self._program.process_bytes if self._program is not None else 0
        return own + self._device.host_bytes + states + self._snapshots.nbytes

    def check(self) -> None:
        """Raise ``OverBudget`` if that is more than the plan may take."""
        assert self._program is not None
        used = self.nbytes
        if used > host_limit(self._program):
            raise OverBudget(
                f"training takes {format_bytes(used)} ({used} bytes) of host memory, states of the optimizer included, "
                f"more than host_memory={self._program.host_budget_bytes}; set host_memory={used} or more and plan "
                "again"
            )

    def snapshot(self, free: int) -> HostSnapshot:
        """Return the host copies as they are now, to be read by another thread while training goes on, and closed.

        Of several processes each has what it saves. To be called within ``Engine.at_rest``. Copies that have to be set
        aside for it take what the plan's host memory leaves. ``free``: bytes of RAM that the machine has left; no more
        is taken.
        """
        assert self._program is not None
        storages = {
            storage: self._program.changes.get((owned.weight.index, owned.state is not None), self._program.size)
            for storage, owned in self._changing()
            if self._saved_by(owned.weight) == self._rank
        }
        return self._snapshots.take(storages, min(free, self._program.host_budget_bytes - self.nbytes))

    @property
    def have_owners(self) -> bool:
        """True if processes save a checkpoint together: each has host copies of its own."""
        return any(self._saved_by(weight) for weight in self._weights)

    def saved_by_others(self) -> dict[int, tuple[int, HostCopy]]:
        """Return what another process of the machine saves, by the addresses of storages: which one, and its name."""
        return {
            address_of(storage): (rank, (owned.weight.index, owned.state))
            for storage, owned in self._changing()
            if (rank := self._saved_by(owned.weight)) != self._rank
        }

    def memory(self, copy: HostCopy) -> torch.UntypedStorage:
        """Return the memory of what has this name in all processes."""
        index, state = copy
        weight = next(weight for weight in self._weights if weight.index == index)
        host = weight.host
        if state is not None:
            assert self._updates is not None
            tensor = tensor_at(self._updates.state(weight), state)
            assert tensor is not None, f"{weight.label} has no state {state!r} here, and has one in another process"
            host = tensor
        return host.untyped_storage()

    @property
    def _rank(self) -> int:
        return 0 if self._common is None else self._common.machine.rank

    def _saved_by(self, weight: Weight) -> int:
        return 0 if self._common is None or weight.owner is None else weight.owner

    def _changing(self) -> Iterator[tuple[torch.UntypedStorage, TrackedTensor]]:
        for storage, owned in self._guard.announced():
            # Other states than those that ops change are small, such as step counters.
            hosted = owned.weight.index in self._updated_on_host
            moving = storage.nbytes() > _SMALL if hosted else owned.state in owned.weight.states.names
            if owned.state is None or moving:
                yield storage, owned
