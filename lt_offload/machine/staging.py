"""Copies between the GPU and host memory that is not page-locked, through a few buffers that are.

The driver copies such memory piece by piece as well, but makes the calling thread wait for the whole of it, in both
directions one after the other. Here each direction has a ring of buffers: while one is on the link, the processor fills
or empties the next. The processor's copies are torch's, on as many threads as the calling thread may use.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

BUFFERS = 3
"""Per direction: one is on the link, one is being filled or emptied, one waits."""
BUFFER_BYTES = 4 << 20
"""Large enough for a link, small enough for the processor's cache."""
STAGING_BYTES = 2 * BUFFERS * BUFFER_BYTES


class _StagingBuffer(NamedTuple):
    """Page-locked memory that one copy at a time may use."""

    memory: Tensor
    free: Any
    """Event after which nothing uses it; one that has never been recorded is over."""


class Staging:
    """Copies of contiguous tensors of equal dtype; others, and all if there are no buffers, go the driver's slow way.

    The calling thread blocks while the processor copies. Several threads may call, one at a time per direction.
    ``memory`` is page-locked, at best ``STAGING_BYTES``; None: not even those could be locked. The calling thread
    launches to a stream within the context that ``use`` returns; ``copy`` issues a copy ``(target, source)`` to it.
    """

    def __init__(
        self,
        memory: Tensor | None,
        *,
        event: Callable[[], Any],
        use: Callable[[Any], AbstractContextManager[Any]],
        copy: Callable[[Tensor, Tensor], object],
    ) -> None:
        self._event = event
        self._use = use
        self._copy = copy
        chunks = () if memory is None else memory.chunk(2 * BUFFERS)
        buffers = [_StagingBuffer(chunk, event()) for chunk in chunks]
        # Every second one, so that each direction has a share of what there is.
        self._down, self._up = deque(buffers[0::2]), deque(buffers[1::2])
        self._down_lock, self._up_lock = threading.Lock(), threading.Lock()

    def to_device(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Copy ``source`` (host) to ``target``: all of it has been read, and the last piece been issued, on return."""
        with self._down_lock, self._use(stream):
            if not self._down or not _plain(target, source):
                self._by_driver(target, source, stream)
                return
            for goal, piece in zip(_pieces(target, self._down), _pieces(source, self._down), strict=True):
                buffer = _next(self._down)
                part = buffer.memory[: piece.numel()]
                part.copy_(piece)
                self._copy(goal, part)
                buffer.free.record(stream)

    def to_host(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Copy ``source`` to ``target`` (host), which holds everything on return."""
        with self._up_lock, self._use(stream):
            if not self._up or not _plain(target, source):
                self._by_driver(target, source, stream)
                return
            coming: deque[tuple[_StagingBuffer, Tensor]] = deque()
            for goal, piece in zip(_pieces(target, self._up), _pieces(source, self._up), strict=True):
                # All buffers are on the link: the oldest has to be emptied before it can be used again.
                if len(coming) == len(self._up):
                    _empty_into(*coming.popleft())
                buffer = _next(self._up)
                self._copy(buffer.memory[: piece.numel()], piece)
                buffer.free.record(stream)
                coming.append((buffer, goal))
            for buffer, goal in coming:
                _empty_into(buffer, goal)

    def _by_driver(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Leave the copy to the driver, and wait for all of it."""
        self._copy(target, source)
        completion = self._event()
        completion.record(stream)
        completion.synchronize()


def _plain(target: Tensor, source: Tensor) -> bool:
    return target.dtype is source.dtype and target.is_contiguous() and source.is_contiguous()


def _pieces(tensor: Tensor, ring: deque[_StagingBuffer]) -> tuple[Tensor, ...]:
    """Return the bytes of ``tensor`` in pieces that fit into a buffer of ``ring``."""
    return torch.split(tensor.view(-1).view(torch.uint8), ring[0].memory.numel()) if tensor.numel() else ()


def _next(ring: deque[_StagingBuffer]) -> _StagingBuffer:
    """Return the buffer of ``ring`` that was used longest ago, as soon as it is free."""
    buffer = ring[0]
    ring.rotate(-1)
    # Without this, the buffer would be filled again while the link still reads it.
    buffer.free.synchronize()
    return buffer


def _empty_into(buffer: _StagingBuffer, target: Tensor) -> None:
    buffer.free.synchronize()
    target.copy_(buffer.memory[: target.numel()])
