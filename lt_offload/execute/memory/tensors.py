"""Each weight and its optimizer states: where they are on the host and on the device.

A weight has one *host copy* of full size and at most one *device copy*, a view of an arena buffer. ``Parameter.data``
is the device copy only while its block runs; at rest it is the host copy, so that ``state_dict``, summaries and user
code see real shapes and values. Optimizer state tensors follow the same rule with respect to an update on the device.
Copies and the events that order them belong to the group that they travel in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lt_offload.errors import OverBudget
from lt_offload.execute.device.base import Cell, Device
from lt_offload.execute.device.lanes import plain_torch
from lt_offload.model.objects import kind_of
from lt_offload.model.optimizers import STATE_ALIGNMENT, Place, tensors_of
from lt_offload.units import round_up

if TYPE_CHECKING:
    from lt_offload.execute.memory.live_group import LiveGroup

_PIECE_BYTES = 256 << 10
"""Bytes of each gradient that are added to others at a time."""
_KNOWN_VIEWS = 8
"""Offsets whose views are kept: a plan has few for a tensor, forwards without a plan any number."""


_View = TypeVar("_View")


class Viewed(Generic[_View]):
    """Something whose device copy is seen through views of the arena, which are made once for each place."""

    __slots__ = ("start", "view", "views")

    absent: _View
    """Stands for the device copy where there is none."""

    def __init__(self) -> None:
        self.start = 0
        """Offset in the group."""
        self.view = self.absent
        """The device copy."""
        self.views: dict[int, _View] = {}
        """By place: the views of it there."""

    def view_at(self, slab: Tensor, at: int) -> _View:
        """Return the device copy at ``at`` of the arena, which is ``slab``, and remember it."""
        if len(self.views) >= _KNOWN_VIEWS:
            self.views.clear()
        view = self.views[at] = self._made_at(slab, at)
        return view

    def _made_at(self, slab: Tensor, at: int) -> _View:
        raise NotImplementedError

    def forget_views(self) -> None:
        """Let go of the arena, and of what the device sees of host memory."""
        self.view = self.absent
        self.views.clear()


class Whole(Viewed[Tensor | None]):
    """A tensor whose device copy is one view of the arena."""

    __slots__ = ("host",)

    host: Tensor
    """The host copy."""
    absent = None

    @override
    def _made_at(self, slab: Tensor, at: int) -> Tensor:
        return _view(slab, at, self.host)


class Weight(Whole):
    """One parameter tensor."""

    __slots__ = (
        "common",
        "common_states",
        "owner",
        "zero_copy",
        "grad",
        "grad_cell",
        "index",
        "label",
        "nbytes",
        "param",
        "group",
        "present",
        "room",
        "seen",
        "shadows",
        "states",
        "total",
        "uses",
    )

    filled = True
    """There is always something to copy."""

    def __init__(self, index: int, name: str, param: nn.Parameter) -> None:
        super().__init__()
        self.index = index
        self.label = f"weight {name}"
        self.param = param
        self.host: Tensor = param.data
        self.room = self.nbytes = self.host.nbytes
        """Bytes, also those of the group, without what alignment adds."""
        self.group: LiveGroup
        self.owner: int | None = None
        """The process that updates the host copy, where several have it in common; None: it is this one's own."""
        self.common: Tensor | None = None
        """The host copy as the engine reads and writes it, where it is in common memory (``memory/common.py``)."""
        self.common_states: dict[str, Any] | None = None
        """The same of its optimizer states, and whatever else is in their dictionary."""
        self.zero_copy: Tensor | None = None
        """The host copy as computations on the device see it; see :meth:`expose`."""
        self.present: Tensor | None = None
        """The copy that the running computation sees: ``view`` or ``zero_copy``."""
        self.states = States(self)
        self.total: Sum | None = None
        """The sum of its gradients, in plans for windows."""
        self.shadows: dict[str, nn.Parameter] = {}
        self.uses = 0
        """Blocks whose backward contributes to the gradient."""
        self.seen = 0
        """Number of those that have contributed in this iteration."""
        self.grad: Tensor | None = None
        """Gradient held on the device until all uses have contributed."""
        self.grad_cell = Cell(f"host grad {name}")

    def called(self, index: int, name: str) -> Weight:
        """Be the tensor ``index`` of another engine, before that is installed; return itself."""
        self.index, self.label, self.host = index, f"weight {name}", self.param.data
        return self

    def rehost(self, host: Tensor) -> None:
        """Let ``host``, which has the same contents, be the host copy."""
        self.host = self.param.data = host

    @property
    def hosts(self) -> tuple[Tensor, ...]:
        """The host copy, which checkpoints hold."""
        return (self.host,)

    @property
    def home(self) -> Tensor:
        """The host copy as the engine reads and writes it; ``host`` is what users see of it."""
        return self.host if self.common is None else self.common

    @override
    def forget_views(self) -> None:
        super().forget_views()
        self.zero_copy = None
        # The stand-ins hold views of the arena as their data.
        self.shadows.clear()

    def expose(self, device: Device) -> None:
        """Let computations read the host copy directly; raises ``UnsupportedError`` where they cannot."""
        if self.zero_copy is None:
            self.zero_copy = device.zero_copy_view(self.home)

    def exposed(self, device: Device) -> Tensor:
        """Return the host copy to be read directly between steps, when a user may have written this process's own."""
        assert self.zero_copy is not None
        return device.zero_copy_view(self.host) if self.group.reads_own else self.zero_copy

    def proxy(self, place: str, data: Tensor, grad: Tensor | None) -> nn.Parameter:
        """Return the parameter's stand-in for updates at ``place``, over ``data`` and with gradient ``grad``."""
        proxy = self.shadows.get(place)
        if proxy is None:
            proxy = self.shadows[place] = nn.Parameter(data)
            vars(proxy).update(vars(self.param))  # optimizers tell parameters apart by attributes
        else:
            proxy.data = data
        proxy.grad = grad
        return proxy


