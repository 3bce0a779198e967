"""Turns the relaxed program's fractions of activation options into one option per block. Knows nothing of solvers.

Independent rounding of every block often breaks the memory rows, because the bytes that early blocks hold count in all
steps between their forward and their backward. Two rules avoid that: the error of each decision is carried to the next
similar block, so that every stretch of blocks gets its share of each option; and the bytes held by any prefix of the
blocks never exceed those of the relaxed solution.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

_SLACK = 1e-9


def round_options(
    fractions: Sequence[Sequence[float]], held: Sequence[Sequence[float]], kinds: Sequence[Hashable]
) -> tuple[int, ...]:
    """Return the index of the chosen option of every block.

    Args:
        fractions: per block, the relaxed weight of each of its options; they sum to 1.
        held: per block, the bytes each option holds on the device between forward and backward.
        kinds: per block, what its options are; the rounding error is carried between blocks of equal kind.

    The choice satisfies, for every prefix of the blocks, ``sum(held chosen) <= sum(fractions * held)``.
    """
    chosen: list[int] = []
    carry: dict[Hashable, NDArray[np.float64]] = {}
    relaxed_held = chosen_held = 0.0
    for weights, sizes, kind in zip(fractions, held, kinds, strict=True):
        share = np.clip(np.asarray(weights, dtype=np.float64), 0.0, None)
        share /= share.sum()
        size = np.asarray(sizes, dtype=np.float64)
        relaxed_held += float(share @ size)
        wish = share + carry.get(kind, 0.0)
        allowed = chosen_held + size <= relaxed_held * (1 + _SLACK)
        # The smallest option always keeps the promise; the explicit term only guards against floating point.
        allowed[np.argmin(size)] = True
        best = int(np.argmax(np.where(allowed, wish, -np.inf)))
        wish[best] -= 1.0
        carry[kind] = wish
        chosen_held += float(size[best])
        chosen.append(best)
    return tuple(chosen)
