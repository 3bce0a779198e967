"""The norm of gradients of which some are on the device and some on the host: the one where all are together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from lt_offload.compat.torch import foreach_norm


def total_norm(grads: Sequence[Tensor], norm_type: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """Return the norm of the norms of ``grads``, on the device of the first one: ``torch.nn.utils.get_total_norm``.

    That function takes the norms device by device, so that their sum would come in another order than in plain
    training, where all gradients are on one device. Here each norm is taken where its tensor is, and they are summed
    in the order of ``grads``, those of one dtype before those of the next.

    Raises:
        RuntimeError: with ``error_if_nonfinite``, if it is not finite.
    """
    if len({grad.device for grad in grads}) <= 1:
        return get_total_norm(grads, norm_type, error_if_nonfinite)
    dtypes = dict.fromkeys(grad.dtype for grad in grads)
    ordered = [grad for dtype in dtypes for grad in grads if grad.dtype == dtype]
    first = grads[0].device
    norms: dict[int, Tensor] = {}
    for device, dtype in dict.fromkeys((grad.device, grad.dtype) for grad in ordered):
        alike = [grad for grad in ordered if (grad.device, grad.dtype) == (device, dtype)]
        there = torch.stack(foreach_norm(alike, norm_type)).to(first)  # in one copy
        norms |= zip(map(id, alike), there.unbind(), strict=True)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norms[id(grad)] for grad in ordered]), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        get_total_norm(grads, norm_type, True)  # raises torch's error
    return norm
