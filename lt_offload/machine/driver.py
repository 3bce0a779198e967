"""Device memory as the driver counts it, and how torch's allocator is set up to get it.

A process occupies more of a GPU than its tensors: the context with every kernel that was ever loaded, what libraries
take by themselves, and in torch's allocator the workspaces of cuBLAS (one per thread and stream, so two in training:
the backward has a thread of its own) as well as what its rounding and its free pieces waste.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import pynvml
import torch

from lt_offload.compat.torch import clear_cublas_workspaces, set_allocator, sleep_on_device
from lt_offload.errors import ConfigError
from lt_offload.machine.pinning import is_wsl2

CONTEXT_LIMIT = 1 << 30
"""If the driver does not tell processes apart, at most this much beside torch's memory is taken for this process's."""

PAGE_TABLE_SHARE = 512
"""The device holds page tables of page-locked host memory: 8 bytes for every 4 KiB, one byte in so many."""

_TRIAL_BYTES = 1 << 20
_TRIAL_CYCLES = 1 << 20
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


def use_expandable_segments(device: torch.device) -> bool:
    """Let torch's allocator give back single pages; return whether it does now.

    With segments of fixed size, memory in the gaps between tensors is lost until everything around them is free, and
    tensors beyond 10 MiB are rounded up to 2 MiB. Here gaps are unmapped and mapped elsewhere when the cap is near.
    Settings of the user's own are left alone. The choice holds for what is allocated from now on, so it may
    come after CUDA has been initialised. Some drivers (of virtual GPUs, for example) refuse to map memory page by page,
    and say so only when they are asked to: then segments keep their fixed size.
    """
    configured = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" in configured or "backend:cudaMallocAsync" in configured:
        return "expandable_segments:true" in configured.lower().replace(" ", "")
    if is_wsl2():
        return False  # which does not map device memory page by page
    # What is not named goes back to its default.
    settings = [configured] if configured else []
    try:
        set_allocator(",".join([*settings, "expandable_segments:True"]))
        _try_allocator(device)
    except torch.OutOfMemoryError:
        return True  # the card is full: who asks for memory next is told so
    except (RuntimeError, ValueError) as error:
        _log.info("torch's allocator keeps segments of fixed size: %s", str(error).partition("\n")[0])
        set_allocator(",".join([*settings, "expandable_segments:False"]))
        return False
    return True


def _try_allocator(device: torch.device) -> None:
    """Let the driver give torch a segment: on a stream of its own, for which no memory can be left over."""
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()


def find_device(device: torch.device | str | None, *, setting: str = "device") -> torch.device:
    """Return where blocks run.

    ``device`` is ``"auto"`` or None (a GPU if there is one), ``"cuda"`` (the current GPU), ``"cuda:1"`` or ``"cpu"``
    (the emulated device). Raises ``ConfigError``, which names ``setting``, if there is no such device here.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    automatic = "cuda" if count else "cpu"
    name, colon, number = (automatic if device in (None, "auto") else str(device)).partition(":")
    if name == "cpu" and not colon:
        return torch.device("cpu")
    named = f"{setting}={str(device)!r}"
    if name != "cuda" or (colon and not number.isdigit()):
        raise ConfigError(f"{named} is not known; 'auto', 'cuda', 'cuda:1' and 'cpu' are")
    if count == 0:
        raise ConfigError(
            f"{named}: torch finds no GPU here; {setting}='cpu' carries the same plan out on the emulated device"
        )
    index = int(number) if number else torch.cuda.current_device()
    if index >= count:
        raise ConfigError(f"{named}: torch finds {count} GPU{'s' * (count > 1)}, the first is cuda:0")
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Within the context, ``device`` is CUDA's current one: what names no GPU (registering memory) happens there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def warm_up(device: torch.device) -> None:
    """Load what training loads anyway, on this thread and on the one of the backward: libraries and workspaces."""
    for dtype in (torch.float32, torch.bfloat16):
        with torch.enable_grad(), torch.inference_mode(False), torch.autocast(device.type, enabled=False):
            x = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
            bias = torch.ones(64, dtype=dtype, device=device, requires_grad=True)
            y = torch.nn.functional.linear(x @ x, x, bias)
            heads = y.view(1, 4, 16, 64)
            attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            torch.autograd.grad(attended.sum(), [x, bias])
    torch.cuda.synchronize(device)


