"""Operations that are one call to whoever watches torch, and take memory of their own inside: how much it is.

A dispatch mode sees what an operation is given and what it returns. It does not
see what a kernel of several stages makes in between; an account that has to be exact knows that from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lt_offload.compat.torch import schema_of

Workspace = Callable[[tuple[Any, ...], dict[str, Any]], int]
"""Bytes that a call with these arguments takes beside its result, until it returns."""


def _unpacked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of a weight of four bits as it is multiplied, and of its scales, if they are packed, too.

    Kernels for a few rows multiply packed numbers, on some GPUs; for more rows all unpack the weight first.
    """
    activations, _, shape, _, block = args[:5]
    packed_scales = args[7] if len(args) > 7 else kwargs.get("absmax_8bit")
    numbers = int(torch.Size(shape).numel())
    scales = 0 if packed_scales is None else 2 * torch.float32.itemsize * -(-numbers // int(block))
    return numbers * int(activations.element_size()) + scales


_WORKSPACES: dict[str, Workspace] = {"bitsandbytes::gemm_4bit": _unpacked}


def workspace(func: Any) -> Workspace | None:
    """Return what tells the workspace of the operation ``func``; None if it has none that is known."""
    return _WORKSPACES.get(schema_of(func).name)
