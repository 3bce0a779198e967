"""Zero copy: page-locked host memory as a CUDA tensor, which kernels reach over the link without any copy.

Such a tensor costs no device memory, is not tracked by torch's allocator, and is valid as long as its memory stays
page-locked. Its storage keeps the host tensor alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lt_offload.errors import UnsupportedError


def zero_copy_view(host: Tensor, device: torch.device) -> Tensor:
    """Return the memory of ``host`` as a tensor on ``device``; ``UnsupportedError`` if the driver does not map it."""
    if not host.is_contiguous():
        raise UnsupportedError("a tensor that is not contiguous cannot be read in host memory; call .contiguous()")
    if host.numel() == 0:
        return torch.empty(host.shape, dtype=host.dtype, device=device)
    pointer = _device_pointer(host.data_ptr())
    seen: Tensor = torch.as_tensor(_Memory(host, pointer), device=device)
    # A silent copy would take device memory, and show nothing that the host writes later.
    if seen.data_ptr() != pointer:
        raise UnsupportedError("torch copied the memory instead of using it where it is")
    return seen.view(host.dtype).view(host.shape)


@contextmanager
def locked(host: Tensor) -> Iterator[Tensor]:
    """Page-lock the memory of ``host`` within the context; raises ``UnsupportedError`` where that is not allowed."""
    code = register(host.data_ptr(), host.nbytes)
    if code != 0:
        raise UnsupportedError(f"memory cannot be page-locked (error {code}); see `ulimit -l`")
    try:
        yield host
    finally:
        # Copies and kernels that still use the memory have to end before it is unlocked.
        torch.cuda.synchronize()
        unregister(host.data_ptr())


@contextmanager
def zero_copy_of(tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Have a copy of ``tensor`` in host memory, as ``device`` sees it, within the context."""
    with locked(tensor.detach().to("cpu", copy=True)) as host:
        yield zero_copy_view(host, device)


def register(address: int, nbytes: int) -> int:
    """Page-lock host memory and map it; return 0 or an error code."""
    # ``cudaHostRegisterPortable`` and ``cudaHostRegisterMapped``.
    for_all_devices, mapped = 1, 2
    code = int(_cudart().cudaHostRegister(address, nbytes, for_all_devices | mapped))
    if code != 0:
        # CUDA keeps the error and reports it at the next launch, whosever that is: let it be one that does not matter.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return code


def unregister(address: int) -> int:
    """Undo :func:`register`; return 0 or an error code."""
    return int(_cudart().cudaHostUnregister(address))


def refusal(view_of: Callable[[Tensor], Tensor], probe: Tensor, synchronize: Callable[[], object]) -> str:
    """Return why ``view_of`` gives no tensor of ``probe``, page-locked integers, to read and write; "" if it does."""
    expected = torch.arange(probe.numel(), dtype=probe.dtype)
    probe.copy_(expected)
    try:
        seen = view_of(probe)
        if not torch.equal((seen * 3).cpu(), expected * 3):
            return "kernels read something else there than the host has written"
        seen.copy_(seen * 5)
        synchronize()
        if not torch.equal(probe, expected * 5):
            return "the host reads something else there than kernels have written"
        for dtype in (torch.float32, torch.bfloat16):
            with torch.cuda.stream(torch.cuda.Stream(seen.device)) if seen.is_cuda else nullcontext():  # type: ignore[no-untyped-call]
                reason = _wrong_kernel(view_of, probe.view(dtype).view(-1, 8), synchronize)
            if reason:
                return f"{reason} ({str(dtype).removeprefix('torch.')})"
    except (UnsupportedError, RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return ""


def _wrong_kernel(view_of: Callable[[Tensor], Tensor], host: Tensor, synchronize: Callable[[], object]) -> str:
    """Return which kernel that blocks run on weights and gradients is wrong on rows of ``host``; empty if none is."""
    written = (torch.arange(host.numel()) % 113 / 7).view_as(host).to(host.dtype)
    host.copy_(written)
    seen = view_of(host)
    # Nothing here copies pageable memory: torch hands streams out in turn, so this may be one that has to run ahead.
    near = torch.empty_like(seen).copy_(host)
    rows = torch.arange(len(host), device=seen.device).flip(0)
    kernels: dict[str, Callable[[Tensor], Tensor]] = {
        "an embedding": lambda table: F.embedding(rows, table),
        "a layer norm": lambda table: F.layer_norm(near, near.shape[-1:], table[1], table[2]),
        "an RMS norm": lambda table: F.rms_norm(near, near.shape[-1:], table[1]),
        "a copy": lambda table: torch.empty_like(near).copy_(table),
    }
    for name, kernel in kernels.items():
        if not torch.equal(kernel(seen), kernel(near)):
            return f"{name} reads something else there than the host has written"
    seen.copy_(near * 2)
    synchronize()
    return "" if torch.equal(host, written * 2) else "what is copied there does not arrive"


class _Memory:
    """Host memory as :func:`torch.as_tensor` takes it, kept alive; bytes, for want of a bfloat16."""

    def __init__(self, host: Tensor, pointer: int) -> None:
        self.host = host
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


def _device_pointer(address: int) -> int:
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")  # which torch has loaded
    except OSError as error:
        raise UnsupportedError(f"the CUDA runtime cannot be asked for addresses ({error})") from error
    pointer = ctypes.c_void_p()
    code = runtime.cudaHostGetDevicePointer(ctypes.byref(pointer), ctypes.c_void_p(address), 0)
    if code != 0 or not pointer.value:
        runtime.cudaGetLastError()  # or torch would report it at its next launch
        raise UnsupportedError(f"the memory is not page-locked, or the driver does not map it (error {code})")
    return pointer.value


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
