"""The output projection and the loss as one block, without the many copies of the logits that plain PyTorch makes.

``CausalLMLoss`` of Hugging Face holds the logits, their logarithms in fp32 and as many gradients at a time. Here a few
tokens are taken at a time, in one of two ways:

``fused``
    All logits exist, once: their logarithms are computed again in the backward, where gradients take the logits' place.
    Products are those of the whole model, everything else treats every token on its own: bit for bit plain PyTorch.
``chunked``
    The projection takes a few tokens at a time, too, so that no two chunks of logits exist together. The forward makes
    the gradients of a chunk as soon as it has its logits, as Liger Kernel's fused linear cross entropy does (Hsu et
    al., 2024), so that the backward has no logits to compute again: it multiplies by the gradient of the loss, which
    only it knows. The gradient of the weight is then a sum over chunks, in another order than plain PyTorch's:
    :func:`chunked_loss_reference` says in which.

Between projection and loss a model may scale its logits (Cohere, Granite) or cap them softly (Gemma): both are steps
that treat every logit on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lt_offload.compat.hugging_face import LOSS_FUNCTION
from lt_offload.compat.torch import log_softmax_backward
from lt_offload.model.compiled import StandIn, cover, is_compiled

IGNORED = -100
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""Arguments that a loss takes beside logits, labels and the size of the vocabulary; it takes no notice of others."""
_PART_BYTES = 32 << 20
"""Bytes of logits in fp32 that are treated together, more or less."""
_LEAST_TOKENS = 512
"""With fewer rows, reading the weight, and reading and writing its gradient, takes longer than their arithmetic."""


