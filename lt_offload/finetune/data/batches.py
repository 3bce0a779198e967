"""Batches of sequences: their width, their order, which can be taken up anywhere, and the tokens of their update.

Data come in stretches, each of which is shuffled by itself: data in memory are one, and of data that are read while
training a stretch is a number of consecutive examples. So a position is the beginning of a stretch, and the number of
its sequences that were used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, repeat
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.data.sequences import Integers, Pack, Row, Sequences
from lt_offload.finetune.processes import Share, several
from lt_offload.strategy.windows import batches_per_update, knows_tokens
from lt_offload.units import round_up

Place = tuple[int, int]
"""Number of a source, and number of its rows that have been read."""
Position = dict[str, Any]
"""An epoch, the number of a stretch, the place at which it begins, and the number of its sequences that were used."""
Batch = dict[str, Tensor]
Stretches = Callable[[Place], Iterator[tuple[Place, Sequences]]]
"""A function that yields the stretches from a place on, each with the place after it."""

Sizes = Callable[[], Iterator[int]]
"""A function that yields the number of batches of each of the next updates; called for an epoch's first batch."""

TOKENS = "num_items_in_batch"
"""Key in a batch, as transformers calls it: tokens that are trained in all batches of its update, in this process."""

REFERENCE = "reference_log_probs"
"""Key in a batch of pairs: log-probability of each row's answer before the training, NaN if not known."""

_PAD_MULTIPLE = 8
"""The divisor of a padded batch's columns: few different shapes, and efficient ones."""
_DEPENDS_ON = ("count", "batch_size", "seed", "grouped")
_BATCHES_TO_SORT = 50
"""Batches whose rows are sorted by length together: rows of like lengths meet, and still at random."""


def padded_width(longest: int, most: int) -> int:
    """Return the columns of a padded batch whose longest row has ``longest`` tokens; rows have ``most`` at most."""
    return min(round_up(longest, _PAD_MULTIPLE), most)


