"""The samples of an update, split into batches and their parts, and the splits that may be chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lt_offload.errors import ConfigError

LARGEST = 1024
"""Larger updates are not considered, unless asked for by name."""


class Split(NamedTuple):
    """The samples of an update, as batches and their parts; of one number of samples the simplest comes first."""

    samples: int
    accumulate: int = 1
    parts: int = 1

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self.samples // self.accumulate

    @property
    def rows(self) -> int:
        """Samples of the largest part of a batch."""
        return math.ceil(self.batch_size / self.parts)

    @property
    def settings(self) -> str:
        """The settings of this split, as the user writes them."""
        more = {"micro_batches": self.parts, "accumulate_grad_batches": self.accumulate}
        return ", ".join(
            f"{name}={value}"
            for name, value in ({"batch_size": self.batch_size} | more).items()
            if value > 1 or name == "batch_size"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The updates to choose from."""

    most: int = LARGEST
    """Samples per update, at most."""
    samples: int | None = None
    """Samples per update, where they are given and the choice is how to split them."""
    batch_size: int | None = None
    """Samples of a batch, where they are given."""
    parts: int | Literal["auto"] = 1
    """Parts of a batch; ``"auto"``: 1, 2, 4 and so on, up to one for each sample."""
    accumulate: int | None = None
    """Batches per update; None: any number."""

    @property
    def unit(self) -> int:
        """The smallest number of samples per update."""
        return self.samples or (self.batch_size or (1 if self.parts == "auto" else self.parts)) * (self.accumulate or 1)

    @property
    def sizes_differ(self) -> bool:
        """True if there are several numbers of samples."""
        return self.samples is None and (self.batch_size is None or self.accumulate is None)

    def check(self) -> None:
        """Raise ``ConfigError`` if there is nothing to choose from."""
        if self.most < 1:
            raise ConfigError(f"there is no batch size to choose from: most={self.most}")
        if not any(self.splits(self.unit)):
            largest = min(self.most, self.samples or self.most, self.batch_size or self.most)
            raise ConfigError(
                f"micro_batches={self.parts} is more than the {largest} samples that a batch may have at most; set "
                f"micro_batches={largest} or less, or 'auto'"
            )

    def splits(self, samples: int) -> Iterator[Split]:
        """Yield the splits of an update of so many samples, ascending."""
        for accumulate in (self.accumulate,) if self.accumulate else range(1, samples + 1):
            size, left = divmod(samples, accumulate)
            if left or size > self.most or self.batch_size not in (None, size):
                continue
            counts = [1 << n for n in range(size.bit_length())] if self.parts == "auto" else [self.parts]
            yield from (Split(samples, accumulate, parts) for parts in counts if parts <= size)
