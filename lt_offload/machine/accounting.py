"""An exact account of the bytes of tensors, where no device allocator keeps one: storages are charged until they die.

Memory that a kernel allocates for itself and does not return cannot be seen from here; of some it is known.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self

import torch

from lt_offload.compat.torch import address_of, rows_of_sparse, schema_of
from lt_offload.errors import OverBudget
from lt_offload.machine.dispatch import OperationMode, called_with_care, needs_care, show_buffers
from lt_offload.units import format_bytes

Workspace = Callable[[tuple[Any, ...], dict[str, Any]], int]
"""Bytes that a call with these arguments takes beside its result, until it returns: a dispatch mode sees what is given
and returned, and not what a kernel of several stages makes in between."""


def _unpacked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of a weight of four bits as it is multiplied, and of its scales, if they are packed, too.

    Kernels for a few rows multiply packed numbers, on some GPUs; for more rows all unpack the weight first.
    """
    activations, _, shape, _, block = args[:5]
    packed_scales = args[7] if len(args) > 7 else kwargs.get("absmax_8bit")
    numbers = int(torch.Size(shape).numel())
    scales = 0 if packed_scales is None else 2 * torch.float32.itemsize * -(-numbers // int(block))
    return numbers * int(activations.element_size()) + scales


_WORKSPACES: dict[str, Workspace] = {"bitsandbytes::gemm_4bit": _unpacked}


def workspace(func: Any) -> Workspace | None:
    """Return what tells the workspace of the operation ``func``; None if it has none that is known."""
    return _WORKSPACES.get(schema_of(func).name)


_MAKES: dict[int, tuple[bool, Any, Workspace | None]] = {}
"""By the identity of an operation: whether its results may have storages of their own, the operation (held, so that it
lives) and its workspace. An operation's own hash would run Python code at every look-up."""


class _Charge(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key", "nbytes", "serial")
    key: int
    nbytes: int
    serial: int


class Account(OperationMode):
    """Within the context, storages that operations create are charged; their death discharges them, even after it.

    Views and in-place results share a storage that exists, so they cost nothing. Storages may die on any thread, in the
    middle of a garbage collection, perhaps inside a locked section of this very thread: their death only appends to a
    queue, which the next charge or reading empties. It runs no code in Python, which would lose a Ctrl-C that comes
    meanwhile.

    A charge beyond ``limit`` bytes raises ``OverBudget``, whose error names the memory (``what``) and the way out
    (``hint``). With a ``device_type`` only tensors there are charged. A ``timeline`` is for :meth:`peak_without`.
    """

    def __init__(
        self,
        *,
        limit: int | None = None,
        device_type: str | None = None,
        timeline: bool = False,
        what: str = "device memory",
        hint: str = "",
    ) -> None:
        super().__init__()
        self.limit = limit
        self._what, self._hint = what, f"; {hint}" if hint else ""
        self._device_type = device_type
        self._live: dict[int, _Charge] = {}
        self._dead: deque[_Charge] = deque()
        self._lock = threading.Lock()
        self._current = 0
        self.peak = 0
        """High-water mark of ``current`` since ``reset_peak``."""
        self._serial = 0
        self._timeline: list[tuple[int, int]] | None = [] if timeline else None
        self._hide: list[Callable[[], None]] = []

    @property
    def current(self) -> int:
        """Bytes in use."""
        with self._lock:
            self._take_off_dead()
            return self._current

    def reset_peak(self) -> None:
        """Restart the high-water mark (and the timeline) at what is in use now."""
        with self._lock:
            self._take_off_dead()
            self.peak = self._current
            if self._timeline is not None:
                self._timeline = [(charge.serial, charge.nbytes) for charge in self._live.values()]

    def charge(self, *tensors: torch.Tensor) -> None:
        """Charge tensors that exist already and stay as long as they live."""
        for tensor in tensors_in(tensors):
            self._charge(tensor.untyped_storage(), free=False, cause=tensor)

    def serial(self, tensor: torch.Tensor) -> int | None:
        """Return the identity of the tensor's storage in the timeline; None if it is not under account."""
        charge = self._charge_of(tensor.untyped_storage())
        return None if charge is None else charge.serial

    def live(self) -> dict[int, int]:
        """Return the bytes of every storage under account by its serial."""
        with self._lock:
            self._take_off_dead()
            return {charge.serial: charge.nbytes for charge in self._live.values()}

    def peak_without(self, serials: Iterable[int]) -> int:
        """Return the peak since ``reset_peak`` as it would be without the storages ``serials``."""
        left_out = frozenset(serials)
        return self._peak_of(lambda serial, change: serial not in left_out)

    def peak_holding(self, serials: Iterable[int]) -> int:
        """Return the peak since ``reset_peak`` as it would be if the storages ``serials`` were never given back."""
        staying = frozenset(serials)
        return self._peak_of(lambda serial, change: change > 0 or serial not in staying)

    def _peak_of(self, counts: Callable[[int, int], bool]) -> int:
        assert self._timeline is not None, "made without a timeline"
        with self._lock:
            self._take_off_dead()
            current = peak = 0
            for serial, change in self._timeline:
                if counts(serial, change):
                    current += change
                    peak = max(peak, current)
            return peak

    def __enter__(self) -> Self:
        super().__enter__()
        # A stack, as an account may be entered again while it is in place.
        self._hide.append(show_buffers())
        return self

    def __exit__(self, *error: Any) -> None:
        self._hide.pop()()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation and charge its results."""
        known = _MAKES.get(id(func))
        if known is None:
            makes = any(result.alias_info is None for result in schema_of(func).returns)
            known = _MAKES[id(func)] = makes, func, workspace(func)
        run = partial(called_with_care, func) if needs_care(func) else func
        out = run(*args, **kwargs) if kwargs else run(*args)
        if known[0]:
            # Nearly every result: it is spared the generator, on the path of every operation.
            plain = type(out) is torch.Tensor and out.layout is torch.strided
            for tensor in (out,) if plain else tensors_in(out):
                storage = tensor.untyped_storage()
                if self._charge_of(storage) is None and self._device_type in (None, tensor.device.type):
                    self._meet(storage, func, _operands(args, kwargs))
                    if known[2] is not None:
                        self._pass(known[2](args, kwargs or {}), func)
        return out

    def _meet(self, storage: torch.UntypedStorage, func: Any, operands: list[torch.Tensor]) -> None:
        """Charge a storage that an operation on ``operands`` has returned, unless it is theirs (a view)."""
        key, free = address_of(storage), False
        for tensor in operands:
            if address_of(tensor.untyped_storage()) == key:
                free = True
                break
        self._charge(storage, free=free, cause=func)

    def _pass(self, nbytes: int, func: Any) -> None:
        """Charge and discharge what an operation has taken beside its result until it returned."""
        with self._lock:
            self._check(nbytes, func)
            self.peak = max(self.peak, self._current + nbytes)
            if self._timeline is not None:
                self._timeline += [(self._serial, nbytes), (self._serial, -nbytes)]
                self._serial += 1

    def _check(self, nbytes: int, cause: object) -> None:
        if self.limit is not None and self._current + nbytes > self.limit:
            what = f"a tensor of shape {tuple(cause.shape)}" if isinstance(cause, torch.Tensor) else cause
            raise OverBudget(
                f"{what} needs {format_bytes(nbytes)} ({nbytes} bytes) of {self._what}, but "
                f"{format_bytes(self._current)} of {format_bytes(self.limit)} ({self.limit} bytes) are in use"
                + self._hint
            )

    def _charge(self, storage: torch.UntypedStorage, *, free: bool, cause: object) -> None:
        key = address_of(storage)
        with self._lock:
            self._take_off_dead()
            if key in self._live:
                return
            nbytes = 0 if free else storage.nbytes()
            self._check(nbytes, cause)
            charge = _Charge(storage, self._dead.append)
            charge.key, charge.nbytes, charge.serial = key, nbytes, self._serial
            self._serial += 1
            self._live[key] = charge
            self._current += nbytes
            if self._current > self.peak:
                self.peak = self._current
            if self._timeline is not None and nbytes:
                self._timeline.append((charge.serial, nbytes))

    def _charge_of(self, storage: torch.UntypedStorage) -> _Charge | None:
        # The address of a storage is its own only while it lives: those that have died go first.
        if self._dead:
            with self._lock:
                self._take_off_dead()
        return self._live.get(address_of(storage))

    def _take_off_dead(self) -> None:
        """Take the storages that have died off the sums; the caller holds the lock."""
        while self._dead:
            charge = self._dead.popleft()
            del self._live[charge.key]
            self._current -= charge.nbytes
            if self._timeline is not None and charge.nbytes:
                self._timeline.append((charge.serial, -charge.nbytes))


def _operands(args: tuple[Any, ...], kwargs: Any) -> list[torch.Tensor]:
    tensors = []
    for value in args:
        if type(value) is torch.Tensor and value.layout is torch.strided:
            tensors.append(value)
        elif isinstance(value, (torch.Tensor, tuple, list, dict)):
            tensors += tensors_in(value)
    return tensors + list(tensors_in(kwargs)) if kwargs else tensors


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors in arguments or results of an operation, and those that sparse ones consist of."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
        elif value.layout in _PARTS:
            yield from (part(value) for part in _PARTS[value.layout])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages of ``tensors``."""
    storages = (part.untyped_storage() for part in tensors_in(list(tensors)))
    return sum({address_of(storage): storage.nbytes() for storage in storages}.values())


_ROWS = (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
_COLUMNS = (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values)
_PARTS: dict[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    torch.sparse_coo: rows_of_sparse,
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
