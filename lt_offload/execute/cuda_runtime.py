"""Everything the CUDA device asks of CUDA, in one small object that tests can replace by a model of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from lt_offload.profile import mapped

CONTEXT_LIMIT = 1 << 30
"""Device memory that may be other processes' or this one's context is taken for the context, up to this size."""


class CudaRuntime:
    """One GPU."""

    def __init__(self, index: int) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", index)

    def stream(self) -> Any:
        """Return a new stream."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        """Return the stream that the calling thread launches to."""
        return torch.cuda.current_stream(self.device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Within the context the calling thread launches to ``stream``."""
        return torch.cuda.stream(stream)

    def event(self, *, timing: bool) -> Any:
        """Return a new event; who waits for it on the host sleeps."""
        return torch.cuda.Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return device memory; raises ``torch.OutOfMemoryError``."""
        torch.cuda.empty_cache()
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def cap(self, nbytes: int | None) -> None:
        """Let torch's allocator take at most ``nbytes``; None: everything."""
        _, total = torch.cuda.mem_get_info(self.device)
        fraction = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def context_bytes(self) -> int:
        """Return the device memory of this process beside torch's allocator, once the usual libraries are loaded."""
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.ones(64, 64, dtype=dtype, device=self.device)
            square @ square
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return min(total - free - torch.cuda.memory_reserved(self.device), CONTEXT_LIMIT)

    def available(self) -> int:
        """Return the device memory that torch's allocator has or could get."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device)

    def reserved(self) -> int:
        """Return the device memory held by torch's allocator."""
        return torch.cuda.memory_reserved(self.device)

    def peak_reserved(self) -> int:
        """Return the high-water mark of ``reserved``."""
        return torch.cuda.max_memory_reserved(self.device)

    def reset_peak(self) -> None:
        """Restart the high-water mark."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def register(self, address: int, nbytes: int) -> int:
        """Page-lock host memory; return 0 or an error code."""
        return mapped.register(address, nbytes)

    def unregister(self, address: int) -> int:
        """Undo ``register``; return 0 or an error code."""
        return mapped.unregister(address)

    def direct_view(self, host: torch.Tensor) -> torch.Tensor:
        """Return registered memory as a tensor on the device; raises ``UnsupportedError``."""
        return mapped.map_host(host, self.device)

    def rng_state(self) -> torch.Tensor:
        """Return the state of the device's random number generator."""
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore it."""
        torch.cuda.set_rng_state(state, self.device)
