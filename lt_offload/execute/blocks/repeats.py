"""Checks whether a block's second run gives the numbers of its first.

What a block sees of its own modules, arguments and contexts is put back for a second run. What it finds elsewhere, in
global variables or closures, nobody can know; but its outputs tell. In a few iterations their bits are summed up in
both runs and compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lt_offload import limits
from lt_offload.execute.device.base import Device
from lt_offload.model.calls import bit_sums


class Repeats:
    """Compares the runs of an engine's blocks, in its first two passes and in ever fewer later ones."""

    def __init__(self, device: Device) -> None:
        self._device = device.torch_device
        self._passes = 0
        self._pairs: list[tuple[str, list[Tensor], list[Tensor]]] = []
        """By block, the sums of both runs, which a GPU may not have computed yet."""
        self.watching = False
        """The outputs of first runs are summed up."""

    def begin(self) -> None:
        """A pass begins."""
        self._passes += 1
        # Passes 1, 2, 4, 8 and so on: what differs mostly does so at once, and sums cost a pass over all outputs.
        # Kernels that add in no fixed order differ by themselves, so that on a GPU nothing could be said of them.
        few = self._passes & (self._passes - 1) == 0
        self.watching = few and (self._device.type == "cpu" or torch.are_deterministic_algorithms_enabled())

    def compare(self, block: str, first: list[Tensor], outputs: Sequence[Tensor]) -> None:
        """Compare ``outputs`` of a second run of ``block`` with the first's sums; on a GPU :meth:`check` will tell."""
        self._pairs.append((block, first, bit_sums(outputs)))
        if self._device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Raise ``UnsupportedError`` if a second run gave other numbers; on a GPU this waits for them."""
        pairs, self._pairs = self._pairs, []
        for block, first, second in pairs:
            if [int(a) for a in first] != [int(b) for b in second]:
                raise limits.OTHER_SECOND_RUN.error(f"block {block} gave other numbers when it ran again")
