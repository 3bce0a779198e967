"""The emulated device's memory, storage by storage, held against its budget. Knows no arena.

Device and host are both RAM here, so that a tensor does not say whose memory it is in. In an iteration whatever an
operation makes is device memory. Between iterations a tensor is where what it is made from is, as on a GPU: operations
on device tensors make device tensors. Weights are on the host between iterations, and so are clones of them, what is
made from nothing, and what comes from files. What has once been counted counts until it is freed.
"""

from __future__ import annotations

from typing import Any

import torch

from lt_offload.errors import OverBudget
from lt_offload.execute.device.lanes import Lanes
from lt_offload.machine.accounting import Account


class DeviceAccount(Account):  # type: ignore[no-untyped-call]
    """Before it gives up, waits for the copies to the host that are on their way: they hold device memory."""

    def __init__(self, limit: int, lanes: Lanes) -> None:
        super().__init__(limit=limit)
        self._lanes = lanes
        self.everything = True
        """Whether all that operations make is device memory, or only what they make from device memory."""

    def _meet(self, storage: torch.UntypedStorage, func: Any, given: list[torch.Tensor]) -> None:
        if self.everything or any(self._holds(tensor) for tensor in given):
            super()._meet(storage, func, given)

    def _holds(self, tensor: torch.Tensor) -> bool:
        charge = self._live.get(tensor.untyped_storage()._cdata)
        return charge is not None and charge.nbytes > 0

    def _charge(self, storage: torch.UntypedStorage, *, free: bool, cause: object) -> None:
        try:
            super()._charge(storage, free=free, cause=cause)
            return
        except OverBudget:
            leaving = self._lanes.pending("d2h")
            if not leaving:
                raise
        self._lanes.finish(leaving)
        super()._charge(storage, free=free, cause=cause)
