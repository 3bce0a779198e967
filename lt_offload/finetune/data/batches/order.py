"""The order of batches, which depends on seed and epoch only, and can be taken up in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches.packing import Row, Sequences
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.processes import Share

_BATCHES_TO_SORT = 50
"""Batches whose rows are sorted by length together: rows of like lengths meet, and still at random."""


class ResumableBatches(Sampler[list[int]]):
    """Indices of batches, in another order in each epoch.

    Lightning calls ``set_epoch`` before each epoch. Where a run goes on, epochs are counted from its own: Lightning
    takes that for over if the run ended there by ``max_steps``. The last batch has the rows that are left, drawn anew
    in each epoch. All processes have the same order, and each takes its share of the batches, every one as many as the
    others, so that at the end some may be without one: see ``silent``.

    A run may go on with another number of processes in the middle of an epoch: rows keep the order that they have, and
    rows that no process has taken yet are shared out anew, so that none comes twice or not at all. Batches are counted
    as if the epoch had been divided among these processes from its beginning.

    With ``lengths`` batches have rows of like lengths. The number of all ``tokens`` shows other data where a run goes
    on. Without ``reshuffled`` all epochs have the order of the first. With ``silent`` a process without a batch at the
    end takes one without loss, a row with a number below 0 (see :class:`Silenced`), so that all take as many. Without
    it they share the rows that are left, and leave them out where these are fewer than processes.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        seed: int,
        lengths: NDArray[Any] | None = None,
        tokens: int = 0,
        share: Share = Share(),  # noqa: B008  # it never changes
        reshuffled: bool = True,
        silent: bool = False,
    ) -> None:
        self.count = count
        self.batch_size = batch_size
        self.seed = seed
        self.grouped = lengths is not None
        self.tokens = tokens
        self.share = share
        self.reshuffled = reshuffled
        self.silent = silent
        self.epoch = 0
        self.position = 0
        """Batches that training in this process has taken in this epoch."""
        self.moved = 0
        """Difference, in batches, between the position here and the saved one of another number of processes."""
        self._arranged_for = share.of
        """The number of processes with which this epoch began."""
        self._taken = self._skipped = 0
        """Rows of this epoch that other numbers of processes have taken, and the batches here that they stand for."""
        self._lengths = None if lengths is None else torch.as_tensor(lengths)
        self._resume = False
        self._counts = False
        """True if epochs are counted here, as the run goes on from a checkpoint."""

    @property
    def sampler(self) -> ResumableBatches:
        """This object: Lightning sets the epoch of a batch sampler's sampler."""
        return self

    def __len__(self) -> int:
        return self._rounds(self.count, self.share.of)

    def _rounds(self, rows: int, processes: int) -> int:
        """Return the number of batches of each of ``processes``."""
        full, left = divmod(rows, self.batch_size * processes)
        return full + (left >= (1 if self.silent else processes))

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: the epoch is read when the first batch is asked for, which is after Lightning has set it.
        self.begin()
        begin, end = self.position - self._skipped, len(self) - self._skipped
        yield from self.batches()[self.share.first :: self.share.of][begin:end]

    def begin(self) -> None:
        """Begin an epoch: at the loaded position, if there is one and its epoch had not ended."""
        # A checkpoint at the end of an epoch has a position, too: the next epoch begins at its own beginning.
        if not self._resume or self.position >= len(self):
            self.position = self._taken = self._skipped = 0
            self._arranged_for = self.share.of
            self.epoch += self._counts
        self._resume = False

    def batches(self) -> list[list[int]]:
        """Return all batches of all processes in this epoch, without the rows taken by other numbers of processes."""
        order = self._order()[self._taken :]
        # Only rounds in which every process gets a batch; what is left is divided in its own way.
        full = len(order) // (self.batch_size * self.share.of) * self.share.of
        order, left = order[: full * self.batch_size], order[full * self.batch_size :]
        whole: list[list[int]] = order.view(-1, self.batch_size).tolist()
        return whole + self._last(left)

    def _order(self) -> Tensor:
        """Return all rows of the epoch, in the order in which they come."""
        generator = torch.Generator().manual_seed(self.seed + (self.epoch if self.reshuffled else 0))
        order = torch.randperm(self.count, generator=generator)
        if self._lengths is None:
            return order
        # Of full rounds only, as rows that are left are divided among the processes.
        full = self.count // (self.batch_size * self._arranged_for) * self._arranged_for
        order, left = order[: full * self.batch_size], order[full * self.batch_size :]
        together = self.batch_size * _BATCHES_TO_SORT
        parts = [order[begin : begin + together] for begin in range(0, len(order), together)]
        order = torch.cat([part[self._lengths[part].argsort(stable=True)] for part in parts]) if parts else order
        # Sorted rows would come from short to long; so their batches
        # are shuffled, and stay batches of like lengths.
        order = order.view(-1, self.batch_size)[torch.randperm(full, generator=generator)]
        return torch.cat([order.view(-1), left])

    def _last(self, left: Tensor) -> list[list[int]]:
        """Return a batch of each process with the rows that are ``left``, none if there are too few."""
        rows: list[int] = left.tolist()
        if not self.silent:
            return [part.tolist() for part in left.tensor_split(self.share.of)] if len(rows) >= self.share.of else []
        batches = [rows[begin : begin + self.batch_size] for begin in range(0, len(rows), self.batch_size)]
        return batches + [[~rows[0]]] * (self.share.of - len(batches)) if rows else []

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch, unless the run goes on from a checkpoint, which holds the epoch."""
        if not self._counts:
            self.epoch = epoch

    def take(self, _: object) -> None:
        """Note that training has taken a batch."""
        self.position += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this epoch, and the settings that the order depends on."""
        known = {key: getattr(self, key) for key in _DEPENDS_ON}
        before = {"arranged_for": self._arranged_for, "taken": self._taken, "skipped": self._skipped}
        ended = {"processes": self.share.of, "ended": self.position >= len(self)}
        return {"position": self.position, "epoch": self.epoch, **known, **ended, **before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, by as many processes or by others.

        Raises ``ConfigError`` if the data, the batch size or the seed differ, so that another order would follow.
        """
        if "position" not in state:
            raise ConfigError("the checkpoint is of a run with data.streaming=true; continue it with that setting")
        check_continues(state, {key: getattr(self, key) for key in _DEPENDS_ON})
        before, position = state.get("processes", 1), state["position"]
        self._arranged_for = state.get("arranged_for", before)
        self._taken, self._skipped = state.get("taken", 0), state.get("skipped", 0)
        if before != self.share.of:
            taken = (position - self._skipped) * before * self.batch_size
            over = state.get("ended", position >= self._rounds(self.count, before))
            self._taken = self.count if over else min(self.count, self._taken + taken)
            self._skipped = len(self) - self._rounds(self.count - self._taken, self.share.of)
            position = self._skipped
            rank_zero_warn(self._other_processes(before))
        self.position, self.moved = position, position - state["position"]
        self.epoch = state.get("epoch", self.epoch)
        self._resume = self._counts = True

    def _other_processes(self, before: int) -> str:
        now, left = self.share.of, self.count - self._taken
        return (
            f"the checkpoint is of a run with {before} process{'es' if before > 1 else ''}, now there "
            f"{'are' if now > 1 else 'is'} {now}: its epoch goes on with the {left:,} of {self.count:,} sequences that "
            f"were not trained on yet, none twice. An update takes batches of {now} instead of {before}, unless "
            "trainer.accumulate_grad_batches makes up for it; random numbers (dropout) begin anew"
        )


class Silenced(Dataset[Row]):
    """Rows, and under ``~number`` the row ``number`` without loss."""

    def __init__(self, rows: Sequences) -> None:
        self._rows = rows

    def __getitem__(self, number: int) -> Row:
        if number >= 0:
            return self._rows[number]
        ids, labels, positions = self._rows[~number]
        return ids, torch.full_like(labels, IGNORED), positions


_DEPENDS_ON = ("count", "batch_size", "seed", "grouped", "tokens")


def check_continues(state: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if a setting that the order depends on had another value in ``state``."""
    for key, value in now.items():
        before = state.get(key, value)
        if before != value:
            raise ConfigError(
                f"cannot continue in the middle of an epoch: {key} was {before}, now it is {value}"
                "; use the settings of the run that wrote the checkpoint"
            )
