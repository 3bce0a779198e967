"""Tokenised documents, and sequences of them: one document, several side by side, or a stretch of running text.

A packed sequence has several documents, and ``position_ids`` that begin again with each of them. ``transformers`` makes
the mask that keeps them apart from these alone, if a model asks it for its mask, passes the positions on, and mixes
tokens nowhere else. Others read across documents without a word, so that only models that were tried are let through.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.formats import IGNORED, Example

if TYPE_CHECKING:
    import datasets

Tokens = NDArray[Any]
Integers = NDArray[np.int64]
_AT_ONCE = 1000
"""Documents that are read at a time."""
MOST_NAMED = 3
"""Rows that a message names."""


class Documents(Sequence[Example]):
    """Tokenised rows, in order: the columns ``ids``, ``labels``, ``second`` and ``place`` (file, row) of a data set.

    ``bad`` is the number of rows that were left out.
    """

    def __init__(self, dataset: datasets.Dataset, *, bad: int = 0) -> None:
        self.dataset = dataset
        self.bad = bad
        self._rows = dataset.select_columns(["ids", "labels"]).with_format("arrow")
        self.lengths = np.concatenate([np.empty(0, np.int64), *(lengths for lengths, _ in self._labels())])
        """Tokens of each document."""
        self.seconds: Integers = np.asarray(dataset.with_format("numpy")["second"][:], np.int64)
        """The places at which rejected answers of pairs begin; 0: no pair."""

    @classmethod
    def from_examples(cls, examples: Iterable[Example]) -> Documents:
        """Return ``examples`` as documents."""
        from datasets import Dataset, concatenate_datasets

        rest, features, parts = iter(examples), features_of_rows(), list[Dataset]()
        while (some := list(islice(rest, _AT_ONCE))) or not parts:
            columns = {name: [getattr(each, name) for each in some] for name in features}
            parts.append(Dataset.from_dict(columns, features=features))
        return cls(concatenate_datasets(parts))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = self.dataset[index]
        return Example(**{name: row[name] for name in ("ids", "labels", "second", "place")})

    def select(self, numbers: Integers) -> Documents:
        """Return the documents with these ``numbers``."""
        return Documents(self.dataset.select(numbers))

    def read(self, documents: Sequence[int]) -> list[tuple[Tokens, Tokens]]:
        """Return ids and labels of some documents."""
        some = self._rows[list(documents)]
        columns = ([tokens.values.to_numpy() for tokens in some[name]] for name in ("ids", "labels"))
        return list(zip(*columns, strict=True))

    def trained(self, most: int) -> tuple[Integers, Integers]:
        """Return the number of learned tokens of each document: in all, and of the first ``most`` tokens.

        The first token is never learned, as nothing comes before it.
        """
        stops = np.stack([self.lengths, np.minimum(self.lengths, most)], 1)
        whole, cut = self.learned(np.zeros_like(stops), stops).T
        return whole, cut

    def learned(self, starts: Integers, stops: Integers) -> Integers:
        """Return the number of learned tokens of stretches of each document, ``[documents, stretches]``.

        The first token of a stretch is never learned.
        """
        counts, done = [], 0
        for lengths, labels in self._labels():
            # With sums up to every token, how many of any stretch are
            # learned is one difference, for all documents at once.
            sums = np.concatenate([[0], np.cumsum(labels != IGNORED)])
            begin, some = (np.cumsum(lengths) - lengths)[:, None], slice(done, done + len(lengths))
            end = begin + stops[some]
            counts.append(sums[end] - sums[np.minimum(begin + starts[some] + 1, end)])
            done = some.stop
        return np.concatenate([np.empty((0, starts.shape[1]), np.int64), *counts])

    def checksum(self) -> int:
        """Return a number that tells these tokens and labels from others."""
        sum_so_far = 0
        for batch in self._rows.iter(_AT_ONCE):
            for column in (batch[name].combine_chunks() for name in ("ids", "labels")):
                for part in (column.value_lengths(), column.flatten()):
                    sum_so_far = zlib.crc32(part.to_numpy(), sum_so_far)
        return sum_so_far

    def _labels(self) -> Iterator[tuple[Integers, Tokens]]:
        """Yield the lengths and labels of all documents, some at a time."""
        for batch in self._rows.iter(_AT_ONCE):
            column = batch["labels"].combine_chunks()
            yield column.value_lengths().to_numpy().astype(np.int64), column.flatten().to_numpy()


def features_of_rows() -> datasets.Features:
    """Return the columns of tokenised rows."""
    from datasets import Features, List, Value

    tokens = List(Value("int32"))
    return Features({"ids": tokens, "labels": tokens, "second": Value("int64"), "place": Value("string")})


def named(documents: Documents, numbers: Integers, text: str) -> str:
    """Return ``text`` with the files and rows of the first ones of these ``numbers``; nothing if there are none."""
    places = [documents[int(number)].place for number in numbers[:MOST_NAMED]]
    return text.format(", ".join(places) + ", ..." * (len(numbers) > MOST_NAMED)) if places else ""


Pack = bool | Literal["wrapped"]
Row = tuple[Tensor, ...]
"""Ids, labels and positions; of a pair, its reference, too."""


PACKABLE = frozenset(
    {
        "apertus", "arcee", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text",
        "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "granitemoe", "helium",
        "hunyuan_v1_dense", "llama", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo",
        "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
    }
)  # fmt: skip
"""Model types with which a test found a document's logits equal, bit for bit, whatever the other documents are.

