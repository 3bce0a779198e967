"""What a Trainer asks a strategy about processes and devices: there is one of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OneProcess:
    """The part of a strategy for one process and one device."""

    num_nodes = 1  # set by the Trainer
    global_rank = local_rank = 0
    world_size = 1
    parallel_devices: list[torch.device] | None = None  # filled in by the Trainer

    @property
    def root_device(self) -> torch.device:
        """Where batches go and blocks run."""
        assert self.parallel_devices, "the Trainer has not chosen a device yet"
        return self.parallel_devices[0]

    @property
    def is_global_zero(self) -> bool:
        """There is only one process."""
        return True

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``tensor``."""
        return tensor

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return ``tensor``."""
        return tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Return at once."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return ``obj``."""
        return obj
