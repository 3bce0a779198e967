"""Batches of data that are read while training: shuffled and packed in stretches, and taken up where a run stopped.

A stretch is a number of consecutive examples. Its batches depend on these, the seed and the number of the stretch only.
So a position is the beginning of its stretch, and the number of used sequences in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches.documents import Documents
from lt_offload.finetune.data.batches.order import check_continues
from lt_offload.finetune.data.batches.packing import Row, Sequences
from lt_offload.finetune.data.formats import Example
from lt_offload.finetune.processes import Share

Place = tuple[int, int]
"""Number of a source, and number of its rows that have been read."""
Position = dict[str, Any]
_STRETCH = "window"
"""Key of the number of a stretch; checkpoints have it by this name."""
Batch = dict[str, Tensor]


class StreamedBatches(IterableDataset[tuple[Position, Batch]]):
    """Batches without end, each with the position after it: when the data are over, they begin again.

    All processes read everything and take their share of the batches. The position is that after the last of their
    batches, so that a run may go on with any number of processes.

    ``read`` yields the examples from a place on, each with the place after it; ``begin`` is that of the first training
    data. ``sequences`` are made of the documents of a stretch, ``buffer`` examples, and other ``settings`` decide about
    them, too. The order within stretches, of ``seed``, is another one in each pass.
    """

    def __init__(
        self,
        read: Callable[[Place], Iterator[tuple[Place, Example]]],
        *,
        begin: Place,
        buffer: int,
        batch_size: int,
        sequences: Callable[[Documents], Sequences],
        collate: Callable[[Sequence[Row]], Batch],
        seed: int,
        name: str,
        settings: Mapping[str, Any],
        share: Share = Share(),  # noqa: B008  # it never changes
    ) -> None:
        self._read = read
        self._sequences = sequences
        self._collate = collate
        self._name = name
        self._share = share
        # numpy's generators take no seeds below 0, which torch's do.
        self._buffer, self._batch_size, self._seed = buffer, batch_size, seed % 2**64
        self.depends_on: dict[str, Any] = {
            "seed": seed, "batch_size": batch_size, "stream_buffer": buffer, "begin": list(begin), **settings
        }  # fmt: skip
        """Settings that decide about the batches."""
        self.position: Position = self._whole(0)
        """The position after the last batch that was taken, at which the next iteration begins."""

    def __iter__(self) -> Iterator[tuple[Position, Batch]]:
        rows = self._rows(self.position)
        begin = self._share.first * self._batch_size
        while True:
            some = list(islice(rows, self._share.of * self._batch_size))
            yield some[-1][0], self._collate([row for _, row in some[begin : begin + self._batch_size]])

    def take(self, item: tuple[Position, Batch]) -> None:
        """Note that training has taken ``item``."""
        self.position = item[0]

    def state_dict(self) -> Position:
        """Return the position after the last batch that was taken, and the settings that the order depends on."""
        return self.position | {"depends_on": self.depends_on}

    def load_state_dict(self, state: Position) -> None:
        """Continue where ``state`` was taken; raises ``ConfigError`` if other batches would follow."""
        if "depends_on" not in state:
            raise ConfigError("the checkpoint is of a run with data.streaming=false; continue it with that setting")
        check_continues(state["depends_on"], self.depends_on)
        self.position = {key: value for key, value in state.items() if key != "depends_on"}

    def _rows(self, position: Position) -> Iterator[tuple[Position, Row]]:
        """Yield sequences without end, each with the position after it."""
        while True:
            some = False
            for after, row in self._epoch(position):
                some = True
                yield after, row
            # A whole pass without a sequence, not the rest of one that a
            # run went on in: the next one would be the same.
            if not some and position == self._whole(position["epoch"]):
                raise ConfigError(
                    f"{self._name} has no trainable tokens within data.max_length; raise data.max_length, lower "
                    "data.validation_rows, or check data.format and the columns"
                )
            position = self._whole(position["epoch"] + 1)

    def _epoch(self, position: Position) -> Iterator[tuple[Position, Row]]:
        """Yield the rest of a pass over the data from ``position`` on."""
        epoch, stretch, used = position["epoch"], position[_STRETCH], position["used"]
        place: Place = tuple(position["place"])
        examples = self._read(place)
        while some := list(islice(examples, self._buffer)):
            sequences = self._sequences(Documents.from_examples(example for _, example in some))
            after = some[-1][0]
            order = np.random.default_rng([self._seed, epoch, stretch]).permutation(len(sequences))
            for number in range(used, len(order)):
                here = {"epoch": epoch, _STRETCH: stretch, "place": list(place), "used": number + 1}
                # After the last of its sequences the position is where the next
                # stretch begins: to go on, nothing is read twice.
                done = {"epoch": epoch, _STRETCH: stretch + 1, "place": list(after), "used": 0}
                yield (done if number + 1 == len(order) else here), sequences[int(order[number])]
            place, stretch, used = after, stretch + 1, 0

    def _whole(self, epoch: int) -> Position:
        return {"epoch": epoch, _STRETCH: 0, "place": self.depends_on["begin"], "used": 0}


def check_streaming(*, group_by_length: bool, num_workers: int, holds_out: bool, validation_seed: int | None) -> None:
    """Raise ``ConfigError`` for settings that exclude data that are read while training."""
    if group_by_length:
        raise ConfigError(
            "data.group_by_length=true needs the lengths of all sequences, which data.streaming=true does not know; "
            "set one of them to false, or data.pack=true, which needs no padding"
        )
    if num_workers > 1:
        raise ConfigError(
            f"data.num_workers={num_workers}: with data.streaming=true rows are read one after the other, by one "
            "process; set it to 1 or 0"
        )
    if validation_seed is not None:
        raise ConfigError(
            f"data.validation_seed={validation_seed} draws from rows that data.streaming=true has not read; the first "
            "ones are held out, so set it to null"
        )
    if not holds_out:
        raise ConfigError(
            "data.streaming=true cannot hold out a share of rows that nobody has counted; set data.validation_rows to "
            "the number of rows to hold out (0: none), or give data.validation_path"
        )


def check_end(trainer: Any) -> None:
    """Raise ``ConfigError`` if ``trainer`` would never stop: streamed data begin again after their last row."""
    if trainer.max_steps == -1:
        raise ConfigError("data.streaming=true has no end; set trainer.max_steps")


def batches_of(trainer: Any) -> int:
    """Return the number of batches that ``trainer`` takes for all of its steps."""
    # The largest number that a callback will set: too many batches are no matter, as steps end the run, too few are.
    factors = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:
        factors += getattr(callback, "scheduling", {}).values()
    return int(max(trainer.max_steps, 1) * max(factors))
