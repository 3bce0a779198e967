"""The contexts around a call of a block: a second run of it, perhaps on another thread, has to see the same.

Autocast, the default dtype and device, and what torch lets choose kernels by. Modes of users are only named: entering
them again would call the user's code more often than plain PyTorch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lt_offload.errors import UnsupportedError

_torch: Any = torch._C
_LIBRARIES = ("torch", "lt_offload")
"""Whose modes count, or watch, and change no number."""


class Ambient(NamedTuple):
    """The contexts around a call."""

    casts: tuple[tuple[str, bool, torch.dtype], ...]
    """Autocast per kind of device: whether it is on, and its dtype."""
    caches_casts: bool
    """Whether autocast casts a weight once, however often it is used: its gradients are then added up in the low
    precision, so that this is a matter of bits."""
    switches: tuple[Any, ...]
    """What torch chooses kernels by, in the order of ``_SWITCHES``."""
    device: torch.device | None
    """Where tensors are made unless they say otherwise; None: on the host."""
    modes: tuple[str, ...]
    """Function and dispatch modes of users."""

    @property
    def autocasts(self) -> bool:
        """Whether operations choose their own precision."""
        return any(enabled for _, enabled, _ in self.casts)


def ambient() -> Ambient:
    """Return the contexts of this moment."""
    device, modes = None, []
    if _torch._len_torch_function_stack():
        for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            if isinstance(mode, DeviceContext):
                device = mode.device
            else:
                modes.append(mode)
    if _torch._len_torch_dispatch_stack():
        modes += _get_current_dispatch_mode_stack()
    return Ambient(
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
        tuple([read() for read, _ in _SWITCHES]),
        device,
        tuple(type(mode).__qualname__ for mode in modes if type(mode).__module__.partition(".")[0] not in _LIBRARIES),
    )


@contextmanager
def within(contexts: Ambient) -> Iterator[None]:
    """Enclose a run of a block that shall see ``contexts``, the modes of users apart.

    Autocast keeps the casts of weights that it has made, until its outermost context ends. Here they end with the run:
    they are device memory that no plan knows, and weights change.
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
        if contexts.device != present.device:
            stack.enter_context(torch.device(contexts.device or "cpu"))
        if contexts.autocasts:
            stack.callback(torch.clear_autocast_cache)
        yield


def _precision() -> str | tuple[str, ...]:
    """Return how precise products of float32 are: in torch's old words, or in its new ones where those were used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer in the old words
        pairs = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]
        return tuple(_torch._get_fp32_precision_getter(*pair) for pair in pairs)


def _set_precision(value: str | tuple[str, ...]) -> None:
    if isinstance(value, tuple) or isinstance(_precision(), tuple):
        # What a precision inherits cannot be told from what was set, so that nothing could be put back afterwards.
        raise UnsupportedError(
            "torch.backends' fp32_precision was changed between the forward of a block and its backward, which runs "
            "that forward again; set it for forward and backward alike, or use torch.set_float32_matmul_precision"
        )
    torch.set_float32_matmul_precision(value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _reduction(write: Callable[[bool, bool], None]) -> Callable[[tuple[bool, bool]], None]:
    return lambda value: write(*value)


_CUDA, _MKLDNN, _CUDNN = torch.backends.cuda, torch.backends.mkldnn, torch.backends.cudnn
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_torch._get_flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_torch._get_mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_torch._get_math_sdp_enabled, _CUDA.enable_math_sdp),
    (_torch._get_cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    (_torch._get_math_sdp_allow_fp16_bf16_reduction, _CUDA.allow_fp16_bf16_reduction_math_sdp),
    (_precision, _set_precision),
    (_deterministic, _set_deterministic),
    (_torch._get_mkldnn_enabled, partial(setattr, _MKLDNN, "enabled")),
    (_torch._get_mkldnn_deterministic, partial(setattr, _MKLDNN, "deterministic")),
    (_torch._get_cudnn_enabled, partial(setattr, _CUDNN, "enabled")),
    (_torch._get_cudnn_deterministic, partial(setattr, _CUDNN, "deterministic")),
    (_torch._get_cudnn_benchmark, partial(setattr, _CUDNN, "benchmark")),
    (
        _torch._get_cublas_allow_fp16_reduced_precision_reduction,
        _reduction(_torch._set_cublas_allow_fp16_reduced_precision_reduction),
    ),
    (
        _torch._get_cublas_allow_bf16_reduced_precision_reduction,
        _reduction(_torch._set_cublas_allow_bf16_reduced_precision_reduction),
    ),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
)
"""What torch chooses kernels by: how it is read, and how it is set."""
