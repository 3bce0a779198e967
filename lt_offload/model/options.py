"""What the activation options mean, for the code that measures them and the code that carries them out.

``keep``
    saved tensors stay on the device.
``recompute``
    only the block's input stays; the block runs again in the backward.
``offload``
    every saved tensor that :func:`travels` goes to the host and comes back, the input among them.
``mixed``
    the input and the results of costly operations travel, the rest is recomputed from them.
``reload``
    only the block's input is saved, and it travels; the block runs again in the backward.
``discard``
    nothing is saved; the plan says from which earlier block on the forwards are recomputed. For blocks that are
    ``chained``.
``fused``
    for the output projection: the block is projection and loss, and treats a few tokens at a time (``head.py``). Logits
    stay, once; the same numbers.
``chunked``
    the same with a projection of a few tokens at a time, so that all logits never exist: another order of summation in
    the gradient of its weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lt_offload.compat.torch import ATTENTIONS, schema_of

SMALL = 1024
"""Storages of fewer bytes stay on the device: a copy would cost more than it frees."""

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default})
_OTHER_PRODUCTS = frozenset({"bitsandbytes::gemm_4bit"})


def is_costly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``mixed`` keeps the result of this operation instead of computing it again.

    None of them writes in place or returns a view of its arguments: a caller in C++ ignores what such an operation
    returns, so that a cached result would not reach it. And none draws random numbers: with some draws cached and
    others repeated, the repeated ones would come from another point of the generator's stream.
    """
    if func in _PRODUCTS or schema_of(func).name in _OTHER_PRODUCTS:
        return True
    return func in ATTENTIONS and not _argument(func, "dropout_p", args, kwargs)


def for_replay(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` so that the result is fit for a backward, although autograd does not record this run of ``func``.

    Some attention kernels compute the log-sum-exp that their backward needs only if a gradient is expected.
    """
    if func not in ATTENTIONS:
        return args
    names = [argument.name for argument in schema_of(func).arguments]
    if "compute_log_sumexp" not in names:
        return args
    position = names.index("compute_log_sumexp")
    return (*args[:position], True, *args[position + 1 :])


def travels(tensor: Tensor) -> bool:
    """Return whether a saved tensor goes to the host under ``offload``; masks and small ones stay."""
    return tensor.is_floating_point() and tensor.layout is torch.strided and tensor.untyped_storage().nbytes() >= SMALL


def is_activation(leaf: Tensor, *, positional: bool) -> bool:
    """Return whether an argument of a block is passed on from block to block, unlike masks that all share."""
    return leaf.requires_grad or (positional and leaf.is_floating_point())


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    raise AssertionError(f"{func} has no argument {name}")
