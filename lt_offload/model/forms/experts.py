"""Experts whose weights are stored: each is opened when it is its turn, once per pass, in the order of their numbers.

Experts of transformers are modules with a parameter for all experts. They choose how they compute by a name in their
configuration: ours is registered, and a module whose weights are stored has a copy of the configuration with that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lt_offload.compat.hugging_face import experts_weights, gated_by, use_experts, without_experts
from lt_offload.compat.torch import is_fake
from lt_offload.machine.dispatch import repeated
from lt_offload.model.forms.layer import Stored, in_autocast, pieces_of, stored_of, take

ADAPTERS = "expert_adapters"
"""The attribute of a module with stored experts that has the adapters of the present call."""
Factors = tuple[Tensor, Tensor, float]
"""Two matrices per expert, whose product with the scale is what an adapter adds to the expert's matrix."""


def experts_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield the modules of experts in ``model``, by name, with the names of their weights."""
    for name, module in model.named_modules():
        weights = experts_weights(module)
        if weights:
            yield name, module, weights


def is_routed(module: nn.Module) -> bool:
    """Return whether the stored weights of ``module`` are those of experts, of which tokens choose some."""
    return any(len(stored.shape) > 2 for stored in stored_of(module).values())


def compute_stored(module: nn.Module) -> None:
    """Let a module of experts compute with its stored weights."""
    use_experts(module, experts_forward)


def open_experts(module: nn.Module) -> None:
    """Let a module of experts have its weights again."""
    for name in [*stored_of(module)]:
        take(module, name)
    without_experts(module)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return what the chosen experts make of each token, as the functions of transformers do.

    Tokens are sorted by experts, so that those of one lie side by side.
    """
    tokens, chosen = top_k_index.shape
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = _counts(experts, self.num_experts)
    first = "gate_up_proj" if self.has_gate else "up_proj"
    hidden = _layer(self, first, hidden_states[order // chosen], experts, counts)
    hidden = gated_by(self, hidden) if self.has_gate else self.act_fn(hidden)
    hidden = _layer(self, "down_proj", hidden, experts, counts)
    if getattr(self, "has_post_expert_norm", False):
        hidden = self.post_expert_norm(hidden)
    weighted = hidden * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return weighted[back].view(tokens, chosen, -1).sum(dim=1).to(hidden_states.dtype)


def _counts(experts: Tensor, number: int) -> list[int]:
    """Return how many rows each expert has; without numbers, all have as many."""
    if is_fake(experts) or experts.is_meta:
        each = -(-len(experts) // number)
        return [max(0, min(each, len(experts) - each * expert)) for expert in range(number)]
    counts: list[int] = torch.bincount(experts, minlength=number).tolist()
    return counts


def _layer(module: Any, name: str, x: Tensor, experts: Tensor, counts: list[int]) -> Tensor:
    """Return the products of the rows of ``x`` with the stored matrices of their experts, with adapters and biases."""
    stored, pieces = stored_of(module)[name], pieces_of(module, name)
    out = in_autocast(lambda x: _Products.apply(x, stored, counts, *pieces), x)  # type: ignore[no-untyped-call]
    for first, second, scale in vars(module).get(ADAPTERS, {}).get(name, ()):
        out = (out + scale * _low_rank(x, first, second, counts)).to(out.dtype)
    bias = getattr(module, f"{name}_bias", None) if module.has_bias else None
    return out if bias is None else out + bias[experts].to(out.dtype)


def _low_rank(x: Tensor, first: Tensor, second: Tensor, counts: list[int]) -> Tensor:
    x = x.to(first.dtype)
    for weight in (first, second):
        x = in_autocast(lambda x, weight=weight: _Products.apply(x, None, counts, weight.to(x.dtype)), x)  # type: ignore[no-untyped-call]
    return x


def _parts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have rows, with these."""
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(begin, begin + count)
        begin += count


def _each(counts: Sequence[int], beside: Tensor, compute: Callable[[int, slice], None]) -> None:
    """Call ``compute`` for each expert that has rows; without numbers, once for all of them."""
    parts = [*_parts(counts)]
    if is_fake(beside) and parts:
        with repeated(len(parts)):
            compute(*parts[0])
        return
    for expert, rows in parts:
        compute(expert, rows)


class _Products(torch.autograd.Function):
    """Products of rows with the matrices of their experts, which are all in ``pieces``.

    Matrices that are ``stored`` are opened one by one, in the forward and again in the backward. Others are trained:
    one tensor, which has one gradient.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, stored: Stored | None, counts: list[int], *pieces: Tensor) -> Tensor:
        ctx.stored, ctx.counts = stored, counts
        ctx.save_for_backward(*pieces, *([] if stored else [x]))
        out = x.new_empty(len(x), stored.matrix[0] if stored else pieces[0].shape[1])

        def compute(expert: int, rows: slice) -> None:
            torch.mm(x[rows], _matrix(stored, pieces, expert, x.dtype).t(), out=out[rows])

        _each(counts, x, compute)
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved, stored = ctx.saved_tensors, ctx.stored
        grad = grads[0].contiguous()
        into: Tensor | None = None
        of_weight: Tensor | None = None
        if stored or ctx.needs_input_grad[0]:
            into = rows_of = grad.new_empty(len(grad), stored.matrix[1]) if stored else torch.empty_like(saved[1])

            def compute(expert: int, rows: slice) -> None:
                torch.mm(grad[rows], _matrix(stored, saved, expert, grad.dtype), out=rows_of[rows])

            _each(ctx.counts, grad, compute)
        if not stored and ctx.needs_input_grad[3]:
            of_weight = whole = saved[0].new_zeros(saved[0].shape)

            def add(expert: int, rows: slice) -> None:
                torch.mm(grad[rows].t(), saved[1][rows], out=whole[expert])

            _each(ctx.counts, grad, add)
        return into, None, None, of_weight, *(None for _ in ctx.needs_input_grad[4:])


def _matrix(stored: Stored | None, pieces: Sequence[Tensor], expert: int, dtype: torch.dtype) -> Tensor:
    return pieces[0][expert] if stored is None else stored.open([piece[expert] for piece in pieces], dtype)
