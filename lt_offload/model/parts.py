"""The samples of a batch, taken by each block a few at a time: how its arguments are cut and its outputs put together.

With ``micro_batches=k`` every block runs ``k`` times, on parts of the batch, before the next block begins: the weights
travel once for all of them, and temporary tensors are those of one part. :func:`micro_batched_reference` defines the
numbers.

Tensors with a row per sample are cut: all among a call's arguments whose first dimension is that of the block's input,
and ``alibi`` of Bloom and Falcon, which has a row per sample and head. Other tensors (masks and tables of one row,
positions) are given to every part. The output projection (``BlockKind`` ``head``) is not cut: the loss is computed of
all logits at once, or the plan computes both a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.model.blocks import Structure, find_blocks
from lt_offload.model.compiled import called, intercept
from lt_offload.model.saving import activations_of
from lt_offload.model.state.handed import WrittenContainers
from lt_offload.units import is_count

Forward = Callable[..., Any]


def check_micro_batches(value: object, *, auto: bool = False) -> None:
    """Raise ``ConfigError`` for a value that is no number of parts, nor ``"auto"`` where that may be."""
    if (auto and value == "auto") or is_count(value):
        return
    words = "at least 1, or 'auto'" if auto else "at least 1"
    raise ConfigError(f"micro_batches={value!r} must be {words}: parts of a batch that go through each block in turn")


def sizes_of(samples: int, count: int) -> list[int]:
    """Return how many samples each part has: as ``torch.tensor_split`` divides them, and none is empty."""
    count = max(1, min(count, samples))
    return [samples // count + (part < samples % count) for part in range(count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The cut of one call of a block."""

    rows: frozenset[int]
    """Positions, among the leaves of the arguments, of what has a row per sample, or several."""
    sizes: list[int]
    """Samples of each part."""
    several: Mapping[int, int] = field(default_factory=dict)
    """By such a position: how many rows a sample has, if not one."""

    def of(self, part: int, whole: Tensor) -> Tensor:
        """Return the rows of one part."""
        return whole.narrow(0, sum(self.sizes[:part]), self.sizes[part])

    def parts(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """Return the leaves of each part's arguments: views, which one node of autograd makes of each tensor."""
        # One split, not a ``narrow`` per part: the backward of each of those makes a gradient of the whole batch,
        # mostly zeros, and autograd would add them up.
        pieces = {
            at: leaves[at].split([size * self.several.get(at, 1) for size in self.sizes])
            for at in self.rows
            if leaves[at] is not None
        }
        parts = range(len(self.sizes))
        return [[pieces[at][part] if at in pieces else leaf for at, leaf in enumerate(leaves)] for part in parts]


class Cutter:
    """Cuts the calls of one block in ``count`` parts, where a batch is large enough.

    A table of one row per token has the form of one per sample where there are as many tokens as samples. Any other
    batch shows which of the two it is.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self._known: dict[tuple[str, int], bool] = {}
        """By form of the arguments and position: whether it has a row per sample."""

    def cut(self, leaves: Sequence[Any], spec: TreeSpec) -> Cut | None:
        """Return how a call with these leaves of ``(args, kwargs)`` is cut; None: it has one sample, or no tensor."""
        tensors = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim > 0]
        if not tensors:
            return None
        activations = [at for at in activations_of(leaves, spec.child(0).num_leaves) if leaves[at].ndim > 0]
        main = leaves[activations[0] if activations else tensors[0][0]]
        samples = len(main)
        sizes = sizes_of(samples, self.count)
        if len(sizes) == 1:
            return None
        form, square = str(spec), main.ndim > 1 and main.shape[1] == samples
        rows, several, names = set(), {}, _names(spec)
        for at, leaf in tensors:
            if at not in activations and _is_alibi(leaf, main, names[at]):
                several[at] = len(leaf) // samples
                rows.add(at)
                continue
            per_sample = len(leaf) == samples
            # An activation has a row per sample by definition; of a mask or a table the shape alone says nothing where
            # samples and tokens are equally many.
            if per_sample and square and leaf is not main and at not in activations:
                if (form, at) not in self._known:
                    raise UnsupportedError(
                        f"micro_batches={self.count}: block {self.name} was called with {samples} samples of {samples} "
                        "tokens, so that an argument with a row per sample cannot be told from one with a row per "
                        "token; use another batch size or sequence length"
                    )
                per_sample = self._known[form, at]
            elif not square:
                self._known[form, at] = per_sample
            if per_sample:
                rows.add(at)
        return Cut(rows=frozenset(rows), sizes=sizes, several=several)

    def refusal(self, what: str) -> UnsupportedError:
        """Return the error about outputs that cannot be put together."""
        return UnsupportedError(
            f"micro_batches={self.count}: block {self.name} {what}; let it return tensors whose first dimension is "
            "that of its input, or set micro_batches=1"
        )

    def other_outputs(self) -> UnsupportedError:
        """Return the error about parts that return different things."""
        return self.refusal(
            "returned something else for one part of the batch than for another, which cannot be put together"
        )


def _is_alibi(leaf: Tensor, main: Tensor, name: str) -> bool:
    """Return whether the argument ``name`` is Bloom's or Falcon's bias of attention: a sample's heads after each other.

    By name, as MPT's ``position_bias`` has the same form with rows of heads alone.
    """
    if name != "alibi" or leaf.ndim != 3 or main.ndim != 3:
        return False
    samples, tokens = main.shape[:2]
    return leaf.shape[1:] == (1, tokens) and len(leaf) > samples and len(leaf) % samples == 0


def _names(spec: TreeSpec) -> list[str]:
    """Return, per leaf of ``(args, kwargs)``, the keyword argument that it is in; "" for positional ones."""
    positional, named = spec.child(0), spec.child(1)
    names = [""] * positional.num_leaves
    for at, name in enumerate(named.context or ()):
        names += [name] * named.child(at).num_leaves
    return names


class Joint:
    """The tensors that every part gives, in the same places, put together by ``torch.cat``.

    Without a ``cutter``, whose errors name the block, nothing is checked: gradients.
    """

    def __init__(self, sizes: Sequence[int], cutter: Cutter | None = None, *, graph: bool = False) -> None:
        self._sizes, self._cutter, self._graph = sizes, cutter, graph
        self._columns: list[list[Tensor | None]] | None = None
        """By place: what each part has given."""

    def put(self, part: int, tensors: Sequence[Tensor | None]) -> None:
        """Add what one part has given, in any order of parts; None counts as zeros if another part has given some."""
        if self._columns is None:
            self._columns = [[None] * len(self._sizes) for _ in tensors]
        if len(self._columns) != len(tensors) and self._cutter is not None:
            raise self._cutter.other_outputs()
        for column, tensor in zip(self._columns, tensors, strict=True):
            if tensor is not None and self._cutter is not None:
                check_rows(self._cutter, tensor, self._sizes[part])
            column[part] = tensor if tensor is None or self._graph else tensor.detach()

    def results(self) -> list[Any]:
        """Return each tensor for the batch; None where no part has given one. What the parts have given is let go."""
        columns, self._columns = self._columns or [], None
        return [self._whole(columns.pop(0)) for _ in range(len(columns))]

    def _whole(self, column: list[Tensor | None]) -> Tensor | None:
        like = next((tensor for tensor in column if tensor is not None), None)
        if like is None or len(column) == 1:
            return like
        shape = like.shape[1:]
        parts = [
            like.new_zeros((size, *shape)) if tensor is None else tensor
            for size, tensor in zip(self._sizes, column, strict=True)
        ]
        return torch.cat(parts)


class Outputs:
    """Puts together what parts return, one after the other; with a ``graph`` as ``torch.cat`` of each tensor.

    Without a ``cutter`` there is one part: all of the batch.
    """

    def __init__(self, sizes: Sequence[int], cutter: Cutter | None, *, graph: bool = False) -> None:
        self._cutter = cutter
        self._joint = None if cutter is None else Joint(sizes, cutter, graph=graph)
        self._tensors: list[Tensor] = []
        """The tensors of the only part."""
        self._others: list[Any] = []
        """Leaves of what the first part has returned, with ``_TENSOR`` for each tensor."""
        self._spec: TreeSpec | None = None
        """None: it has returned one tensor."""

    def put(self, part: int, out: Any) -> list[Tensor]:
        """Add what one part has returned, the first part first; return the tensors among it."""
        tensors, others, spec = [out], [_TENSOR], None
        if type(out) is not Tensor:  # mostly it is: this is done for every block of a step
            leaves, spec = tree_flatten(out)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        del out
        if part == 0:
            self._others, self._spec = others, spec
        if self._joint is None or self._cutter is None:
            self._tensors = [tensor.detach() for tensor in tensors]
            return tensors
        if spec != self._spec:
            raise self._cutter.other_outputs()
        for values in zip(self._others, others, strict=True):
            check_same(self._cutter, values)
        self._joint.put(part, tensors)
        return tensors

    def tensors(self) -> list[Tensor]:
        """Return the tensors for the batch, once."""
        tensors, self._tensors = self._tensors, []
        return tensors if self._joint is None else self._joint.results()

    def whole(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the block returns for the batch, with these ``tensors`` in place, once."""
        # Without this, a container that the block has made would refer to itself: by way of tensors, graph and run.
        (others, self._others), each = (self._others, []), iter(tensors)
        if self._spec is None:
            return tensors[0]
        return tree_unflatten([next(each) if leaf is _TENSOR else leaf for leaf in others], self._spec)


_TENSOR = object()
"""Stands where an output is a tensor."""


def check_rows(cutter: Cutter, tensor: Tensor, size: int) -> None:
    """Refuse an output that has not ``size`` rows."""
    if tensor.ndim == 0 or len(tensor) != size:
        shape = list(tensor.shape)
        raise cutter.refusal(f"returned a tensor of shape {shape} for {size} samples, which has no row per sample")


def check_same(cutter: Cutter, values: Sequence[Any]) -> None:
    """Refuse other outputs than tensors that differ between parts."""
    if isinstance(values[0], WrittenContainers):
        raise cutter.refusal(
            "writes to a container or object that it is given, or returns an object with tensors, which cannot be put "
            "together from several parts of a batch"
        )
    if any(value is not values[0] and value != values[0] for value in values):
        raise cutter.other_outputs()


def in_parts(forward: Forward, cutter: Cutter) -> Forward:
    """Return ``forward`` of a block, run on parts of its batch: the definition of the numbers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        cut = cutter.cut(leaves, spec)
        if cut is None:
            return forward(*args, **kwargs)
        del args, kwargs
        outputs = Outputs(cut.sizes, cutter, graph=True)
        for part, mine in enumerate(cut.parts(leaves)):
            args, kwargs = tree_unflatten(mine, spec)
            outputs.put(part, forward(*args, **kwargs))
        return outputs.whole(outputs.tensors())

    return run


def check_samples(batch: Any, micro_batches: int) -> None:
    """Raise ``ConfigError`` if there are more parts than ``batch`` has samples."""
    check_micro_batches(micro_batches)
    samples, _ = extent(batch)
    if micro_batches > samples:
        raise ConfigError(
            f"micro_batches={micro_batches} is more than the {samples} samples of the batch; set micro_batches="
            f"{samples} or less, or use larger batches"
        )


def extent(batch: Any) -> tuple[int, int]:
    """Return batch size and sequence length: the sizes of the token ids, or of the first tensor that has two.

    Images and rows of features are no sequences: their length is 1.
    """
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        leaves.insert(0, batch["input_ids"])
    first = next((leaf for leaf in leaves if leaf.ndim >= 2), None)
    if first is None:
        return next((leaf.shape[0] for leaf in leaves[:1] if leaf.ndim), 1), 1
    of_tokens = first.ndim == (3 if first.is_floating_point() else 2)
    return first.shape[0], first.shape[1] if of_tokens else 1


def cutters(structure: Structure, count: int) -> list[Cutter | None]:
    """Return what cuts the calls of each block; None for those that take the whole batch."""
    return [Cutter(b.name, count) if count > 1 and b.kind != "head" else None for b in structure.blocks]


@contextmanager
def micro_batched_reference(model: nn.Module, micro_batches: int, *, blocks: str | None = None) -> Iterator[None]:
    """Let ``model`` compute, in plain PyTorch, the numbers that training with ``micro_batches`` above 1 gives.

    This is the definition: within the context the forward of each block but the output projection is
    ``torch.cat([block(part) for part in parts])``, nothing else. So the gradients of a weight are summed over the parts
    as autograd does, the last part's first, and random numbers are drawn part by part. ``parts`` are those of
    ``torch.tensor_split`` by the first dimension; a batch of fewer samples than ``micro_batches`` has as many parts as
    samples, and forwards without gradients (validation) take the whole batch.

    Args:
        model: a model with a block sequence.
        micro_batches: parts of a batch.
        blocks: name of what holds the model's layers; None: it is found by structure.

    Raises:
        ConfigError: if ``micro_batches`` is less than 1.
        ModelError: if the model has no block sequence.
        UnsupportedError: from a call, if a block cannot be cut.
    """
    check_micro_batches(micro_batches)
    structure = find_blocks(model, blocks)
    with ExitStack() as undo:
        for block, cutter in zip(structure.blocks, cutters(structure, micro_batches), strict=True):
            if cutter is not None:
                whole = called(block.module)
                parted = partial(_where_graded, in_parts(whole, cutter), whole)
                undo.callback(intercept(block.module, parted))
        yield


def _where_graded(parted: Forward, whole: Forward, *args: Any, **kwargs: Any) -> Any:
    return (parted if torch.is_grad_enabled() else whole)(*args, **kwargs)
