"""Clipping: what is done to gradients before updates use them, decided when they are complete, wherever they are.

Nothing is written at once: an update scales and clamps a gradient when it reads it, in place. Parameters outside the
blocks have ordinary gradients, which are clipped as in plain PyTorch (:class:`RestClipping`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lt_offload import limits
from lt_offload.compat.torch import foreach_norm
from lt_offload.errors import ConfigError
from lt_offload.execute.device.base import Device
from lt_offload.execute.memory.live_group import distinct
from lt_offload.execute.memory.tensors import Weight


class Clipping:
    """How the gradients of an engine's weights are clipped.

    Args:
        device: has some of them.
        weights: of the engine; the sums of their gradients are clipped.
    """

    def __init__(self, device: Device, weights: Sequence[Weight]) -> None:
        self._device, self._weights = device, weights
        self.value: float | None = None
        """The limit to which complete gradients are clamped before updates use them, in every window."""
        self._scale: Tensor | None = None
        """The factor by which they are multiplied before that, in the coming settling pass."""
        self._clamp: float | None = None
        """The limit to which they are clamped after that, in the coming settling pass."""

    @property
    def _clipped(self) -> bool:
        return self._scale is not None or self._clamp is not None

    def check_more(self) -> None:
        """Raise ``UnsupportedError`` if there are to be more gradients after they have been clipped."""
        if self._clipped:
            raise limits.CLIPPED.error("the model was called after its gradients had been clipped, before the step")

    def forget(self) -> None:
        """Forget how to clip: the gradients that it was said for have been used, or are gone."""
        self._scale = self._clamp = None

    def edit(self, *, now: bool = False) -> Callable[[Tensor], None] | None:
        """Return what is done to gradients before updates use them; None: nothing. ``now``: the caller does it."""
        scale = self._scale
        value = min((v for v in (self.value, self._clamp) if v is not None), default=None)
        if now:
            self.forget()

        scales: dict[torch.device, Tensor] = {}

        def edit(grad: Tensor) -> None:
            with torch.no_grad():
                if scale is not None:
                    # Sums of one model may be on the host and on the device, and there is one scale.
                    factor = scales.setdefault(grad.device, scale.to(grad.device))
                    # On a GPU nobody waits to see it. On the host it saves a way through memory where nothing is
                    # clipped: with AdamW in fp32 it is 2 numbers beside the 7 of the update.
                    if grad.is_cuda or factor != 1:
                        grad.mul_(factor)
                if value is not None:
                    grad.clamp_(-value, value)

        return edit if value is not None or scale is not None else None

    def clip_norm(
        self, params: Iterable[Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        """Let the coming updates use gradients of a norm of at most ``max_norm``; return their norm.

        Every sum is complete, on the device or on the host, and is read where it is, in the order of ``params``. Those
        outside the blocks have ordinary gradients, which are scaled at once.

        Raises:
            UnsupportedError: if they have been clipped already.
            RuntimeError: with ``error_if_nonfinite``, if the norm is not finite.
        """
        if self._clipped or self.value is not None:
            raise limits.CLIPPED.error("gradients that are clipped already were to be clipped by their norm")
        params = list(params)
        ours = {id(weight.param): weight.total for weight in self._weights}
        others = [param for param in params if id(param) not in ours and param.grad is not None]
        found = [total for param in params if (total := ours.get(id(param))) is not None and total.filled]
        groups = list(dict.fromkeys(total.group for total in found))
        here = [group for group in groups if group.buffer is not None]
        reads = [group.buffer for group in here if group.buffer is not None]
        # On the device the norms are launched behind what fills the sums; on the host this thread reads them, so it
        # waits.
        self._device.wait(*distinct(group.device_ready for group in here), reads=reads)
        self._device.synchronize(*distinct(group.host_ready for group in groups if group.buffer is None))
        grads = {id(total.weight.param): total.host if total.view is None else total.view for total in found}
        grads |= {id(param): param.grad for param in others if param.grad is not None}
        with torch.no_grad():
            ordered = [grads[id(param)] for param in params if id(param) in grads]
            norm = total_norm(ordered, norm_type, error_if_nonfinite=error_if_nonfinite)
            if found:
                # As torch's clip_grad_norm_ has it, term by term: otherwise last bits would differ.
                self._scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            clip_grads_with_norm_(others, max_norm, norm)
        return norm

    def clip_each(self, value: float) -> None:
        """Let the coming updates use gradients between ``-value`` and ``value``."""
        if any(weight.total is not None and weight.total.filled for weight in self._weights):
            self._clamp = value if self._clamp is None else min(self._clamp, value)


class RestClipping:
    """The gradients of parameters outside the blocks, which torch's own functions clip.

    Args:
        params: all of them.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._squares: list[Tensor] | None = None

    def begin(self) -> None:
        """An iteration begins."""
        self._squares = None

    def squares(self) -> list[Tensor]:
        """Return the squared norms of their gradients, before they were clipped."""
        if self._squares is None:
            self._squares = [vector_norm(grad, dtype=torch.float32).square() for grad in self._gradients()]
        return self._squares

    def clip_each(self, value: float) -> None:
        """Clamp their gradients."""
        rest = [param for param in self._params if param.grad is not None]
        if rest:  # torch's function fails for none
            clip_grad_value_(rest, value)

    def _gradients(self) -> list[Tensor]:
        return [param.grad for param in self._params if param.grad is not None]


def require_positive(setting: str, value: float) -> None:
    """Raise ``ConfigError`` for a limit of 0 or less."""
    if not value > 0:
        raise ConfigError(f"{setting} must be more than 0; leave clipping out to keep gradients as they are")


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
