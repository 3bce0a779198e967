"""Where each weight and its optimizer states are, and what is current. Knows nothing of plans or blocks.

A weight has one *host copy* of full size and at most one *device copy*, a view of an arena buffer. ``Parameter.data``
is the device copy only while its block runs; at rest it is the host copy, so that ``state_dict``, summaries and user
code see real shapes and values. Optimizer state tensors follow the same rule with respect to an update on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lt_offload.execute.device import Buffer, Cell, Device, Event
from lt_offload.plan.schedule import UpdatePlace

STATE_ALIGNMENT = 8
"""State tensors of one weight stand in one buffer, each at a multiple of this many bytes: the largest element size."""


class Copies(ABC):
    """A host copy, an optional device copy, and the events that say when each is complete."""

    __slots__ = ("buffer", "current", "device", "dirty", "host_cell", "label", "leaving", "ready")

    def __init__(self, label: str, device: Device) -> None:
        self.label = label
        self.device = device
        self.host_cell = Cell(f"host {label}")
        self.buffer: Buffer | None = None
        self.ready: Event | None = None
        """The device copy is complete; None: it is, or there is none."""
        self.leaving: Event | None = None
        """The last copy from the device copy to the host."""
        self.current: Event | None = None
        """The host copy is complete; None: it is."""
        self.dirty = False
        """The device copy is newer than the host copy."""

    @abstractmethod
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return ``(host tensor, device view)`` of everything that a copy has to move."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Arena bytes of the device copy."""

    def attach(self, buffer: Buffer) -> None:
        """Use ``buffer`` for the device copy."""
        assert self.buffer is None, f"{self.label} is on the device already"
        self.buffer = buffer

    def detach(self) -> None:
        """Forget the device copy and give its range back; its next writer waits for the copies in and out."""
        assert self.buffer is not None
        self.device.free(self.buffer, distinct((self.ready, self.leaving)))
        self.buffer = None
        self.ready = self.leaving = None
        self.dirty = False


class Weight(Copies):
    """One parameter tensor."""

    __slots__ = (
        "direct",
        "grad",
        "grad_cell",
        "grad_direct",
        "host",
        "index",
        "param",
        "place",
        "present",
        "seen",
        "shadows",
        "states",
        "uses",
        "view",
    )

    def __init__(self, index: int, name: str, param: nn.Parameter, device: Device) -> None:
        super().__init__(f"weight {name}", device)
        self.index = index
        self.param = param
        self.host: Tensor = device.host_adopt(param.data)
        param.data = self.host
        self.view: Tensor | None = None
        self.direct: Tensor | None = None
        """The host copy as computations on the device see it; see :meth:`expose`."""
        self.present: Tensor | None = None
        """What the running computation sees: ``view`` or ``direct``."""
        self.place: UpdatePlace = "none"
        self.states = States(self)
        self.shadows: dict[str, nn.Parameter] = {}
        self.uses = 0
        """Blocks whose backward contributes to the gradient."""
        self.seen = 0
        """How many of them have, in this iteration."""
        self.grad: Tensor | None = None
        """Gradient held on the device until all uses have contributed."""
        self.grad_cell = Cell(f"host grad {name}")
        self.grad_direct = False
        """The backward itself writes the gradient to host memory."""

    @property
    @override
    def nbytes(self) -> int:
        return self.host.nbytes

    @override
    def attach(self, buffer: Buffer) -> None:
        super().attach(buffer)
        with torch.inference_mode(False):
            self.view = buffer.view(self.host.dtype, self.host.shape)

    @override
    def detach(self) -> None:
        super().detach()
        self.view = None

    def expose(self) -> None:
        """Let computations read the host copy directly; raises ``UnsupportedError`` where they cannot."""
        if self.direct is None:
            self.direct = self.device.direct_view(self.host)

    @override
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        assert self.view is not None
        return [(self.host, self.view)]

    def shadow(self, place: str, data: Tensor, grad: Tensor | None) -> nn.Parameter:
        """Return the parameter's stand-in for updates at ``place``, over ``data`` and with gradient ``grad``."""
        shadow = self.shadows.get(place)
        if shadow is None:
            shadow = self.shadows[place] = nn.Parameter(data)
        else:
            shadow.data = data
        shadow.grad = grad
        return shadow


