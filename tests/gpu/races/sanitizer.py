"""Finds accesses to device memory that streams do not order, in what really was launched.

Torch's CUDA sanitizer follows streams, events and kernels, but takes every first address of a tensor for a memory of
its own, forgets what was freed, and does not see the engine's copies: they run outside dispatch modes. Here every
access is one to all 64-byte pages of a tensor, so that ranges of the arena and memory that the allocator hands out
again are compared too; copies are seen; and what the host has found finished orders what is launched later. Host
memory is not covered: the happens-before checker of the emulated device knows about that.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._utils import CallbackRegistry
from torch.cuda import _gpu_trace, _sanitizer

from lt_offload.execute.device.cuda import CudaDevice

PAGE = 64
"""Nothing smaller is handed out: by the arena and on a GPU 512 bytes, by torch on the host 64."""


def pages(tensor: torch.Tensor) -> range:
    """The pages between the first and the last byte of ``tensor``, by number."""
    if tensor.numel() == 0:
        return range(0)
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = tensor.data_ptr()
    return range(first // PAGE, -(-(first + span * tensor.element_size()) // PAGE))


def arguments_on(device_type: str) -> type[Any]:
    """Return what sorts the arguments of a kernel into pages that it reads and writes."""

    class Pages(_sanitizer.ArgumentHandler):
        def _handle_argument(
            self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
        ) -> None:
            if not isinstance(value, torch.Tensor) or value.device.type != device_type:
                return
            for page in pages(value):
                if is_write:
                    self.dataptrs_written.add(page)
                elif not metadata_only:
                    self.dataptrs_read.add(page)
                self.tensor_aliases.setdefault(page, [])
                if name is not None:
                    self.tensor_aliases[page].append(name)
                if is_output:
                    self.outputs.add(page)

    return Pages


def _by_turns(method: Callable[..., Any], lock: threading.RLock) -> Callable[..., Any]:  # type: ignore[valid-type]
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with lock:  # type: ignore[attr-defined]
            return method(*args, **kwargs)

    return run


class Handler(_sanitizer.EventHandler):
    """Is told by several threads; memory that is freed and handed out again keeps its history."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0
        lock = threading.RLock()
        for name in dir(self):
            if name.startswith("_handle_"):
                setattr(self, name, _by_turns(getattr(self, name), lock))

    def _handle_memory_allocation(self, data_ptr: int) -> None:
        pass

    def _handle_memory_deallocation(self, data_ptr: int) -> None:
        pass


class WatchedDevice(CudaDevice):
    """Its copies are seen by the sanitizer."""

    mode: Any = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.mode is None:
            super().copy(target, source)
            return
        with self.mode:
            super().copy(target, source)
        self.mode.event_handler.copies += 1

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)


@contextmanager
def alone() -> Iterator[None]:
    """Nobody else is told what streams and events do: torch never takes a watcher away."""
    with ExitStack() as stack:
        for registry in vars(_gpu_trace).values():
            if isinstance(registry, CallbackRegistry):
                stack.enter_context(patch.object(registry, "callback_list", []))
        yield


@contextmanager
def watching() -> Iterator[Handler]:
    """Raise ``CUDASanitizerErrors`` at the first kernel or copy within the context that is not ordered."""
    plain, emptied = torch.cuda.Event.query, torch.cuda.empty_cache
    with (
        patch.object(_sanitizer, "EventHandler", Handler),
        patch.object(_sanitizer, "ArgumentHandler", arguments_on("cuda")),
        patch.object(torch._C, "_activate_gpu_trace"),
    ):
        mode = _sanitizer.CUDASanitizerDispatchMode()
    handler = mode.event_handler

    def query(event: Any) -> bool:
        over = plain(event)
        if over and event.cuda_event:
            handler._handle_event_synchronization(event.cuda_event)
        return bool(over)

    def empty_cache() -> None:
        """The driver takes memory back behind all that was launched."""
        emptied()
        handler._handle_device_synchronization()

    WatchedDevice.mode = mode
    try:
        with (
            patch.object(_sanitizer, "ArgumentHandler", arguments_on("cuda")),
            patch.object(torch.cuda.Event, "query", query),
            patch.object(torch.cuda, "empty_cache", empty_cache),
            mode,
        ):
            yield handler
    finally:
        WatchedDevice.mode = None