class States(Viewed[dict[Place, Tensor]]):
    """The optimizer state tensors of one weight that are worth moving: those with more than one element.

    They appear with the first update and are replaced by ``Optimizer.load_state_dict``, so records are made from the
    live state dictionary whenever it has changed.
    """

    __slots__ = ("_seen", "group", "hosts", "known", "label", "names", "room", "slot", "weight")

    absent: dict[Place, Tensor] = {}

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.label = weight.label.replace("weight", "state", 1)
        self.weight = weight
        self.group: LiveGroup | None = None
        """The group that they travel in; None: they never leave the host, or there are none."""
        self.room = 0
        """Bytes of the group that the plan has kept for them."""
        self.slot: Tensor | None = None
        """Host memory for them, as large as ``room``."""
        self.names: tuple[Place, ...] = ()
        self.known: list[Tensor] = []
        """The tensors as the optimizer holds them, in the order of ``names``."""
        self.hosts: list[Tensor] = []
        """Their host copies."""
        self._seen: dict[Any, Any] | None = None
        """The state whose tensors these are, key by key, as it was when that was found."""

    @property
    def filled(self) -> bool:
        """True if there is anything to copy: states appear with the first update."""
        return bool(self.known)

    def refresh(self, state: dict[str, Any]) -> bool:
        """Adopt the tensors of ``state``, if they are not the known ones; return whether they lie in other memory."""
        if self.unchanged(state):
            return False
        tensors = _movable(state)
        assert self.group is not None
        assert self.group.buffer is None or not self.known, f"{self.label} was replaced while on the device"
        # What stays the same of the state may lie where something else of it is to go. In the middle of a backward, an
        # emulated device would count the clones as its own.
        with plain_torch():
            contents = [tensor.clone() if self.known else tensor for tensor in tensors.values()]
        self.group.about_to_write(self.hosts)
        self._adopt(tensors)
        for host, content in zip(self.hosts, contents, strict=True):
            host.copy_(content)
        self.leave()
        return True

    def unchanged(self, state: dict[str, Any]) -> bool:
        """Return whether the tensors of ``state`` are the known ones."""
        # Mostly it has the very objects that it had: each is asked for every weight of every step.
        seen = self._seen
        if seen is not None and state.keys() == seen.keys() and all(map(is_, state.values(), seen.values())):
            return True
        tensors = _movable(state)
        same = len(tensors) == len(self.known) and all(map(is_, map(tensors.get, self.names), self.known))
        self._seen = dict(state) if same and not any(map(kind_of, state.values())) else None
        return same

    def present(self, state: dict[str, Any]) -> bool:
        """Return whether the known tensors are in ``state``."""
        return all(map(is_, map(tensors_of(state).get, self.names), self.known))

    @override
    def _made_at(self, slab: Tensor, at: int) -> dict[Place, Tensor]:
        places = zip(self.names, self.hosts, _starts(self.hosts), strict=True)
        return {name: _view(slab, at + start, host) for name, host, start in places}

    def memory(self) -> Tensor:
        """Return the bytes of the arena that are kept for them."""
        assert self.group is not None and self.group.buffer is not None
        return self.group.buffer.bytes[self.start : self.start + self.room]

    def enter(self) -> None:
        """Let the optimizer see the device copies."""
        for tensor, view in zip(self.known, self.view.values(), strict=True):
            tensor.data = view

    def leave(self) -> None:
        """Let everybody see the host copies again."""
        for tensor, host in zip(self.known, self.hosts, strict=True):
            tensor.data = host

    def born(self, state: dict[str, Any]) -> None:
        """Take over what an update on the device, mostly the first, has put into ``state``: its home is the arena."""
        assert self.group is not None and self.group.buffer is not None
        self._adopt(_movable(state))
        self.view = self.view_at(self.group.buffer.slab, self.group.buffer.offset + self.start)
        pairs = zip(self.known, self.view.values(), strict=True)
        moved = [(tensor, view) for tensor, view in pairs if not _is_there(tensor, view)]
        # What lies in the arena already may be where another one goes: an optimizer makes its states in any order.
        with plain_torch():
            contents = [tensor.clone() for tensor, _ in moved]
        for content, (_, view) in zip(contents, moved, strict=True):
            view.copy_(content)
        self.leave()

    def _adopt(self, tensors: dict[str, Tensor]) -> None:
        """Make the host copies of ``tensors``, without their contents."""
        assert self.slot is not None
        needed = sum(round_up(tensor.nbytes, STATE_ALIGNMENT) for tensor in tensors.values())
        if needed > self.room:
            raise OverBudget(
                f"{self.label} takes {needed} bytes of the arena, and the plan has kept {self.room}: it has grown "
                "since it was measured; save a checkpoint at this size and go on from it, which plans anew"
            )
        self.names, self.known, self._seen = tuple(tensors), list(tensors.values()), None
        with plain_torch():
            places = zip(self.known, _starts(self.known), strict=True)
            self.hosts = [_laid_out(carve(self.slot, at, tensor), tensor) for tensor, at in places]
        # Those that were made for other states have other shapes, or lie elsewhere.
        self.views.clear()


