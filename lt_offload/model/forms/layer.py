"""A linear layer whose weight is stored in a form, and the product that opens it.

The pieces of a weight are frozen parameters like any other. The product opens them, and again in its backward: it saves
the pieces alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from lt_offload.model.forms.base import Layout, StorageForm

STORED = "stored_weights"
"""The attribute of a module that says which of its weights are stored: by name, a :class:`Stored` each."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight that is stored in a form: a matrix, or one per expert."""

    form: StorageForm
    shape: tuple[int, ...]
    """Of the weight."""
    dtype: torch.dtype
    """Of the weight, as it was before and will be when it is opened for good."""
    transposed: bool = False
    """The weights of experts have a row per input."""

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of one matrix, with a row per output."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    def names(self, name: str) -> list[str]:
        """Return the names of the pieces of the weight that is called ``name``."""
        count = len(self.form.layout(self.matrix))
        return [name, *(f"{name}_{suffix}" for suffix in self.form.suffixes[: count - 1])]

    def layout(self) -> Layout:
        """Return shapes and dtypes of the pieces."""
        experts = self.shape[:-2]
        return tuple(((*experts, *shape), dtype) for shape, dtype in self.form.layout(self.matrix))

    def close(self, weight: Tensor, worker: torch.device) -> list[Tensor]:
        """Return the pieces of ``weight``, where it is; they are made on ``worker``, a matrix at a time."""
        if weight.is_meta:
            return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.layout()]
        if weight.dim() == 2:
            return [piece.to(weight.device) for piece in self.form.close(weight.to(self.dtype).to(worker))]
        return self.close_each(weight, worker)

    def close_each(self, matrices: Iterable[Tensor], worker: torch.device) -> list[Tensor]:
        """Return the pieces of a matrix per expert, as the weight has them, on the device where they are."""
        closed = []
        for matrix in matrices:
            of_outputs = matrix.t() if self.transposed else matrix
            pieces = self.form.close(of_outputs.to(self.dtype).to(worker).contiguous())
            closed.append(tuple(piece.to(matrix.device) for piece in pieces))
        return [*self.form.stack(closed)]

    def open(self, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the matrix of ``pieces``, with a row per output."""
        return self.form.open(pieces, self.matrix, dtype)

    def open_all(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the weight as it was, with the numbers that its form has kept."""
        if len(self.shape) == 2:
            return self.open(pieces, self.dtype)
        weight = torch.empty(self.shape, dtype=self.dtype, device=pieces[0].device)
        for number, matrix in enumerate(weight):
            opened = self.open([piece[number] for piece in pieces], self.dtype)
            matrix.copy_(opened.t() if self.transposed else opened)
        return weight


def stored_of(module: nn.Module) -> dict[str, Stored]:
    """Return the weights of ``module`` itself that are stored, by name."""
    stored: dict[str, Stored] = vars(module).get(STORED, {})
    return stored


def pieces_of(module: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the pieces of a stored weight of ``module``."""
    return [getattr(module, piece) for piece in stored_of(module)[name].names(name)]


def put(module: nn.Module, name: str, stored: Stored, pieces: Sequence[Tensor]) -> None:
    """Let ``module`` have ``pieces`` for its weight ``name``; parameters among them are those of a tied weight."""
    setattr(module, STORED, stored_of(module) | {name: stored})
    for piece, tensor in zip(stored.names(name), pieces, strict=True):
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        module.register_parameter(piece, parameter)


def take(module: nn.Module, name: str, opened: dict[nn.Parameter, nn.Parameter] | None = None) -> None:
    """Let ``module`` have the opened weight ``name`` again, frozen, instead of its pieces.

    ``opened``: weights by the first of their pieces; the one that another module has of the same pieces is taken.
    """
    stored, pieces = stored_of(module)[name], pieces_of(module, name)
    opened = {} if opened is None else opened
    if pieces[0] not in opened:
        weight = stored.open_all([piece.data for piece in pieces])
        opened[pieces[0]] = nn.Parameter(weight, requires_grad=False)
    for piece in stored.names(name)[1:]:
        delattr(module, piece)
    module.register_parameter(name, opened[pieces[0]])
    vars(module)[STORED] = {other: kept for other, kept in stored_of(module).items() if other != name}


class StoredLinear(nn.Linear):
    """The class of an ``nn.Linear`` while its weight is stored: ``weight`` is the first of its pieces.

    It computes in the dtype of its input, or in that of ``torch.autocast``. The module stays the same object, with the
    hooks and the names that it has.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        stored, pieces = stored_of(self)["weight"], pieces_of(self, "weight")

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            return _Product.apply(x, bias, stored, *pieces)  # type: ignore[no-untyped-call,no-any-return]

        return in_autocast(product, input, self.bias)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, form={stored_of(self)['weight'].form.name}"


def in_autocast(compute: Callable[..., Tensor], x: Tensor, *others: Tensor | None) -> Tensor:
    """Return ``compute`` of tensors; under ``torch.autocast`` in its dtype, which no operation within sees then."""
    if not torch.is_autocast_enabled(x.device.type):
        return compute(x, *others)
    dtype = torch.get_autocast_dtype(x.device.type)
    cast = [tensor if tensor is None else tensor.to(dtype) for tensor in (x, *others)]
    with torch.autocast(x.device.type, enabled=False):
        return compute(*cast)


class _Product(torch.autograd.Function):
    """``nn.functional.linear`` with a matrix that is opened in the forward, and again in the backward: its numbers."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, stored: Stored, *pieces: Tensor) -> Tensor:
        ctx.stored = stored
        ctx.save_for_backward(*pieces)
        return functional.linear(x, stored.open(pieces, x.dtype), bias)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        pieces = ctx.saved_tensors
        (grad,) = grads
        into = grad @ ctx.stored.open(pieces, grad.dtype) if ctx.needs_input_grad[0] else None
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return into, of_bias, None, *(None for _ in pieces)
