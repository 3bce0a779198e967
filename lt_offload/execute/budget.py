"""The emulated device's memory, storage by storage, held against its budget. Knows no arena."""

from __future__ import annotations

import torch

from lt_offload.errors import OverBudget
from lt_offload.execute.lanes import Lanes
from lt_offload.profile.accounting import Account


class DeviceAccount(Account):  # type: ignore[no-untyped-call]
    """Before it gives up, waits for the copies to the host that are on their way: they hold device memory."""

    def __init__(self, limit: int, lanes: Lanes) -> None:
        super().__init__(limit=limit)
        self._lanes = lanes
        self.highest = 0
        """Largest peak that ``reset_peak`` of the device has wiped out during the present count."""

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