class Sum(Whole):
    """The sum of one weight's gradients over the micro-batches of a window."""

    __slots__ = ("filled", "first", "group", "label", "norm", "parted", "places", "room", "weight")

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.label = weight.label.replace("weight", "sum", 1)
        self.weight, self.room = weight, weight.room
        self.group: LiveGroup
        self.places: tuple[Tensor, ...] = ()
        """The sums of every process, in the order of ranks, if all see them."""
        self.parted = False
        """True if each place has its process's gradients only: the owner's update adds them up."""
        self.first = False
        """True if the sum of all processes is in the first of ``places`` only."""
        self.norm: Tensor | None = None
        """Its Euclidean norm, found on the device where the sum was; None: it has to be read for that."""
        self.filled = False
        """There is a gradient in it; the first one of a window replaces what is there."""

    @property
    def hosts(self) -> tuple[Tensor, ...]:
        """None: no checkpoint holds sums."""
        return ()

    @property
    def elsewhere(self) -> bool:
        """True if its owner uses the first process's place, which is another one perhaps."""
        return self.parted or self.first

    def fill(self, norm: Tensor | None = None) -> None:
        """There is a gradient in it from now on, or when what has been queued is over; ``norm``: of what it is then."""
        self.filled, self.norm = True, norm

    def use_up(self) -> None:
        """Let the next gradient replace what is in it, which counts no more."""
        self.filled = self.parted = self.first = False
        self.norm = None


def add_in_order(places: Sequence[Tensor]) -> Tensor:
    """Add to the first of ``places``, which are alike, all others in their order, and return it.

    Piece by piece, so that what is added to remains in the processor's caches meanwhile.
    """
    pieces = [torch.split(place.view(-1), max(1, _PIECE_BYTES // place.element_size())) for place in places]
    for first, *more in zip(*pieces, strict=True):
        for piece in more:
            first.add_(piece)
    return places[0]


Member = Weight | States | Sum


def carve(memory: Tensor, at: int, like: Tensor) -> Tensor:
    """Return a host tensor with the shape and dtype of ``like`` at byte ``at`` of ``memory``.

    It has a storage of its own, unlike a view: saving it writes its bytes and no others. It keeps ``memory`` alive.
    """
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(memory.numpy(), dtype=like.dtype, count=like.numel(), offset=at)
    return flat.view(like.shape)


def _movable(state: dict[str, Any]) -> dict[Place, Tensor]:
    return {place: tensor for place, tensor in tensors_of(state).items() if tensor.numel() > 1}


def _is_there(tensor: Tensor, view: Tensor) -> bool:
    return tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride()


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor``, which is contiguous, in the order in which ``like`` has its elements, if that is without gaps.

    Products of matrices round differently where a matrix is transposed in memory.
    """
    if like.is_contiguous() or torch.empty_like(like, device="meta").stride() != like.stride():
        return tensor
    return tensor.as_strided(like.shape, like.stride(), tensor.storage_offset())


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + round_up(tensor.nbytes, STATE_ALIGNMENT))
    return starts[:-1]


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    nbytes = math.prod(like.shape) * like.dtype.itemsize
    with torch.inference_mode(False):
        # Kept for training, whichever mode it is made in: a tensor that is made in inference mode may not be written to
        # later.
        return _laid_out(memory[start : start + nbytes].view(like.dtype).view(like.shape), like)
