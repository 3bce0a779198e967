"""The batch to plan for: the largest that a dataset can give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, islice
from typing import Any

from torch import Tensor

from lt_offload.compat.hugging_face import train_batch_size
from lt_offload.compat.torch import tree_map
from lt_offload.model.batch import Size
from lt_offload.model.snapshot import untouched

_CHUNK = 10_000
"""Rows whose lengths are read at a time."""
_MOST = 100_000
"""The longest list whose rows are measured."""


def on_host(batch: Any) -> Any:
    """Return ``batch`` in host memory."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, batch)


def largest(trainer: Any, loader: Any, first: Any, wanted: Any = None) -> Any:
    """Return the batch to plan for: the one that is ``wanted``, or the largest that ``loader`` can give.

    Args:
        trainer: owner of ``loader``.
        loader: the training's.
        first: a batch of ``loader``.
        wanted: the user's ``sample_batch``, if there is one.
    """
    if wanted is not None:
        return wanted
    return max([first, *of_rows(loader, train_batch_size(trainer))], key=Size.of)


def first(loader: Any) -> list[Any]:
    """Return the first batch of ``loader``, if there is one, without a trace in its state."""
    with untouched(loader=loader, dataset=getattr(loader, "dataset", None)):
        return list(islice(loader, 1))


def of_rows(loader: Any, size: int) -> list[Any]:
    """Return batches of the ``size`` longest rows of the dataset of ``loader``; none if lengths cannot be known.

    A row may have several columns of tokens, which a collator puts one after another or side by side: what is longest
    depends on that, so that there is a batch for every column and for every sum of two or all of them. And one in which
    the shortest row of all is filled up.
    """
    dataset: Any = getattr(loader, "dataset", None)
    collate: Any = getattr(loader, "collate_fn", None)
    columns = _lengths(dataset)
    if not columns or collate is None:
        return []
    total = _sum(columns)
    choices = [_top(lengths, size) for lengths in [*columns, *map(_sum, combinations(columns, 2)), total]]
    choices += [[*rows[:-1], min(range(len(total)), key=total.__getitem__)] for rows in choices if size > 1]
    with untouched(collate=collate):
        return [collate([dataset[row] for row in rows]) for rows in dict.fromkeys(map(tuple, choices))]


def _top(lengths: Sequence[int], count: int) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])[:count]


def _sum(columns: Iterable[Sequence[int]]) -> list[int]:
    return [sum(lengths) for lengths in zip(*columns, strict=True)]


def _lengths(dataset: Any) -> list[list[int]]:
    """Return, for each column of ``dataset`` with lists, the lengths of these in all rows; nothing for others."""
    columns = _of_arrow(dataset) if hasattr(dataset, "with_format") else _of_list(dataset)
    return list({tuple(lengths): lengths for lengths in columns}.values())


def _of_arrow(dataset: Any) -> list[list[int]]:
    import pyarrow
    from pyarrow import compute

    # Rows that a transform of the user's makes may be of any length, whatever the table says.
    if not hasattr(dataset, "features") or not hasattr(dataset, "__len__") or dataset.format["type"] == "custom":
        return []
    columns: dict[str, list[int]] = {}
    for table in dataset.with_format("arrow").iter(batch_size=_CHUNK):
        for name in table.column_names:
            kind = table.schema.field(name).type
            if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
                lengths = compute.list_value_length(table.column(name)).fill_null(0)
                columns.setdefault(name, []).extend(lengths.to_pylist())
    return list(columns.values())


def _of_list(dataset: Any) -> list[list[int]]:
    if not isinstance(dataset, (list, tuple)) or not dataset or len(dataset) > _MOST:
        return []
    if not all(isinstance(row, dict) and row.keys() == dataset[0].keys() for row in dataset):
        return []
    names = [name for name, value in dataset[0].items() if _has_length(value)]
    return [[len(row[name]) if _has_length(row[name]) else 0 for row in dataset] for name in names]


def _has_length(value: Any) -> bool:
    ndim = getattr(value, "ndim", 1)
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes, dict)) and ndim > 0