class States(Copies):
    """The optimizer state tensors of one weight that are worth moving: those with more than one element.

    They appear with the first update and are replaced by ``Optimizer.load_state_dict``, so records are made from the
    live state dictionary whenever it has changed.
    """

    __slots__ = ("entries", "weight")

    def __init__(self, weight: Weight) -> None:
        super().__init__(weight.label.replace("weight", "state", 1), weight.device)
        self.weight = weight
        self.entries: list[tuple[Tensor, Tensor, int]] = []
        """``(state tensor as the optimizer holds it, its host copy, offset in the buffer)``."""

    @property
    @override
    def nbytes(self) -> int:
        return sum(round_up(host.nbytes, STATE_ALIGNMENT) for _, host, _ in self.entries)

    def refresh(self, state: dict[str, Any]) -> None:
        """Adopt the tensors of the optimizer's ``state`` dictionary, if they are not the known ones."""
        tensors = [v for v in state.values() if isinstance(v, Tensor) and v.numel() > 1]
        known = [tensor for tensor, _, _ in self.entries]
        if len(known) == len(tensors) and all(a is b for a, b in zip(known, tensors, strict=True)):
            return
        assert self.buffer is None or not known, f"{self.label} was replaced while on the device"
        self.entries = []
        offset = 0
        for tensor in tensors:
            tensor.data = self.device.host_adopt(tensor.data)
            self.entries.append((tensor, tensor.data, offset))
            offset += round_up(tensor.nbytes, STATE_ALIGNMENT)

    def views(self) -> list[Tensor]:
        """Return the device copies, in the order of ``entries``."""
        assert self.buffer is not None
        with torch.inference_mode(False):
            return [
                self.buffer.bytes[at : at + host.nbytes].view(host.dtype).view(host.shape)
                for _, host, at in self.entries
            ]

    @override
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(host, view) for (_, host, _), view in zip(self.entries, self.views(), strict=True)]

    def enter(self) -> None:
        """Let the optimizer see the device copies."""
        for (tensor, _, _), view in zip(self.entries, self.views(), strict=True):
            tensor.data = view

    def leave(self) -> None:
        """Let everybody see the host copies again."""
        for tensor, host, _ in self.entries:
            tensor.data = host

    def born(self, state: dict[str, Any]) -> None:
        """Take over what the first update on the device has put into ``state``: its home is the arena buffer."""
        assert self.buffer is not None and not self.entries
        offset = 0
        for tensor in [v for v in state.values() if isinstance(v, Tensor) and v.numel() > 1]:
            host = self.device.host_empty(tensor.shape, tensor.dtype)
            self.entries.append((tensor, host, offset))
            offset += round_up(tensor.nbytes, STATE_ALIGNMENT)
        assert offset <= self.buffer.nbytes, f"{self.label} needs {offset} bytes, planned were {self.buffer.nbytes}"
        for (tensor, host, _), view in zip(self.entries, self.views(), strict=True):
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
            tensor.data = host
        self.dirty = True


def round_up(nbytes: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``nbytes``."""
    return -(-nbytes // alignment) * alignment


def fetch(device: Device, copies: Iterable[Copies], *, label: str, op: int = -1) -> Event | None:
    """Queue one task that fills the attached ``copies``; return its event, None if there is nothing to copy."""
    items = [item for item in copies if item.buffer is not None]
    pairs = [pair for item in items for pair in item.pairs()]
    if not pairs:
        return None

    def copy() -> None:
        for host, view in pairs:
            device.copy(view, host)

    event = device.submit(
        "h2d",
        copy,
        after=distinct(item.current for item in items),
        reads=[item.host_cell for item in items],
        writes=[item.buffer for item in items if item.buffer is not None],
        label=label,
        op=op,
        nbytes=sum(host.nbytes for host, _ in pairs),
    )
    for item in items:
        item.ready = event
    return event


def write_back(device: Device, copies: Iterable[Copies], *, label: str, op: int = -1) -> Event | None:
    """Queue one task that copies newer device copies to the host; return its event, None if there are none."""
    items = [item for item in copies if item.dirty]
    pairs = [pair for item in items for pair in item.pairs()]
    if not pairs:
        return None

    def copy() -> None:
        for host, view in pairs:
            device.copy(host, view)

    event = device.submit(
        "d2h",
        copy,
        after=[device.mark(), *distinct(item.current for item in items)],
        reads=[item.buffer for item in items if item.buffer is not None],
        writes=[item.host_cell for item in items],
        label=label,
        op=op,
        nbytes=sum(host.nbytes for host, _ in pairs),
    )
    for item in items:
        item.current = item.leaving = event
        item.dirty = False
    return event


def distinct(events: Iterable[Event | None]) -> list[Event]:
    """Return the distinct events; tensors that travel together share one."""
    return list(dict.fromkeys(event for event in events if event is not None))