In a mixture of experts logits change by the rounding of the experts' batches, as with any other row of a batch.
"""

_VARYING_ROPE = ("dynamic", "longrope")
"""Rotations that change for a whole batch once one of its documents is longer than the model was trained for."""


def pieces_of(documents: Documents, length: int) -> tuple[Integers, list[str], Integers]:
    """Return the pieces of ``documents`` with at most ``length`` tokens, what is lost, and documents without any piece.

    A piece is a line ``(document, start, stop)`` of an array. A document whose tokens are all learned is split if it is
    longer. Each piece but the first begins with the last token of the piece before: so every token of the document is
    predicted once. Where only responses are learned, an end without its question teaches little, and a document is cut.
    """
    lengths = documents.lengths
    learned, before_cut = documents.trained(length)
    split = (lengths > length) & (learned == lengths - 1)
    cut = (lengths > length) & ~split
    kept = np.where(cut, before_cut, learned) > 0
    counts = kept.astype(np.int64)
    # The last token of a piece is the first one of the next, and not predicted again there: a piece
    # predicts length - 1 tokens, and all together predict each token but the first one.
    counts[split] = -(-(lengths[split] - 1) // (length - 1))
    document = np.repeat(np.arange(len(documents)), counts)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * (length - 1)
    cuts, empty, left_out = int((cut & kept).sum()), int((learned == 0).sum()), np.flatnonzero(~kept)
    losses = []
    if cuts:
        tokens = int((learned - before_cut)[cut].sum())
        losses.append(f"data.max_length={length} cuts {cuts:,} rows, and loses {tokens:,} tokens to learn")
    if behind := len(left_out) - empty:
        losses.append(f"{behind:,} rows have their whole answer behind data.max_length={length}: raise it")
    if empty:
        losses.append(f"{empty:,} rows have no answer or text to learn")
    pieces = np.stack([document, start, np.minimum(start + length, lengths[document])], axis=1)
    return pieces, losses, left_out


def best_fit(lengths: Integers, capacity: int) -> list[list[int]]:
    """Return bins of at most ``capacity``: the longest first, each into the fullest bin that has room for it.

    Among bins with the same room the one that has had it for longest is taken. Ties between lengths keep their order.
    """
    waiting: list[deque[int]] = [deque() for _ in range(capacity + 1)]
    rooms = 0  # bit n: there is a bin with room n; its lowest bit from n on is the fullest bin with room for n
    bins: list[list[int]] = []
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = waiting[room].popleft()
            if not waiting[room]:
                rooms ^= 1 << room
            bins[number].append(item)
            room -= length
        else:
            number, room = len(bins), capacity - length
            bins.append([item])
        if room:
            waiting[room].append(number)
            rooms |= 1 << room
    return bins


class Sequences(Dataset[Row]):
    """Rows of pieces, put together when they are asked for: item ``i`` is ``(ids, labels, positions)``.

    ``pieces`` has a line ``(document, start, stop)`` for each, and row ``i`` the next ``counts[i]`` of them. Those that
    are ``apart`` begin anew: with position 0, and with a token that is not predicted from the one before.
    """

    losses: Sequence[str] = ()
    """The losses in a few words each: rows that are too long, or have nothing to learn."""
    left_out: Integers = np.empty(0, np.int64)
    """Numbers of documents of which nothing is learned."""
    reference: Tensor | None = None
    """Log-probabilities of the chosen and the rejected answers of pairs, ``[rows, 2]``, NaN as long as not known."""

    def __init__(self, documents: Documents, pieces: Integers, counts: Integers, *, apart: bool) -> None:
        self.documents = documents
        self.pieces = pieces
        self._counts = counts
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._apart = apart
        tokens = np.concatenate([np.zeros(1, np.int64), np.cumsum(pieces[:, 2] - pieces[:, 1])])
        self.lengths: Integers = np.diff(tokens[self._bounds])
        """Tokens of each row."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        row = self.row(index)
        parts = zip(row, self.documents.read([document for document, _, _ in row]), strict=True)
        cut = [[tokens[start:stop] for tokens in of_document] for (_, start, stop), of_document in parts]
        ids, labels = (np.concatenate(each).astype(np.int64) for each in zip(*cut, strict=True))
        positions = np.arange(len(ids))
        if self._apart:
            # Models find where a document begins by its position 0. Its first token follows
            # another document's last one, from which it must not be predicted.
            positions = np.concatenate([np.arange(stop - start) for _, start, stop in row])
            labels[positions == 0] = IGNORED
        made = torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(positions)
        return made if self.reference is None else (*made, self.reference[index])

    @property
    def longest(self) -> Integers:
        """Tokens of the longest piece of each row."""
        tokens = self.pieces[:, 2] - self.pieces[:, 1]
        return np.maximum.reduceat(tokens, self._bounds[:-1]) if len(tokens) else tokens

    def take(self, numbers: Integers) -> Sequences:
        """Return the rows with these ``numbers``."""
        counts = self._counts[numbers]
        order = np.repeat(self._bounds[numbers] - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        rows = Sequences(self.documents, self.pieces[order], counts, apart=self._apart)
        rows.reference = None if self.reference is None else self.reference[numbers]
        return rows

    def row(self, index: int) -> list[list[int]]:
        """Return the pieces of a row."""
        pieces: list[list[int]] = self.pieces[self._bounds[index] : self._bounds[index + 1]].tolist()
        return pieces


def sequences_of(documents: Documents, length: int, pack: Pack) -> Sequences:
    """Return ``documents`` as rows of at most ``length`` tokens, by ``data.pack``.

    Packed rows have as many pieces as best fit finds room for, others one each.
    """
    if documents.seconds.any():
        return pairs(documents, length)
    if pack == "wrapped":
        return wrapped(documents, length)
    pieces, losses, left_out = pieces_of(documents, length)
    bins = best_fit(pieces[:, 2] - pieces[:, 1], length) if pack else [[number] for number in range(len(pieces))]
    order = np.fromiter((number for each in bins for number in each), np.int64)
    rows = Sequences(documents, pieces[order], np.fromiter(map(len, bins), np.int64), apart=True)
    rows.losses, rows.left_out = losses, left_out
    return rows


def pairs(documents: Documents, length: int) -> Sequences:
    """Return pairs as rows of two pieces, the chosen answer and the rejected one, each cut to ``length`` tokens.

    Pairs of which an answer has nothing to learn before that are left out.
    """
    starts = np.stack([np.zeros_like(documents.seconds), documents.seconds], 1)
    whole = np.stack([documents.seconds, documents.lengths], 1)
    stops = np.minimum(whole, starts + length)
    kept = (documents.learned(starts, stops) > 0).all(1)
    numbers, left_out = np.flatnonzero(kept), np.flatnonzero(~kept)
    pieces = np.stack([np.repeat(numbers, 2), starts[kept].ravel(), stops[kept].ravel()], 1)
    rows = Sequences(documents, pieces, np.full(len(numbers), 2), apart=True)
    cuts = int((whole > stops)[kept].any(1).sum())
    rows.losses = [f"data.max_length={length} cuts {cuts:,} pairs"] if cuts else []
    if len(left_out):
        rows.losses.append(f"{len(left_out):,} pairs have an answer without words within data.max_length={length}")
    rows.left_out, rows.reference = left_out, torch.full((len(numbers), 2), math.nan)
    return rows


def wrapped(documents: Documents, length: int) -> Sequences:
    """Return ``documents`` as running text, cut into rows of ``length`` tokens; the last may be shorter.

    Rows without anything to learn are left out.
    """
    stops = np.cumsum(documents.lengths)
    total = int(stops[-1]) if len(stops) else 0
    # A piece ends where a document or a row does.
    ends = np.unique(np.concatenate([stops, np.arange(length, total, length)]))
    ends = ends[ends > 0]
    begins = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    document = np.searchsorted(stops, begins, side="right")
    offset = (stops - documents.lengths)[document]
    pieces = np.stack([document, begins - offset, ends - offset], axis=1)
    rows = Sequences(documents, pieces, np.unique(begins // length, return_counts=True)[1], apart=False)
    # A stretch of running text may lie within what is not learned, as in long prompts. Rows
    # of nothing but text are not made to be looked at: that takes long where there are many.
    text = documents.trained(length)[0] == documents.lengths - 1
    learned = [
        number
        for number in range(len(rows))
        if (rows.lengths[number] > 1 and all(text[each[0]] for each in rows.row(number)))
        or (rows[number][1][1:] != IGNORED).any()
    ]
    return rows.take(np.asarray(learned, np.int64))


def check_packing(config: Any, *, max_length: int, attention: str | None = None, batch_size: int = 1) -> None:
    """Raise ``ConfigError`` if a model of ``config`` does not keep packed documents apart, or nobody has tried."""
    way_out = (
        "set data.pack=false (data.group_by_length=true keeps padding small), or data.pack=wrapped for running text, "
        "where documents may read each other"
    )
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in PACKABLE:
        raise ConfigError(
            f"data.pack=true: models of type {kind!r} are not known to keep the documents of a row apart; {way_out}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if rope.get("rope_type") in _VARYING_ROPE and trained is not None and max_length > trained:
        raise ConfigError(
            f"data.pack=true: beyond {trained} tokens this model turns positions differently for all documents of a "
            f"batch; set data.max_length={trained} or less, or data.pack=false"
        )
    if attention is not None and attention.startswith("flash_attention") and batch_size > 1:
        raise ConfigError(
            f"data.pack=true: model.attention={attention} finds documents where a batch is one row, and "
            f"data.batch_size is {batch_size}; set data.batch_size=1 (a larger data.max_length packs as many tokens), "
            "or model.attention=sdpa"
        )