@dataclass(frozen=True, slots=True)
class Collate:
    """Rows as a batch: packed ones as wide as a row can be, others as their longest row, rounded up.

    A pair is two rows: the first half of a batch has the chosen answers, the second half the rejected ones.

    Packed rows are not masked, so that models find the documents by ``position_ids``, which begin again with each. The
    rest of a row is a document of its own. Other rows are padded on the right, and masked there. Neither has a loss.
    """

    pad_id: int
    length: int
    pack: Pack

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch of ``rows``."""
        if len(rows[0]) > 3:
            sides = zip(*(_sides(*row) for row in rows), strict=True)
            *parts, references = zip(*(row for side in sides for row in side), strict=True)
            return self(list(zip(*parts, strict=True))) | {REFERENCE: torch.stack(references)}
        ids, labels, positions = zip(*rows, strict=True)
        width = self.length if self.pack else padded_width(max(map(len, ids)), self.length)

        def filled(parts: Iterable[Tensor], value: int) -> Tensor:
            return torch.stack([pad(part, (0, width - len(part)), value=value) for part in parts])

        batch = {"input_ids": filled(ids, self.pad_id)}
        if not self.pack:
            batch["attention_mask"] = filled(map(torch.ones_like, ids), 0)
        batch["labels"] = filled(labels, IGNORED)
        if self.pack is True:
            batch["position_ids"] = torch.stack(
                [torch.cat([each, torch.arange(width - len(each))]) for each in positions]
            )
        return batch


def _sides(ids: Tensor, labels: Tensor, positions: Tensor, reference: Tensor) -> list[Row]:
    """Return the chosen and the rejected answer of a pair as two rows."""
    second = int((positions == 0).nonzero()[-1])
    parts = (slice(second), slice(second, None))
    return [(ids[p], labels[p], positions[p], each) for p, each in zip(parts, reference, strict=True)]


@dataclass(kw_only=True, eq=False)
class Batches(IterableDataset[tuple[Position, Batch]]):
    """Batches, each with the position after it; every so-many-th one in each of several workers.

    All processes have the same order, and each takes its share of the batches. The position is that after the last of
    their batches. So a run goes on, with any number of processes, with the sequences of its epoch that were not taken:
    none comes twice or not at all.

    With a ``count`` of sequences iteration ends with the epoch, whose last batch has the sequences that are left. All
    processes take as many batches: with ``silent`` one that is left without takes the last one without loss. Without it
    they share the sequences that are left, and leave them out where these are fewer than processes. Without a
    ``count`` there are full batches only: when the data are over, they begin again, in another order.

    The order has no ``seed`` where it is that of the rows, and is that of the first epoch in all unless ``reshuffled``.
    With ``grouped`` batches have rows of like lengths. ``first`` is the place of the first training data, and other
    ``settings`` decide about the order, too; errors name the ``data``.
    """

    stretches: Stretches
    collate: Callable[[Sequence[Row]], Any]
    batch_size: int
    seed: int | None
    count: int | None = None
    grouped: bool = False
    reshuffled: bool = True
    silent: bool = False
    share: Share = Share()
    first: Place = (0, 0)
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""

    def __post_init__(self) -> None:
        self.moved = 0
        """Difference, in batches, between the position here and the loaded one of another number of processes."""
        self.position = _position(0, 0, self.first, 0)
        """The position after the last batch that was taken, at which the next iteration begins."""
        self._depends_on: dict[str, Any] = {name: getattr(self, name) for name in _DEPENDS_ON}
        self._depends_on |= {"first": list(self.first), **self.settings}
        self._resume = self._counts = False
        """True before the first batch after a checkpoint; if epochs are counted here, as a run goes on from one."""

    @property
    def sampler(self) -> Batches:
        """This object: Lightning sets the epoch of a batch sampler's sampler."""
        return self

    def __len__(self) -> int:
        return self._rounds(self.count or 0)

    def _rounds(self, rows: int) -> int:
        """Return the number of batches of each process with ``rows`` that are left in an epoch."""
        full, left = divmod(rows, self.batch_size * self.share.of)
        return full + (left >= (1 if self.silent else self.share.of))

    @property
    def _left(self) -> int:
        """Sequences of this epoch that no process has taken."""
        return 0 if self.count is None or self.position["window"] else self.count - self.position["used"]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch, as Lightning does.

        Where a run goes on, epochs are counted from its own: Lightning takes that for over if the run ended there by
        ``max_steps``.
        """
        if self.count is not None and not self._counts:
            self.position = self.position | {"epoch": epoch}

    def begin(self) -> None:
        """Begin an epoch: at the loaded position, if there is one and its epoch had not ended."""
        self.position = self._beginning()
        self._resume = False

    def _beginning(self) -> Position:
        # A checkpoint at the end of an epoch has a position, too: the next epoch begins at its own beginning.
        if self.count is None or (self._resume and self._rounds(self._left)):
            return self.position
        return _position(self.position["epoch"] + self._counts, 0, self.first, 0)

    def coming(self, trainer: Any, lengths: Integers) -> Iterator[Integers]:
        """Yield the numbers of the sequences, of these ``lengths``, that ``trainer`` may take of each epoch to come."""
        position, size, each = self._beginning(), self.batch_size * self.share.of, trainer.num_training_batches
        used = position["used"]
        # Lightning counts the batches of an epoch in the middle of which a run goes on.
        here = (each - (trainer.fit_loop.epoch_loop.batch_progress.current.ready if used else 0)) or each
        left = batches_of(trainer, done=trainer.global_step) if trainer.max_steps > 0 else math.inf
        epochs = None if trainer.max_epochs in (None, -1) else max(trainer.max_epochs - trainer.current_epoch, 1)
        for epoch in islice(count(position["epoch"]), epochs):
            yield self._order(lengths, epoch, 0)[used : used + int(min(here, left)) * size]
            left, here, used = left - here, each, 0
            if left <= 0:
                return

    def take(self, item: tuple[Position, Any]) -> None:
        """Note that training has taken ``item``."""
        self.position = item[0]

    def state_dict(self, *, over: bool = False) -> dict[str, Any]:
        """Return the position, and the settings that the order depends on; ``over``: the epoch ends here."""
        position = self.position
        over = over or not self._rounds(self._left)
        if self.count is not None and over:
            position = position | {"used": self.count}  # rows that are left out in one epoch are not for a later run
        done = len(self) - (0 if over else self._rounds(self._left))
        return position | {"batches": done, "processes": self.share.of, "depends_on": self._depends_on}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, by as many processes or by others.

        Raises ``ConfigError`` if the data or the settings differ, so that another order would follow.
        """
        if "depends_on" not in state:
            raise ConfigError(
                "the checkpoint does not say where in the data its run was: it is of another version of lt_offload; go "
                "on with that, or begin anew from its weights"
            )
        before, depends_on = state["processes"], state["depends_on"]
        if (depends_on["count"] is None) != (self.count is None):
            streaming = str(depends_on["count"] is None).lower()
            raise ConfigError(
                f"the checkpoint is of a run with data.streaming={streaming}; continue it with that setting"
            )
        for key, value in self._depends_on.items():
            if depends_on.get(key, value) != value:
                raise ConfigError(
                    f"cannot continue in the middle of an epoch: {key} was {depends_on[key]}, now it is {value}"
                    "; use the settings of the run that wrote the checkpoint"
                )
        self.position = {key: state[key] for key in self.position}
        self.moved = len(self) - self._rounds(self._left) - state["batches"]
        self._resume = self._counts = True
        if self.count is not None and before != (now := self.share.of):
            rank_zero_warn(
                f"the checkpoint is of a run with {before} process{'es' if before > 1 else ''}, now there "
                f"{'are' if now > 1 else 'is'} {now}: its epoch goes on with the {self._left:,} of {self.count:,} "
                f"sequences that were not trained on yet, none twice. An update takes batches of {now} instead of "
                f"{before}, unless trainer.accumulate_grad_batches makes up for it; random numbers (dropout) begin anew"
            )

    def __iter__(self) -> Iterator[tuple[Position, Any]]:
        worker = get_worker_info()
        turn, of = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rows = self._rows()
        for number in count():
            some = list(islice(rows, self.batch_size * self.share.of))
            if not self._rounds(len(some)):
                return
            if number % of == turn:
                yield _position(*some[-1][0]), self.collate(self._own([row[1:] for row in some]))

    def _own(self, some: list[tuple[Sequences, int]]) -> list[Row]:
        """Return the rows of this process of ``some`` for all."""
        size, first, of = self.batch_size, self.share.first, self.share.of
        if len(some) < size * of and not self.silent:
            numbers = np.array_split(np.arange(len(some)), of)[first]
            return [some[number][0][some[number][1]] for number in numbers]
        if own := some[first * size : (first + 1) * size]:
            return [sequences[number] for sequences, number in own]
        last = [sequences[number] for sequences, number in some[(len(some) - 1) // size * size :]]
        return [(ids, torch.full_like(labels, IGNORED), *others) for ids, labels, *others in last]

    def _rows(self) -> Iterator[tuple[tuple[int, int, Sequence[int], int], Sequences, int]]:
        """Yield sequences from the position on, as their numbers, each with the position after it."""
        epoch, stretch, place, used = (self.position[key] for key in ("epoch", "window", "place", "used"))
        while True:
            # A whole pass without a sequence, not the rest of one that a
            # run goes on in: the next one would be the same.
            barren = stretch == used == 0
            for after, rows in self.stretches((place[0], place[1])):
                order = self._order(rows.lengths, epoch, stretch)
                barren = barren and not len(rows)
                for number in range(used, len(order)):
                    # After the last of its sequences the position is where the next
                    # stretch begins: to go on, nothing is read twice.
                    over = number + 1 == len(order)
                    here = (epoch, stretch + 1, after, 0) if over else (epoch, stretch, place, number + 1)
                    yield here, rows, int(order[number])
                place, stretch, used = after, stretch + 1, 0
            if self.count is not None:
                return
            if barren:
                raise ConfigError(
                    f"{self.data} has no trainable tokens within data.max_length; raise data.max_length, lower "
                    "data.validation_rows, or check data.format and the columns"
                )
            epoch, stretch, place = epoch + 1, 0, self.first

    def _order(self, lengths: Integers, epoch: int, stretch: int) -> Integers:
        if self.seed is None:
            return np.arange(len(lengths))
        key = self.seed, epoch if self.reshuffled else 0, stretch
        return shuffled(lengths, self.batch_size if self.grouped else None, key)


def shuffled(lengths: Integers, group: int | None, key: tuple[int, int, int]) -> Integers:
    """Return the numbers of rows in an order that depends on ``key``: seed, epoch and stretch.

    Where each ``group`` of rows will be a batch, it has like ``lengths``.
    """
    # numpy's generators take no seeds below 0, which torch's do.
    random = np.random.default_rng([number % 2**64 for number in key])
    order = random.permutation(len(lengths))
    if group is None:
        return order
    full = len(order) // group * group
    parts = np.split(order[:full], range(group * _BATCHES_TO_SORT, full, group * _BATCHES_TO_SORT))
    batches = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in parts]).reshape(-1, group)
    # Sorted rows would come from short to long; so their batches
    # are shuffled, and stay batches of like lengths.
    return np.concatenate([random.permutation(batches).ravel(), order[full:]])


