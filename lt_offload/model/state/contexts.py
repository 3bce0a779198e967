"""The contexts around a call of a block: a second run of it, perhaps on another thread, has to see the same.

Autocast, the default dtype and device, and what torch lets choose kernels by. Modes of users are only named: entering
them again would call the user's code more often than plain PyTorch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from lt_offload.compat.torch import (
    KERNEL_SWITCHES,
    DeviceContext,
    all_dispatch_modes,
    all_function_modes,
    dispatch_modes,
    fp32_precision,
    function_modes,
    parametrized,
    set_parametrized,
)
from lt_offload.errors import UnsupportedError

_LIBRARIES = ("torch", "lt_offload")
"""Packages whose modes count, or watch, and change no number."""


class Ambient(NamedTuple):
    """The contexts around a call."""

    casts: tuple[tuple[str, bool, torch.dtype], tuple[str, bool, torch.dtype]]
    """Autocast on the host and on CUDA: whether it is on, and its dtype."""
    caches_casts: bool
    """True if autocast casts a weight once, however often it is used: its gradients are then added up in the low
    precision, so that this is a matter of bits."""
    parametrized: int
    """Number of ``parametrize.cached()``: a parametrized weight is made once, however often it is used."""
    switches: tuple[Any, ...]
    """Settings that torch chooses kernels by, in the order of ``_SWITCHES``."""
    device: torch.device | None
    """Device on which tensors are made unless they say otherwise; None: the host."""
    modes: tuple[str, ...]
    """Function and dispatch modes of users."""

    @property
    def autocasts(self) -> bool:
        """True if operations choose their own precision."""
        return self.casts[0][1] or self.casts[1][1]

    @property
    def keeps(self) -> bool:
        """True if what is made of a weight is kept until its context ends."""
        return self.autocasts or self.parametrized > 0


def ambient() -> Ambient:
    """Return the contexts of this moment."""
    device, modes = None, []
    # Counting is cheap, listing is not, and this is asked at every call of a block.
    if function_modes():
        for mode in all_function_modes():
            if isinstance(mode, DeviceContext):
                device = mode.device
            else:
                modes.append(mode)
    if dispatch_modes():
        modes += all_dispatch_modes()
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    names = [type(m).__qualname__ for m in modes if type(m).__module__.partition(".")[0] not in _LIBRARIES]
    return Ambient(
        (("cpu", enabled("cpu"), dtype("cpu")), ("cuda", enabled("cuda"), dtype("cuda"))),
        torch.is_autocast_cache_enabled(),
        parametrized()[0],
        (*[read() for read, _ in _SWITCHES],),
        device,
        (*names,),
    )


@contextmanager
def within(contexts: Ambient) -> Iterator[None]:
    """Enclose a run of a block that shall see ``contexts``, the modes of users apart.

    What contexts keep ends with the run (:func:`alone`).
    """
    present = ambient()
    with ExitStack() as stack:
        for cast in contexts.casts:
            kind, enabled, dtype = cast
            if enabled or cast not in present.casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=contexts.caches_casts))
        if contexts.switches != present.switches:
            for (_, write), now, value in zip(_SWITCHES, present.switches, contexts.switches, strict=True):
                if value != now:
                    stack.callback(write, now)
                    write(value)
        # Entered also where the first run had none: a context that is around now cannot be left from within.
        if contexts.device != present.device:
            stack.enter_context(torch.device(contexts.device or "cpu"))
        stack.enter_context(alone(contexts))
        yield


@contextmanager
def alone(contexts: Ambient) -> Iterator[None]:
    """Enclose a run that finds nothing which ``contexts`` keep of another one, and leaves nothing.

    Autocast keeps the casts of weights until its outermost context ends, ``parametrize.cached()`` the weights that it
    has made. They are device memory that no plan knows, weights change, and those of a run without a graph have none.
    """
    before = parametrized()
    if contexts.autocasts:
        torch.clear_autocast_cache()
    set_parametrized(contexts.parametrized, {})
    try:
        yield
    finally:
        set_parametrized(*before)
        if contexts.autocasts:
            torch.clear_autocast_cache()


def _precision() -> str | tuple[str, ...]:
    """Return how precise products of float32 are: in torch's old words, or in its new ones where those were used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer in the old words
        pairs = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]
        return tuple(fp32_precision(*pair) for pair in pairs)


def _set_precision(value: str | tuple[str, ...]) -> None:
    if isinstance(value, tuple) or isinstance(_precision(), tuple):
        # What a precision inherits cannot be told from what was set, so that nothing could be put back afterwards.
        raise UnsupportedError(
            "torch.backends' fp32_precision was changed between the forward of a block and its backward, which runs "
            "that forward again; set it for forward and backward alike, or use torch.set_float32_matmul_precision"
        )
    torch.set_float32_matmul_precision(value)


_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    *KERNEL_SWITCHES,
    (_precision, _set_precision),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
)
"""Settings that torch chooses kernels by: how each is read, and how it is set."""