def chunk_tokens(vocabulary: int) -> int:
    """Return how many tokens a chunk should have: a power of two, with logits of 32 MiB in fp32 or 512 tokens."""
    return max(_LEAST_TOKENS, 1 << (_PART_BYTES // (4 * vocabulary)).bit_length() >> 1)


def chunked_loss_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int,
    bias: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    scale: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return loss and gradients as option ``chunked`` computes them, in plain PyTorch and without saving memory.

    This is the definition: what training with that option gives is equal to it bit for bit.

    1. Tokens are taken in their order, ``chunk_tokens`` at a time; the last chunk may be smaller.
    2. Logits of a chunk are ``linear(hidden, weight, bias)``, then what ``scale`` makes of them; its log-probabilities
       are those of the logits in fp32.
    3. The loss is ``nll_loss`` of the log-probabilities of all labels: their mean, or their sum divided by
       ``num_items_in_batch``.
    4. Gradients of ``hidden`` are those of each chunk. Gradients of ``weight`` and ``bias`` are summed over the chunks
       in their order, in the dtype of the weight: the first chunk's, plus the second's, and so on; for ``weight`` by
       ``addmm``.
    5. If the gradient of the loss is another number than 1 (a loss that is divided by the batches of an update, a
       weighted sum of losses), the gradients are those of 4 multiplied by it, in fp32 if they have less, and rounded
       once: nothing changes but the exponent if it is a power of two.

    Args:
        hidden: input of the projection, ``[..., features]``.
        weight: of the projection, ``[vocabulary, features]``.
        labels: what follows each token, ``[...]``: shifted already.
        chunk_tokens: tokens per chunk; :attr:`Plan.chunk_tokens` says how many a plan uses.
        bias: of the projection.
        num_items_in_batch: what the sum is divided by; None: the number of labels that count.
        ignore_index: the label that does not count.
        scale: what the model does to logits before its loss, each on its own: Gemma's soft cap; None: nothing.

    Returns:
        The loss, and its gradients with respect to ``hidden``, ``weight`` and ``bias``.
    """
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    counts = labels.reshape(-1) != ignore_index
    targets = labels.reshape(-1, 1).masked_fill(~counts[:, None], 0)
    matrix, vector = weight.detach(), None if bias is None else bias.detach()
    logits, picked = [], []
    with torch.enable_grad():
        for part in _slices(len(rows), chunk_tokens):
            logits.append(functional.linear(rows[part], matrix, vector).requires_grad_())
            scaled = logits[-1] if scale is None else scale(logits[-1])
            picked.append(functional.log_softmax(scaled.float(), dim=1).gather(1, targets[part]))
        loss = _mean(torch.cat(picked), counts, num_items_in_batch)
        loss.backward()  # type: ignore[no-untyped-call]
    grad_hidden = torch.empty_like(rows)
    grad_weight, grad_bias = None, None
    for part, logit in zip(_slices(len(rows), chunk_tokens), logits, strict=True):
        grad = logit.grad
        assert grad is not None
        grad_hidden[part] = grad @ matrix
        grad_weight = grad.t() @ rows[part] if grad_weight is None else torch.addmm(grad_weight, grad.t(), rows[part])
        if bias is not None:
            grad_bias = grad.sum(0) if grad_bias is None else grad_bias + grad.sum(0)
    assert grad_weight is not None
    return loss.detach(), grad_hidden.view_as(hidden), grad_weight, grad_bias


class ScalingStep(NamedTuple):
    """A step between projection and loss that treats every logit on its own."""

    name: Literal["div", "mul", "tanh"]
    number: float | None
    """The divisor or factor."""


Scaling = tuple[ScalingStep, ...]
"""The steps in their order: none in most models, three where logits are capped softly (Gemma)."""
_WITH_NUMBER: dict[str, Literal["div", "mul"]] = {"div": "div", "true_divide": "div", "mul": "mul", "multiply": "mul"}


def scaling_step(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ScalingStep | None:
    """Return which step a call of a function of torch is, whose first argument are the logits; None: another one."""
    name = getattr(func, "__name__", "")
    if kwargs:
        return None
    if name == "tanh" and len(args) == 1:
        return ScalingStep("tanh", None)
    # A tensor might change until the backward, and want a gradient.
    if name in _WITH_NUMBER and len(args) == 2 and type(args[1]) in (int, float):
        return ScalingStep(_WITH_NUMBER[name], args[1])
    return None


def scaled(logits: Tensor, scaling: Scaling) -> tuple[Tensor, list[Tensor]]:
    """Return what the steps of ``scaling`` make of ``logits``, and the results that gradients depend on."""
    kept = []
    for name, number in scaling:
        if name == "tanh":
            logits = torch.tanh(logits)
            kept.append(logits)
        else:
            assert number is not None
            logits = logits / number if name == "div" else logits * number
    return logits, kept


def _unscale(slope: Tensor, scaling: Scaling, kept: list[Tensor]) -> None:
    """Make of the gradient of what :func:`scaled` made that of the logits, in place, by plain PyTorch's kernels."""
    for name, number in reversed(scaling):
        if name == "tanh":
            torch.ops.aten.tanh_backward.grad_input(slope, kept.pop(), grad_input=slope)
        else:
            assert number is not None
            slope.div_(number) if name == "div" else slope.mul_(number)


def in_chunks(hidden: Tensor, weight: Tensor, chunk: int) -> bool:
    """Return whether the loss of ``hidden``, ``[..., features]``, may be computed ``chunk`` tokens at a time.

    With one chunk all logits would exist after all, in another order of sums for nothing. In float16, gradients that do
    not know yet by how much a loss is scaled up would come to nothing.
    """
    return hidden.numel() // hidden.shape[-1] > chunk and weight.dtype is not torch.float16


class HeadLoss(nn.Module):
    """The projection ``head`` with a causal loss; ``chunk``: tokens of which logits exist together, 0: all."""

    def __init__(self, head: nn.Linear, chunk: int = 0) -> None:
        super().__init__()
        self.head = head
        self.chunk = chunk

    @override
    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        *,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        scaling: Scaling = (),
    ) -> Tensor:
        """Return the loss that ``ForCausalLMLoss`` gives for the logits of ``hidden`` and the same other arguments.

        ``scaling`` is what the model does to its logits before that.
        """
        if shift_labels is None:
            assert labels is not None
            # As ``ForCausalLMLoss`` does it: nothing follows the last token, whose row stays and does not count.
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        following = shift_labels.reshape(-1).to(hidden.device)
        counts = following != ignore_index
        # ``gather`` needs an index that there is; what it picks for labels that do not count is left out of the mean.
        targets = following.masked_fill(~counts, 0)[:, None]
        weight, bias = self.head.weight, self.head.bias
        if self.chunk:
            rows = hidden.reshape(-1, hidden.shape[-1])
            settings = self.chunk, scaling, num_items_in_batch, torch.is_grad_enabled()
            return _ChunkedLoss.apply(rows, weight, bias, targets, counts, *settings)  # type: ignore[no-any-return,no-untyped-call]
        logits = functional.linear(hidden, weight, bias)
        picked = label_log_probs(logits, targets, scaling)
        del logits
        return _mean(picked, counts, num_items_in_batch)


_ASKS = {"size", "dim", "numel", "stride", "is_floating_point", "element_size"}
_FORM = {"shape", "dtype", "device", "ndim", "layout"}


def asks_form(func: Any) -> bool:
    """Return whether a function of torch only asks for the form of a tensor: that of logits is known without them."""
    # A property of a tensor comes here as the ``__get__`` of what describes it.
    name = getattr(func, "__name__", "")
    return name in _ASKS or (name == "__get__" and getattr(func.__self__, "__name__", "") in _FORM)


def suits(head: nn.Module) -> bool:
    """Return whether :class:`HeadLoss` computes what ``head`` computes."""
    return type(head) is nn.Linear and not is_compiled(head)


def uses_causal_loss(model: nn.Module) -> bool:
    """Return whether the loss of ``model``, a Hugging Face model, is the one that :class:`HeadLoss` computes."""
    function = getattr(model, "loss_function", None)
    # By name, as transformers is not imported here.
    name = getattr(function, "__name__", ""), getattr(function, "__module__", "")
    return name == ("ForCausalLMLoss", "transformers.loss.loss_utils")


def intercept_loss(model: nn.Module, stand_in: Callable[..., Any]) -> Callable[[], None]:
    """Let ``model`` call ``stand_in`` in place of its loss, which comes first; return a function that ends it."""
    owner: Any = model
    loss = owner.loss_function
    function = StandIn(model, LOSS_FUNCTION, loss, partial(stand_in, loss))
    update_wrapper(function, loss, updated=())  # it is called as the loss, and asked what it is as the loss
    return cover(model, LOSS_FUNCTION, function)


def label_log_probs(logits: Tensor, targets: Tensor, scaling: Scaling = ()) -> Tensor:
    """Return the log-probability of each row's target, ``[..., 1]`` in fp32; the gradient takes the place of logits.

    Args:
        logits: ``[..., vocabulary]``, which nothing else may use in its backward.
        targets: numbers of tokens, ``[..., 1]``.
        scaling: what the model does to its logits before the loss.
    """
    picked: Tensor = _Picks.apply(logits, targets, scaling)  # type: ignore[no-untyped-call]
    return picked


def _mean(picked: Tensor, counts: Tensor, items: Tensor | int | None) -> Tensor:
    """Return the loss from the log-probability of every label, in the order of summation of all classes' loss."""
    # With one class per token, the kernel adds the same numbers in the same order as with all classes.
    target = torch.full_like(counts, IGNORED, dtype=torch.long).masked_fill(counts, 0)
    reduction = "mean" if items is None else "sum"
    loss = functional.nll_loss(picked, target, ignore_index=IGNORED, reduction=reduction)
    if items is not None:
        loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
    return loss


def _logarithms(logits: Tensor, scaling: Scaling) -> Tensor:
    return functional.log_softmax(scaled(logits, scaling)[0].float(), dim=1)


def _slopes(logits: Tensor, target: Tensor, grad: Tensor, scaling: Scaling, picked: Tensor | None = None) -> None:
    """Replace ``logits`` by their gradient, from that of the labels' log-probabilities, by plain PyTorch's kernels.

    The latter are written to ``picked``, if that is given.
    """
    logits_of_loss, kept = scaled(logits, scaling)
    output = functional.log_softmax(logits_of_loss.float(), dim=1)
    if picked is not None:
        torch.gather(output, 1, target, out=picked)
    slope = torch.zeros_like(output).scatter_(1, target, grad)
    logits.copy_(log_softmax_backward(slope, output, 1, torch.float32))
    _unscale(logits, scaling, kept)


class _Picks(torch.autograd.Function):
    """Log-probabilities of the labels; the backward writes its result over the logits."""

    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.scaling = scaling
        picked = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        rows = logits.view(-1, logits.shape[-1])
        for part in _row_slices(rows):
            picked[part] = _logarithms(rows[part], scaling).gather(1, targets[part])
        return picked

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        rows = logits.view(-1, logits.shape[-1])
        for part in _row_slices(rows):
            _slopes(rows[part], targets[part], grads[0][part], ctx.scaling)
        return logits, None, None


def _row_slices(rows: Tensor) -> list[slice]:
    """Return which rows of logits to treat together. Each is on its own, so that how many change no number."""
    return _slices(len(rows), max(1, _PART_BYTES // (4 * rows.shape[1])))


def _slices(length: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, length, size)]


class _ChunkedLoss(torch.autograd.Function):
    """The loss from hidden states; keeps nothing for the backward but the gradients, which the forward makes.

    ``chunk`` are tokens at a time, ``items`` the divisor of the sum of all labels (None: their number); ``backward``:
    there may be one.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        counts: Tensor,
        chunk: int,
        scaling: Scaling,
        items: Tensor | int | None,
        backward: bool,
    ) -> Tensor:
        wanted = [backward and need for need in ctx.needs_input_grad[:3]]
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.empty_like(weight) if wanted[1] else None
        of_bias: Tensor | None = None
        picked = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        with torch.enable_grad():  # the gradient of every label's log-probability does not depend on their values
            like = torch.zeros_like(picked, requires_grad=True)
            (grad,) = torch.autograd.grad(_mean(like, counts, items), like)
        for part in _slices(len(hidden), chunk):
            rows = hidden[part]
            logits = functional.linear(rows, weight, bias)
            _take(logits, targets[part], grad[part], scaling, picked[part], slopes=any(wanted))
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[part])
            if of_weight is not None and part.start:
                torch.addmm(of_weight, logits.t(), rows, out=of_weight)
            elif of_weight is not None:
                torch.mm(logits.t(), rows, out=of_weight)
            if wanted[2]:
                of_bias = logits.sum(0) if of_bias is None else of_bias + logits.sum(0)
            del logits  # or it would lie beside the next chunk's
        ctx.gradients = of_hidden, of_weight, of_bias
        return _mean(picked, counts, items)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "a loss of chunks has one backward, as its gradients are made once; call the model again"
            )
        of_inputs = [None if tensor is None else _times(tensor, grads[0]) for tensor in gradients]
        del gradients  # nobody else may hold a gradient that is to become a parameter's without a copy
        return *of_inputs, *[None] * 6


def _take(logits: Tensor, targets: Tensor, grad: Tensor, scaling: Scaling, picked: Tensor, *, slopes: bool) -> None:
    """Write the labels' log-probabilities to ``picked`` and, if ``slopes``, the gradient of ``logits`` over them."""
    for part in _row_slices(logits):
        if slopes:
            _slopes(logits[part], targets[part], grad[part], scaling, picked[part])
        else:
            picked[part] = _logarithms(logits[part], scaling).gather(1, targets[part])


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply ``gradient`` in place by ``factor``, a number in fp32 on the device, which nobody waits for."""
    if gradient.element_size() >= factor.element_size():
        return gradient.mul_(factor)
    # As a vector it decides about the type of the product, too: a factor like 1/3 would be rounded to bf16 first.
    for part in _row_slices(gradient.view(len(gradient), -1)):
        torch.mul(gradient[part], factor.view(1), out=gradient[part])
    return gradient
