"""Rules about what a block saves for its backward, for the code that measures and the code that trains.

The activation options:

``keep``
    saved tensors stay on the device.
``recompute``
    only the block's input stays; the block runs again in the backward.
``offload``
    every saved tensor that :func:`travels` goes to the host and comes back, the input among them.
``mixed``
    the input and the results of costly operations (:func:`is_costly`) travel, the rest is recomputed from them.
``reload``
    only the block's input is saved, and it travels; the block runs again in the backward.
``discard``
    nothing is saved; the plan says from which earlier block on the forwards are recomputed. For blocks that are
    ``chained``.
``fused``
    for the output projection: the block is projection and loss, and treats a few tokens at a time (``head.py``). Logits
    stay, once; the same numbers.
``chunked``
    the same with a projection of a few tokens at a time, so that all logits never exist. The forward makes all
    gradients, which stay until the backward: another order of summation in that of its weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_offload.compat.torch import ATTENTIONS, DisableTorchDispatch, schema_of
from lt_offload.machine.accounting import tensors_in
from lt_offload.machine.dispatch import OperationMode

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default})
# By name: the operation is there only once bitsandbytes has been imported, and it need not be.
_OTHER_PRODUCTS = frozenset({"bitsandbytes::gemm_4bit"})
_LOW_RANK, _WIDER = 256, 8
"""A product of two matrices whose inner dimension is at most so large, and its result so many times as wide, is
computed again: an element takes 2 FLOP per rank, no longer than a cheap operation takes to read and write it. It is the
second one of an adapter (LoRA's B): of a layer with an adapter only the result of the frozen weight is kept so wide."""


_in_tiles: ContextVar[bool] = ContextVar("lt_offload_in_tiles", default=False)


@contextmanager
def run_in_tiles() -> Iterator[None]:
    """Let ``mixed`` keep no result of what runs for a tile of tokens: its backward runs it again anyway."""
    before = _in_tiles.set(True)
    try:
        yield
    finally:
        _in_tiles.reset(before)


def in_tiles() -> bool:
    """Return whether what runs now runs for a tile."""
    return _in_tiles.get()


def is_costly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``mixed`` keeps the result of this operation instead of computing it again.

    None of them writes in place or returns a view of its arguments: a caller in C++ ignores what such an operation
    returns, so that a cached result would not reach it. And none draws random numbers: with some draws cached and
    others repeated, the repeated ones would come from another point of the generator's stream.
    """
    if func in _PRODUCTS:
        if func is _aten.bmm.default:
            return True
        inner, width = args[-1].shape[-2:]
        return not (inner <= _LOW_RANK and _WIDER * inner <= width)
    if schema_of(func).name in _OTHER_PRODUCTS:
        return True
    if func not in ATTENTIONS:
        return False
    arguments, at = schema_of(func).arguments, _position(func, "dropout_p")
    draws = args[at] if at < len(args) else kwargs.get("dropout_p", arguments[at].default_value)
    return not draws


def for_replay(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` so that the result is fit for a backward, although autograd does not record this run of ``func``.

    Some attention kernels compute the log-sum-exp that their backward needs only if a gradient is expected.
    """
    position = _position(func, "compute_log_sumexp") if func in ATTENTIONS else -1
    return args if position < 0 else (*args[:position], True, *args[position + 1 :])


def _position(func: Any, name: str) -> int:
    """Return the position of an argument of an operation; -1 if it has none of that ``name``."""
    return next((at for at, argument in enumerate(schema_of(func).arguments) if argument.name == name), -1)


def travels(tensor: Tensor) -> bool:
    """Return whether a saved tensor goes to the host under ``offload``; masks and single numbers stay.

    A limit in bytes would keep more of a batch that is smaller than the planned one.
    """
    strided = tensor.is_floating_point() and tensor.layout is torch.strided
    return strided and tensor.untyped_storage().nbytes() > tensor.itemsize


def activations_of(leaves: Sequence[Any], positional: int) -> tuple[int, ...]:
    """Return which arguments of a block are passed on from block to block, unlike masks and tables that all share.

    They are the tensors that require gradients, and floating-point ones among the positional arguments. Of a call by
    keywords only that has neither, as a frozen block's may be, it is the first floating-point tensor.
    """
    tensors = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    positions = [at for at, leaf in tensors if leaf.requires_grad or (at < positional and leaf.is_floating_point())]
    if not positions and all(at >= positional for at, _ in tensors):
        positions = [at for at, leaf in tensors if leaf.is_floating_point()][:1]
    return tuple(positions)


class CacheCostly(OperationMode):
    """Runs a forward and keeps what ``keep`` makes of the results of its costly operations (option ``mixed``)."""

    beside_compiled = False

    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        self._keep = keep
        self.results: deque[tuple[Any, Any]] = deque()
        """Operations and what is kept of their results, in the order of the calls."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _in_tiles.get() or not is_costly(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        # This run records no graph, but what it returns is given to the second run, which does.
        out = func(*for_replay(func, args), **(kwargs or {}))
        self.results.append((func, _mapped(out, self._keep)))
        return out


class ReplayCostly(OperationMode):
    """Repeats a forward, but takes the results of its costly operations from the cache instead of computing them.

    ``give`` returns a leaf of a result from what is kept of it; nothing is kept longer than until then. Where the two
    runs do not call the same costly operations, ``refuse`` makes an error of a sentence.
    """

    beside_compiled = False

    def __init__(self, cache: CacheCostly, give: Callable[[Any], Any], refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._results, self._give, self._refuse = cache.results, give, refuse

    @override
    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        # After an error results are left over because of it, and it is what has to be seen.
        if kind is None and self._results:
            unused, _ = self._results[0]
            raise self._refuse(f"the second run of a block did not call {unused}, as the first had")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _in_tiles.get() or not is_costly(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        # By position: two calls of one operation with other arguments cannot be told apart by anything cheaper.
        cached, out = self._results.popleft() if self._results else (None, None)
        if cached is not func:
            called = f"where the first had called {cached}" if cached is not None else "which the first had not"
            raise self._refuse(f"the second run of a block called {func}, {called}")
        return _mapped(out, self._give)


def _mapped(out: Any, apply: Callable[[Any], Any]) -> Any:
    return type(out)(_mapped(item, apply) for item in out) if isinstance(out, (tuple, list)) else apply(out)


class SparseParts:
    """A saved sparse tensor: its indices and values, each saved as a tensor of its own."""

    def __init__(self, tensor: Tensor, pack: Callable[[Tensor], Any]) -> None:
        with DisableTorchDispatch():  # views: no mode has to see them
            self._parts = [pack(part.detach()) for part in tensors_in(tensor)]
        self._shape, self._layout = tensor.shape, tensor.layout
        # Noted, as a tensor that is made of indices and values counts as not coalesced.
        self._sorted = self._layout is torch.sparse_coo and tensor.is_coalesced()

    def unpack(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Return a tensor like the one that was saved, of parts as ``unpack`` returns them."""
        parts = [unpack(part) for part in self._parts]
        if self._layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(
                parts[0], parts[1], self._shape, is_coalesced=self._sorted, check_invariants=False
            )
        first, second, values = parts
        return torch.sparse_compressed_tensor(
            first, second, values, self._shape, layout=self._layout, check_invariants=False
        )
