"""The order of batches, which can be taken up in the middle of an epoch, and the loader that follows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, Subset

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.packing import Sequences

Items = Sequences | Subset[tuple[Tensor, Tensor]]


class ResumableLoader(DataLoader[tuple[Tensor, Tensor]]):
    """A loader whose position in the epoch Lightning saves and restores with its checkpoints.

    Batches are made in the calling process, so the position is exactly what training has seen.
    """

    def __init__(self, items: Items, *, batch_sampler: ResumableBatches, collate_fn: Any) -> None:
        # A generator of its own: making an iterator draws from it, and would change the dropout masks that follow.
        super().__init__(items, batch_sampler=batch_sampler, collate_fn=collate_fn, generator=torch.Generator())
        self._order = batch_sampler

    def state_dict(self) -> dict[str, int]:
        """Return the position in the training order."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position in the training order."""
        self._order.load_state_dict(state)


class ResumableBatches(Sampler[list[int]]):
    """Indices of full batches in an order that depends on seed and epoch only and can be taken up midway.

    Lightning calls ``set_epoch`` before each epoch. The last batch is dropped if it is not full: every iteration has
    the planned size.
    """

    def __init__(self, count: int, batch_size: int, *, seed: int) -> None:
        self.count = count
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self.position = 0
        """Batches handed out in this epoch."""
        self._resume = False

    def __len__(self) -> int:
        return self.count // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: the epoch is read when the first batch is asked for, which is after Lightning has set it.
        if not self._resume or self.position >= len(self):
            self.position = 0
        self._resume = False
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        while self.position < len(self):
            start = self.position * self.batch_size
            self.position += 1
            yield order[start : start + self.batch_size]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return how far this epoch has come, and what the order depends on."""
        return {"position": self.position, "count": self.count, "batch_size": self.batch_size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            ConfigError: if the data, the batch size or the seed differ, so that another order would follow.
        """
        for key in ("count", "batch_size", "seed"):
            if state[key] != getattr(self, key):
                raise ConfigError(
                    f"cannot continue in the middle of an epoch: {key} was {state[key]}, now it is {getattr(self, key)}"
                    "; use the settings of the run that wrote the checkpoint"
                )
        self.position = state["position"]
        self._resume = True
