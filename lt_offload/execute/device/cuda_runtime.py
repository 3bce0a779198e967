"""Calls of CUDA that the CUDA device makes in every step, faster than torch makes them, and of one GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from lt_offload.compat.torch import cuda_memory_stats, current_stream_key, reset_cuda_peaks
from lt_offload.machine import driver, zero_copy


class _On(AbstractContextManager[None]):
    """A ``torch.cuda.stream`` for one device, in a fraction of the time."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Any, before: Any) -> None:
        self._stream, self._before = stream, before

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._before)


class CudaRuntime:
    """One GPU."""

    def __init__(self, index: int) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", index)
        self._index = index
        self._streams: dict[tuple[int, int, int], Any] = {}

    def stream(self) -> Any:
        """Return a new stream, of normal priority: priorities order kernels and mean nothing to copies."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        """Return the stream that the calling thread launches to, the same object for the same stream."""
        # What torch.cuda.current_stream does, without a new object every time.
        key = current_stream_key(self._index)
        stream = self._streams.get(key)
        if stream is None:
            names = ("stream_id", "device_index", "device_type")
            stream = self._streams[key] = torch.cuda.Stream(**dict(zip(names, key, strict=True)))  # type: ignore[no-untyped-call]
        return stream

    def use(self, stream: Any) -> AbstractContextManager[None]:
        """Within the context the calling thread, and no other, launches to ``stream``."""
        return _On(stream, self.current_stream())

    def event(self, *, timing: bool) -> Any:
        """Return a new event; who waits for it on the host sleeps."""
        return torch.cuda.Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return device memory, taken from the driver and not from torch's leftovers; may raise OutOfMemoryError."""
        torch.cuda.empty_cache()
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def cap(self, nbytes: int | None) -> None:
        """Let torch's allocator take at most ``nbytes``, whatever other processes have; None: everything."""
        _, total = torch.cuda.mem_get_info(self.device)
        fraction = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def context_bytes(self) -> tuple[int, bool]:
        """Return the process's device memory beside torch's allocator, and whether that is exact. Waits for nothing."""
        return driver.beside_bytes(self.device)

    def available(self) -> int:
        """Return the device memory that torch's allocator has or could get."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + self.reserved()

    def reserved(self) -> int:
        """Return the device memory held by torch's allocator."""
        return self._reserved("current")

    def peak_reserved(self) -> int:
        """Return the high-water mark of ``reserved``."""
        return self._reserved("peak")

    def _reserved(self, which: str) -> int:
        # torch.cuda.memory_reserved flattens and sorts all statistics first, which takes longer than a launch.
        return int(cuda_memory_stats(self._index)["reserved_bytes"]["all"][which])

    def reset_peak(self) -> None:
        """Restart the high-water mark."""
        reset_cuda_peaks(self._index)

    def register(self, address: int, nbytes: int) -> int:
        """Page-lock host memory; return 0 or an error code."""
        with torch.cuda.device(self._index):  # any thread may ask; on another GPU this would make a context
            return zero_copy.register(address, nbytes)

    def unregister(self, address: int) -> int:
        """Undo ``register``; return 0 or an error code."""
        with torch.cuda.device(self._index):
            return zero_copy.unregister(address)

    def zero_copy_view(self, host: torch.Tensor) -> torch.Tensor:
        """Return registered memory as a tensor on the device; raises ``UnsupportedError``."""
        with torch.cuda.device(self._index):
            return zero_copy.zero_copy_view(host, self.device)