def in_what_room(measure: Callable[[int], _Result], most: int, *, least: int) -> _Result:
    """Return ``measure(most)``, or of a half, a quarter and so on, down to ``least``, as a device has memory for it."""
    size = most
    while True:
        try:
            return measure(size)
        except torch.OutOfMemoryError:
            if size // 2 < least:
                raise
        # Not within the handler: the error's frames hold what there was room for.
        clear_cublas_workspaces()
        size //= 2


def occupy(device: torch.device, seconds: float) -> None:
    """Keep the current stream of a CUDA ``device`` busy with nothing for about ``seconds``: the host gets ahead."""
    if sleep_on_device is not None:
        with torch.cuda.device(device):
            sleep_on_device(int(seconds * _cycles_per_s(device)))


@functools.cache
def _cycles_per_s(device: torch.device) -> float:
    """Return the rate of a CUDA ``device``'s clock, about: it changes with load."""
    assert sleep_on_device is not None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    with torch.cuda.device(device):
        sleep_on_device(1)  # loads the kernel
        begin.record(stream)
        sleep_on_device(_TRIAL_CYCLES)
        end.record(stream)
    end.synchronize()
    elapsed = begin.elapsed_time(end) / 1e3
    return _TRIAL_CYCLES / elapsed if elapsed > 0 else 0.0


def context_bytes(device: torch.device) -> int:
    """Return the device memory of this process before the first tensor: beside torch's allocator, and workspaces."""
    return beside_bytes(device)[0] + workspace_bytes(device)


def beside_bytes(device: torch.device) -> tuple[int, bool]:
    """Return the device memory of this process beside torch's allocator, and whether the driver says so itself.

    It may not know processes apart (in containers, for example). Then what others occupy is included, up to
    :data:`CONTEXT_LIMIT` in all. Nothing is waited for: memory is taken and given back by the host.
    """
    reserved = torch.cuda.memory_reserved(device)
    mine = _process_bytes(device)
    if mine is not None and mine >= reserved:
        return mine - reserved, True
    free, total = torch.cuda.mem_get_info(device)
    return max(0, min(total - free - reserved, CONTEXT_LIMIT)), False


def page_table_bytes(locked_bytes: int) -> int:
    """Return the device memory that the driver takes so that the device can reach page-locked host memory."""
    return -(-locked_bytes // PAGE_TABLE_SHARE)


def occupiable_bytes(device: torch.device) -> int:
    """Return the device memory that this process could occupy in all: what it has, its context, and what is free."""
    use_expandable_segments(device)
    warm_up(device)  # or kernels that are loaded later would be taken for memory of others
    beside, _ = beside_bytes(device)
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) + beside


def workspace_bytes(device: torch.device) -> int:
    """Return what cuBLAS holds of torch's memory, once the usual libraries are loaded."""
    warm_up(device)
    before = torch.cuda.memory_allocated(device)
    # They come back with the next product, which the second warm-up makes: the process is left as training will have
    # it.
    clear_cublas_workspaces()
    held = before - torch.cuda.memory_allocated(device)
    warm_up(device)
    return max(0, held)


def _process_bytes(device: torch.device) -> int | None:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(uuid))
    except pynvml.NVMLError:
        return None
    # In a container this process has another number; if there is only one, it is this.
    own = [p for p in processes if p.pid == os.getpid()] or (processes if len(processes) == 1 else [])
    return own[0].usedGpuMemory if len(own) == 1 else None


@functools.cache
def _handle(uuid: str) -> Any:
    """Return NVML's handle of a GPU; the library stays open, since it is asked again and again."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
