"""Scaled losses: a ``GradScaler`` treats gradients where they are, in plans whose updates wait for its verdict.

The scaler multiplies all gradients by the inverse of its scale and looks for infinities among them. Then it calls
``optimizer.step()`` or leaves it out. Each of these is its own code, with its own bits: only where it looks for the
gradients of an optimizer that an engine follows, it gets stand-ins for the parameters, whose gradients are the engine's
sums, on the host and on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lt_offload.compat.torch import UNSCALE_GRADIENTS
from lt_offload.execute.updates.clipping import Unscale
from lt_offload.machine.replaced import Replaced

Follow = Callable[[Unscale, Tensor], bool]
"""An engine's function that calls a scaler's with what has the gradients; it is told the factor, too."""
_followed: dict[int, Follow] = {}
"""The functions of engines, by the identity of their optimizer."""


@contextmanager
def scaled(optimizer: Optimizer, follow: Follow) -> Iterator[None]:
    """Let scalers find the gradients of ``optimizer`` by ``follow`` within the context."""
    with _UNSCALE.active():
        _followed[id(optimizer)] = follow
        try:
            yield
        finally:
            del _followed[id(optimizer)]


def _where_they_are(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unscaled(scaler: Any, optimizer: Optimizer, inverse: Tensor, infinite: Tensor, *args: Any) -> Any:
        follow = _followed.get(id(optimizer))
        if follow is None:
            return original(scaler, optimizer, inverse, infinite, *args)

        def unscale(stand_in: Any, device: torch.device) -> None:
            # Copied here: the scaler's own copies to the host are on their way while it computes with them.
            flags = original(scaler, stand_in, inverse.to(device), infinite.to(device), *args)
            # One flag for all: the scaler adds those of several devices up, and fused optimizers skip a step for a 1.
            for flag in flags.values():
                infinite.copy_(torch.maximum(infinite, flag.to(infinite.device)))

        return {infinite.device: infinite} if follow(unscale, inverse) else {}

    return unscaled


_UNSCALE = Replaced(lambda: torch.amp.GradScaler, UNSCALE_GRADIENTS, _where_they_are)
