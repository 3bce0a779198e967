"""The updates of ``torch.optim.Adam`` and ``AdamW``: on the host by the compiled kernel, everywhere else by torch's.

The function is that which their ``step`` calls in the end, and the kernel has the numbers of what that does on the
host, with a fused kernel or one operation after the other. Options and states stay the optimizer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from lt_offload.compat.torch import foreach_add_
from lt_offload.optim import native
from lt_offload.optim.adamw import AdamW, entry_of, options_of
from lt_offload.optim.plain import Entry, Options

State = Mapping[str, Any]
Update = Callable[[], None]

_OPTIONS = ("lr", "weight_decay", "eps", "maximize", "amsgrad", "foreach", "fused", "decoupled_weight_decay")

_LEAST = 1 << 15
"""Elements for which calling the kernel takes no longer than calling torch's."""


def adam_update(
    group: Mapping[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State]
) -> Update | None:
    """Return what updates ``params`` as a step of Adam or AdamW would, with the options of this moment.

    None where only ``step`` knows: for options that are tensors, for states that are yet to be made.
    """
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
    # A fused update wants the counter beside the parameter. The way through `step` moves it there (`_move_scalars`).
    if group["fused"] and {step.is_cuda for step in steps} != {params[0].is_cuda}:
        return None
    own = [list(tensors) for tensors in (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps)]
    common = {name: group[name] for name in _OPTIONS} | {"beta1": beta1, "beta2": beta2}
    # For all of them alike: in fp32 the kernel has more options than in other dtypes.
    options = kernel_options(group, next((p for p in params if p.dtype != torch.float32), params[0]))
    # Of moments in another dtype torch makes an error.
    own_dtypes = all(param.dtype is exp_avg.dtype for param, exp_avg in zip(params, exp_avgs, strict=True))
    if not own_dtypes or sum(map(Tensor.numel, params)) < _LEAST:
        options = None

    def run() -> None:
        kept = own if options is None else _by_kernel(own, options)
        if kept[0]:
            adam(*kept, **common)

    return run


def kernel_options(group: Mapping[str, Any], param: Tensor) -> Options | None:
    """Return how the kernel updates ``param`` and its like with the options ``group``; None: it does not."""
    # Of lists torch rounds some scalars in another way, and weight decay in a gradient by where an element is; not in
    # fp32, and not in the fused kernel.
    apart = group["foreach"] or (group["weight_decay"] != 0 and not group["decoupled_weight_decay"])
    if not param.is_cpu or group["amsgrad"] or (apart and param.dtype != torch.float32 and not group["fused"]):
        return None
    # With others, as numpy's of 32 bits, torch would calculate in their precision.
    if not all(isinstance(group[name], (float, int)) for name in ("lr", "weight_decay", "eps")):
        return None
    return replace(options_of(group, 1.0), each=not group["fused"], decoupled=group["decoupled_weight_decay"])


def _by_kernel(lists: list[list[Tensor]], options: Options) -> list[list[Tensor]]:
    """Update what there is a kernel for, and return the lists of the others."""
    params, grads, exp_avgs, exp_avg_sqs, _, steps = lists
    rows = list(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True))
    entries = [Entry(*row[:2], None, *row[2:4], float(row[4]) + 1) for row in rows]
    rest = set(map(id, native.update(entries, options)))
    if len(rest) < len(rows):
        foreach_add_([row[4] for entry, row in zip(entries, rows, strict=True) if id(entry) not in rest], 1)
    kept = [row for entry, row in zip(entries, rows, strict=True) if id(entry) in rest]
    left = [[row[i] for row in kept] for i in range(5)]
    return [*left[:4], [], left[4]]


def update(optimizer: Optimizer) -> None:
    """Take a step of ``optimizer``, of one group, as updates on the host are done; without hooks."""
    run = None
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        [group] = optimizer.param_groups
        params = [param for param in group["params"] if param.grad is not None]
        run = adam_update(group, params, [p.grad for p in params], [optimizer.state[p] for p in params])
    if run is None:
        type(optimizer).step(optimizer)
        return
    with torch.no_grad():
        run()


def by_kernel(optimizer: Optimizer) -> bool:
    """Return whether the kernel does what :func:`update` does for an ``optimizer`` whose parameters have states."""
    [group] = optimizer.param_groups
    param = group["params"][0]
    state = optimizer.state[param]
    if isinstance(optimizer, AdamW):
        options, seeds = options_of(group, optimizer.grad_scale), optimizer.seeds(param, state, group)
    elif type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        known, seeds = kernel_options(group, param), (None, 0)
        if known is None:
            return False
        options = known
    else:
        return False
    return native.takes(entry_of(param, param.grad, state, seeds), options)
