"""How much device memory is in use while something runs. Knows storages and torch's allocator, not what runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lt_offload.machine.accounting import Account


class Watch:
    """Bytes in use during a phase: storages by account, and on CUDA what kernels take beside them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._account = Account(device_type=device.type, timeline=True)
        self._left_out: set[int] = set()
        self._outside = self._beside = 0
        self.slack = 0
        """The most that torch's allocator held beyond what it had allocated, over all phases."""

    @property
    def current(self) -> int:
        """Bytes in use."""
        return self._account.current

    def __enter__(self) -> None:
        self._account.reset_peak()
        if self._cuda is not None:
            torch.cuda.empty_cache()  # what is left of other blocks would give way under the cap
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._outside = torch.cuda.memory_allocated(self._cuda) - self._account.current
        self._account.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._account.__exit__(*error)
        if self._cuda is not None:
            allocated = torch.cuda.max_memory_allocated(self._cuda)
            self._beside = max(0, allocated - self._outside - self._account.peak)
            self.slack = max(self.slack, torch.cuda.max_memory_reserved(self._cuda) - allocated)

    def leave_out(self, gradient: Tensor) -> None:
        """Do not count ``gradient``."""
        serial = self._account.serial(gradient)
        if serial is not None:
            self._left_out.add(serial)

    def peak(self) -> int:
        """Return the peak of the last phase."""
        return self._account.peak_without(self._left_out) + self._beside

    def whole_peak(self) -> int:
        """Return the peak of the last phase, with what was to be left out."""
        return self._account.peak + self._beside

    def held_peak(self) -> int:
        """Return the peak of the last phase as it would be if what was left out had stayed to its end."""
        return self._account.peak_holding(self._left_out) + self._beside