def _position(epoch: int, stretch: int, place: Sequence[int], used: int) -> Position:
    return {"epoch": epoch, "window": stretch, "place": list(place), "used": used}


def sizes_for(trainer: Any) -> Sizes | None:
    """Return the sizes of updates of ``trainer``, None if the tokens of an update are not needed.

    They are if an update may have several batches, one after the other or in several processes, and the module wants
    their tokens to count alike. An update ends where Lightning ends it: after as many batches of the epoch as are a
    multiple of ``accumulate_grad_batches``, and with the last one.
    """
    if trainer is None or not knows_tokens(trainer) or (batches_per_update(trainer) == 1 and not several(trainer)):
        return None

    def sizes() -> Iterator[int]:
        done, end = trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.num_training_batches
        while done < end:
            count = trainer.accumulate_grad_batches
            size = min(count - done % count, end - done)
            yield size
            done += size

    return sizes


def trained_tokens(batch: Batch) -> int:
    """Return the number of tokens with a loss: the first one of a row is never predicted."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


class ResumableLoader:
    """A loader whose position in the order of batches Lightning saves and restores with its checkpoints.

    The position is that of the batches that training has taken: workers may be ahead of it, and so are the other
    batches of an update of which the tokens are counted. It is no DataLoader, as Lightning would put an order of its
    own into one where there are several processes.

    With the ``sizes`` of updates their tokens are counted. ``length`` is the number of batches that Lightning shall
    take for an epoch of an order that has no end; the next one goes on there. ``over`` says whether Lightning's epoch
    ends here, whatever sequences are left of it.
    """

    def __init__(
        self,
        order: Batches,
        *,
        num_workers: int = 0,
        sizes: Sizes | None = None,
        length: int | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        # A generator of its own: making an iterator draws from it, and would change the dropout masks that follow.
        self.generator = torch.Generator()
        self.batch_sampler = order
        self._batches: DataLoader[Any] = DataLoader(
            order, batch_size=None, collate_fn=unchanged, num_workers=num_workers, generator=self.generator
        )
        self._sizes = sizes
        self._over = over
        self._length = len(order) if length is None else length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that workers, too, begin after Lightning has set the epoch.
        self.batch_sampler.begin()
        batches = islice(self._batches, self._length)
        for size in self._sizes() if self._sizes is not None else repeat(1, self._length):
            # All batches of an update are made before the first one is given.
            update = list(islice(batches, size))
            tokens = torch.tensor(sum(trained_tokens(batch) for _, batch in update)) if self._sizes else None
            for item in update:
                self.batch_sampler.take(item)
                yield item[1] if tokens is None else item[1] | {TOKENS: tokens}

    @property
    def dataset(self) -> range | None:
        """The numbers of the sequences of an epoch; None if the order has no end."""
        count = self.batch_sampler.count
        return None if count is None else range(count)

    @property
    def moved(self) -> int:
        """Difference, in batches, between the position here and the loaded one of another number of processes."""
        if self.batch_sampler.count is None:
            raise AttributeError("an order without an end is not divided into epochs")
        return self.batch_sampler.moved

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training order."""
        return self.batch_sampler.state_dict(over=self._over())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position in the training order."""
        self.batch_sampler.load_state_dict(state)


def unchanged(batch: Any) -> Any:
    """Return ``batch``: the collation of items that are whole already."""
    return batch


def held_out(
    count: int, *, share: float, rows: int | None = None, seed: int | None = None
) -> tuple[Integers, Integers]:
    """Return the trained and the held-out ones of ``count`` rows, both in the order of the data.

    A ``share`` is held out, at least one row unless it is 0, or a number of ``rows``: the last ones, or those that
    ``seed`` draws. Raises ``ConfigError`` if there are fewer.
    """
    few = max(round(count * share), 1 if share else 0) if rows is None else rows
    if few > count:
        raise ConfigError(f"data.validation_rows={rows} is more than the {count} rows there are; lower it")
    order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
    return np.sort(order[: count - few]), np.sort(order[count - few :])


def check_end(trainer: Any) -> None:
    """Raise ``ConfigError`` if ``trainer`` would never stop: streamed data begin again after their last row."""
    if trainer.max_steps == -1:
        raise ConfigError("data.streaming=true has no end; set trainer.max_steps")


def epoch_is_over(trainer: Any) -> bool:
    """Return whether ``trainer`` has taken all batches of its epoch, of which ``limit_train_batches`` may be few."""
    return (
        trainer is not None and trainer.fit_loop.epoch_loop.batch_progress.current.ready >= trainer.num_training_batches
    )


def batches_of(trainer: Any, *, done: int = 0) -> int:
    """Return the number of batches that ``trainer`` takes for all of its steps but those that are ``done``."""
    # The longest window of a schedule: too many batches are no matter, as steps end the run, too few are.
    return int(max(trainer.max_steps - done, 1) * batches_per_update(trainer))
