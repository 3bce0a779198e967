"""A budget of device memory, the same for every contender: torch's allocator gets what the context leaves of it."""

from __future__ import annotations

import torch

from lt_offload.machine import driver


class DoesNotFit(Exception):
    """There is less device memory than the budget; the message says how much."""


class Budget:
    """Holds this process to ``nbytes`` of the memory of ``place``.

    Args:
        place: a GPU.
        nbytes: context included.
        ballast: occupy the rest of the device as well, for those who allocate without torch.
        kept_free: bytes of the budget that torch may not have either: room for pages of managed memory, which on a full
            device would have to leave before the next may come.

    Raises:
        DoesNotFit: if others occupy so much of the device that the budget is not there, or the context is larger.
    """

    def __init__(self, place: torch.device, nbytes: int, *, ballast: bool = False, kept_free: int = 0) -> None:
        self._place, self._nbytes, self._kept_free = place, nbytes, kept_free
        driver.warm_up(place)  # every contender loads these kernels; those of its own are followed
        self.context, _ = driver.beside_bytes(place)
        free, self._total = torch.cuda.mem_get_info(place)
        room, mine = nbytes - self.context - kept_free, torch.cuda.memory_reserved(place)
        if room <= 0:
            raise DoesNotFit(f"the CUDA context takes {self.context} of {nbytes} bytes")
        if nbytes - self.context > free + mine:
            raise DoesNotFit(f"{free + mine} bytes of the device are free beside the context, for a budget of {nbytes}")
        self.rest = max(0, free + mine - (nbytes - self.context)) if ballast else 0
        self.block = torch.empty(self.rest, dtype=torch.uint8, device=place) if self.rest else None
        self._cap()

    def follow(self) -> None:
        """Take from the allocator what the context has grown by: kernels are loaded when they are first launched."""
        self.context = max(self.context, driver.beside_bytes(self._place)[0])
        self._cap()

    def _cap(self) -> None:
        room = max(0, self._nbytes - self.context - self._kept_free)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (room + self.rest) / self._total), self._place)
        if torch.cuda.memory_reserved(self._place) > room + self.rest:
            torch.cuda.empty_cache()  # a lower limit alone takes nothing back, and the row would be over the budget
