"""Torch's own Adam, AdamW and SGD as functions of lists of tensors: what ``step`` does, without its bookkeeping.

``step()`` of an optimizer over a few small tensors takes longer than their update. The functions that do the work are
public; with the same lists and options they give the same numbers. Whatever they do not cover is left to ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

State = Mapping[str, Any]
Update = Callable[[], None]


def direct_update(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
) -> Update | None:
    """Return what updates ``params`` as ``optimizer.step()`` would, with the options of this moment.

    None where only ``step()`` knows: for other optimizers, for options that are tensors or need autograd, for states
    that are yet to be made.

    Args:
        optimizer: whose rule it is.
        group: options, as in ``optimizer.param_groups``.
        params: at least one.
        grads: one per parameter.
        states: one per parameter.
    """
    make = _RULES.get(type(optimizer))
    if make is None or group.get("differentiable") or getattr(optimizer, "grad_scale", None) is not None:
        return None
    if any(p.is_complex() for p in params) or any(grad.is_sparse for grad in grads):
        return None
    return make(group, params, grads, states)


def _adam(
    group: Mapping[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State]
) -> Update | None:
    beta1, beta2 = group["betas"]
    if isinstance(group["lr"], Tensor) or isinstance(beta1, Tensor) or group["capturable"]:
        return None
    try:
        steps = [state["step"] for state in states]
        exp_avgs = [state["exp_avg"] for state in states]
        exp_avg_sqs = [state["exp_avg_sq"] for state in states]
        max_exp_avg_sqs = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []
    except KeyError:
        return None
    if set(map(type, steps)) != {Tensor}:
        return None
    if group["fused"] and {step.is_cuda for step in steps} != {params[0].is_cuda}:
        return None
    return partial(
        adam,
        list(params),
        list(grads),
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        steps,
        amsgrad=group["amsgrad"],
        has_complex=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        foreach=group["foreach"],
        capturable=False,
        differentiable=False,
        fused=group["fused"],
        grad_scale=None,
        found_inf=None,
        decoupled_weight_decay=group["decoupled_weight_decay"],
    )


def _sgd(
    group: Mapping[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State]
) -> Update | None:
    buffers = [state.get("momentum_buffer") for state in states] if group["momentum"] != 0 else []
    if isinstance(group["lr"], Tensor) or any(buffer is None for buffer in buffers):
        return None
    return partial(
        sgd,
        list(params),
        list(grads),
        buffers,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        has_sparse_grad=False,
        foreach=group["foreach"],
        fused=group["fused"],
        grad_scale=None,
        found_inf=None,
    )


_RULES: dict[type[Optimizer], Callable[..., Update | None]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
}
