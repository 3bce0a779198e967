"""Device memory as the driver counts it, and how torch's allocator gets it. Knows no tensors of ours.

A process occupies more of a GPU than its tensors: the context with every kernel that was ever loaded, what libraries
take by themselves, and in torch's allocator the workspaces of cuBLAS (one per thread and stream, so two in training:
the backward has a thread of its own) as well as what its rounding and its free pieces waste.
"""

from __future__ import annotations

import logging
import os

import pynvml
import torch

from lt_offload.profile.pinning import is_wsl2

CONTEXT_LIMIT = 1 << 30
"""Where the driver does not tell processes apart, at most this much beside torch's memory is taken for this one's."""

_log = logging.getLogger(__name__)


def use_expandable_segments() -> bool:
    """Let torch's allocator give back single pages; return whether it does now.

    With segments of fixed size, memory in the gaps between tensors is lost until everything around them is free, and
    tensors beyond 10 MiB are rounded up to 2 MiB. Here gaps are unmapped and mapped elsewhere when the cap is near.
    Whoever has configured this himself is left alone. The choice holds for what is allocated from now on, so it may
    come after CUDA has been initialised.
    """
    configured = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" in configured or "backend:cudaMallocAsync" in configured:
        return "expandable_segments:true" in configured.lower().replace(" ", "")
    if is_wsl2():
        return False  # which does not map device memory page by page
    try:
        # What is not named goes back to its default.
        settings = [configured] if configured else []
        torch._C._accelerator_setAllocatorSettings(",".join([*settings, "expandable_segments:True"]))
    except (AttributeError, RuntimeError, ValueError) as error:
        _log.info("torch's allocator keeps segments of fixed size: %s", str(error).partition("\n")[0])
        return False
    return True


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


def context_bytes(device: torch.device) -> int:
    """Return the device memory of this process before the first tensor: beside torch's allocator, and workspaces."""
    return beside_bytes(device)[0] + workspace_bytes(device)


def beside_bytes(device: torch.device) -> tuple[int, bool]:
    """Return the device memory of this process beside torch's allocator, and whether the driver says so itself.

    It may not know processes apart (in containers, for example). Then what others occupy is included, up to
    :data:`CONTEXT_LIMIT` in all.
    """
    torch.cuda.synchronize(device)
    reserved = torch.cuda.memory_reserved(device)
    mine = _process_bytes(device)
    if mine is not None and mine >= reserved:
        return mine - reserved, True
    free, total = torch.cuda.mem_get_info(device)
    return max(0, min(total - free - reserved, CONTEXT_LIMIT)), False


def workspace_bytes(device: torch.device) -> int:
    """Return what cuBLAS holds of torch's memory, once the usual libraries are loaded."""
    warm_up(device)
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    held = before - torch.cuda.memory_allocated(device)
    warm_up(device)
    return max(0, held)


def _process_bytes(device: torch.device) -> int | None:
    """Return what this process occupies on ``device`` in all, None if the driver does not tell."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    # In a container this process has another number; if there is only one, it is this.
    found = [p for p in processes if p.pid == os.getpid()] or (processes if len(processes) == 1 else [])
    return found[0].usedGpuMemory if len(found) == 1 else None
