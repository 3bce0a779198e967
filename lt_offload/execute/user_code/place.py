"""The device and the stream that blocks run on: arguments are brought there, another stream is refused."""

from __future__ import annotations

from typing import Any

from lt_offload import limits
from lt_offload.execute.device.base import Device
from lt_offload.model.blocks import Block
from lt_offload.model.location import brought


class Place:
    """Where an engine's blocks run.

    Args:
        device: runs them; on the stream that is current now, until a step begins on another one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._remote = device.torch_device.type != "cpu"
        self._stream = device.stream()

    def begin(self) -> None:
        """A step begins: its blocks are to be called on the stream of this moment."""
        self._stream = self._device.stream()

    def enter(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """Return what ``block``, which is called with these arguments, is to get.

        Raises:
            UnsupportedError: on another stream than the step began on.
        """
        if self._device.stream() is not self._stream:
            raise limits.OTHER_STREAM.error(f"block {block.name} was called on another CUDA stream than its step began")
        return brought(block, args, kwargs, self._device.torch_device) if self._remote else (args, kwargs)
