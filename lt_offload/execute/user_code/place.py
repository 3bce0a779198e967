"""The device and the stream that blocks run on: arguments are brought there, another stream is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lt_offload import limits
from lt_offload.execute.device.base import Device
from lt_offload.model.blocks import Block
from lt_offload.model.compiled import Forward
from lt_offload.model.state.handed import Handed


class Place:
    """The device and the stream of an engine's blocks: the current one, until a step begins on another."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._remote = device.torch_device.type != "cpu"
        self._stream = device.stream()

    def begin(self) -> None:
        """A step begins: its blocks are to be called on the stream of this moment."""
        self._stream = self._device.stream()

    def hand_over(
        self,
        block: Block,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any],
    ) -> Any:
        """Return what ``block`` returns when ``run`` runs its ``forward`` on these arguments; refuses other streams."""
        if self._device.stream() is not self._stream:
            raise limits.OTHER_STREAM.error(f"block {block.name} was called on another CUDA stream than its step began")
        handed = Handed(args, kwargs)
        if self._remote:
            handed.bring(block, self._device.torch_device)
        return handed.returned(run(handed.around(forward), handed.args, handed.kwargs))
