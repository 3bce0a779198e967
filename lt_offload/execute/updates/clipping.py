"""Clipping: what is done to gradients before updates use them, decided when they are complete, wherever they are.

Nothing is written at once: an update scales and clamps a gradient when it reads it, in place. Parameters outside the
blocks have ordinary gradients, which are clipped as in plain PyTorch (:class:`RestClipping`). Only a ``GradScaler``,
which has to look at every number for its verdict, writes each gradient at once (:meth:`Clipping.unscale`).

The norm of each tensor that the last backward of a window has left on the device is found there, before it leaves
(:func:`norms`), so that no gradient is read a second time for it, and nobody waits for the copies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.compat.torch import foreach_norm, grouped_by_device_and_dtype
from lt_offload.errors import ConfigError
from lt_offload.execute.device.base import Cell, Device, Event
from lt_offload.execute.device.lanes import plain_torch
from lt_offload.execute.memory.host_task import HostTask
from lt_offload.execute.memory.live_group import complete_on_host, distinct, needed_by_caller
from lt_offload.execute.memory.tensors import Sum, Weight

Unscale = Callable[[Any, torch.device], object]
"""A scaler's function of what has the groups of an optimizer, with gradients on one device, and of that device."""


class Clipping:
    """The clipping of the gradients of an engine's weights."""

    def __init__(self, device: Device, weights: Sequence[Weight]) -> None:
        self._device, self._weights = device, weights
        self.value: float | None = None
        """The limit to which complete gradients are clamped before updates use them, in every window."""
        self._scale: Tensor | None = None
        """The factor by which they are multiplied before that, in the coming settling pass."""
        self._clamp: float | None = None
        """The limit to which they are clamped after that, in the coming settling pass."""
        self._at_home: Tensor | None = None
        """The factor in host memory, when :attr:`arrived` is over; None: :attr:`_scale` may be read anywhere."""
        self.arrived: Event | None = None
        self.cell = Cell("clipping factor")
        """The factor in host memory, as tasks that edit on the host's lane read it."""
        self._readers: list[Event] = []
        """Such tasks since the factor came last."""
        self._sent: tuple[Event, Tensor] | None = None
        """The last copy of a factor to the host, and what it copies."""

    @property
    def _clipped(self) -> bool:
        return self._scale is not None or self._clamp is not None

    def check_more(self) -> None:
        """Raise ``UnsupportedError`` if there are to be more gradients after they have been clipped."""
        if self._clipped:
            raise limits.CLIPPED.error("the model was called after its gradients had been clipped, before the step")

    def forget(self) -> None:
        """Forget how to clip: the gradients that it was said for have been used, or are gone."""
        self._scale = self._clamp = self.arrived = None

    def edit(self, *, now: bool = False) -> Callable[[Tensor], None] | None:
        """Return what is done to gradients before updates use them; None: nothing. ``now``: the caller does it."""
        scale = self._scale
        value = min((v for v in (self.value, self._clamp) if v is not None), default=None)
        scales: dict[torch.device, Tensor] = {}
        if self.arrived is not None and self._at_home is not None:
            scales[self._at_home.device] = self._at_home
            if now:  # the calling thread reads the factor, which may be on its way
                self._device.synchronize(self.arrived)
        if now:
            self.forget()

        def edit(grad: Tensor) -> None:
            with torch.no_grad():
                if scale is not None:
                    # Sums of one model may be on the host and on the device, and there is one scale.
                    if grad.device not in scales:
                        scales[grad.device] = scale.to(grad.device)
                    factor = scales[grad.device]
                    # On a GPU nobody waits to see it. On the host it saves a way through memory where nothing is
                    # clipped: with AdamW in fp32 it is 2 numbers beside the 7 of the update.
                    if grad.is_cuda or factor != 1:
                        grad.mul_(factor)
                if value is not None:
                    grad.clamp_(-value, value)

        return edit if value is not None or scale is not None else None

    def edit_in(self, task: HostTask, grads: Sequence[Tensor]) -> None:
        """Let ``task`` edit ``grads`` before it updates with them."""
        edit = self.edit()
        if edit is not None:
            task.after.append(self.arrived)
            task.reads.append(self.cell)
            task.work += [partial(edit, grad) for grad in grads]
            task.queued.append(self._readers.append)

    def clip_norm(
        self, params: Iterable[Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        """Let the coming updates use gradients of a norm of at most ``max_norm``; return their norm.

        Every sum is complete, or will be when what has been queued is over. The norms of some are known (``Sum.norm``),
        the others are read where they are. All count in the order of ``params``. Those outside the blocks have ordinary
        gradients, which are scaled at once. Raises ``ConfigError`` if ``params`` leaves out some that have a gradient:
        all are scaled; ``UnsupportedError`` if they have been clipped already; ``RuntimeError`` with
        ``error_if_nonfinite``, if the norm is not finite.
        """
        if self._clipped or self.value is not None:
            raise limits.CLIPPED.error("gradients that are clipped already were to be clipped by their norm")
        params = list(params)
        self._require_all(params)
        ours = {id(weight.param): weight.total for weight in self._weights}
        others = [param for param in params if id(param) not in ours and param.grad is not None]
        totals = [total for param in params if (total := ours.get(id(param))) is not None and total.filled]
        known = {total: total.norm for total in totals if total.norm is not None and norm_type == 2.0}
        groups = list(dict.fromkeys(total.group for total in totals if total not in known))
        here = [group for group in groups if group.buffer is not None]
        reads = [group.buffer for group in here if group.buffer is not None]
        # On the device the norms are launched behind what fills the sums; on the host this thread reads them, so it
        # waits.
        self._device.wait(*distinct(group.device_ready for group in here), reads=reads)
        self._device.synchronize(*complete_on_host(group for group in groups if group.buffer is None))
        grads = {id(total.weight.param): total.host if total.view is None else total.view for total in totals}
        grads |= {id(param): param.grad for param in others if param.grad is not None}
        with torch.no_grad():
            ordered = [grads[id(param)] for param in params if id(param) in grads]
            of_grads = {id(grads[id(total.weight.param)]): norm for total, norm in known.items()}
            norm = total_norm(ordered, norm_type, known=of_grads, error_if_nonfinite=error_if_nonfinite)
            if totals:
                # As torch's clip_grad_norm_ has it, term by term: otherwise last bits would differ.
                self._scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
                self._send_home(self._scale)
            clip_grads_with_norm_(others, max_norm, norm)
        return norm

    def unscale(self, optimizer: Optimizer, unscale: Unscale, inverse: Tensor) -> bool:
        """Let ``unscale`` write the gradients of ``optimizer`` where they are; return whether there are any.

        Every sum is complete, or will be when what has been queued is over. ``inverse`` is the factor by which a
        scaler's ``unscale`` multiplies them. Raises ``UnsupportedError`` if gradients have been clipped already.
        """
        if self._clipped:
            raise limits.CLIPPED.error("gradients that are clipped already were to be unscaled")
        totals = {id(weight.param): weight.total for weight in self._weights if weight.total is not None}
        filled = [total for total in totals.values() if total.filled]
        groups = list(dict.fromkeys(total.group for total in filled))
        needed_by_caller(self._device, groups)
        by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for param in group["params"]:
                standing = _standing(totals.get(id(param)), param)
                if standing.grad is not None:
                    by_device[standing.grad.device].append(standing)
        for device, params in by_device.items():
            unscale(SimpleNamespace(param_groups=[{"params": params}]), device)
        for changed in groups:
            changed.changed_on_device()
        known = [total.norm for total in filled if total.norm is not None]
        # A power of two changes exponents alone, also of the squares in a norm, which has to be read otherwise.
        exact = bool(known) and math.frexp(float(inverse))[0] == 0.5
        with plain_torch():
            for norm in known if exact else ():
                norm.mul_(inverse.to(norm.device))
        for total in filled:
            total.fill(total.norm if exact else None)
        return bool(by_device)

    def _require_all(self, params: Sequence[Tensor]) -> None:
        """Raise ``ConfigError`` if a weight that has a gradient is not one of ``params``: all gradients are scaled."""
        named = set(map(id, params))
        for weight in self._weights:
            if id(weight.param) not in named and weight.total is not None and weight.total.filled:
                raise ConfigError(
                    f"parameters={len(params)} tensors leaves out {weight.label}, which has a gradient: the engine "
                    "clips all together; of some alone, torch.nn.utils.clip_grad_norm_ clips the gradients"
                )

    def _send_home(self, scale: Tensor) -> None:
        """Copy the factor to the host, where updates read it, if it is not there: the calling thread does not wait."""
        if scale.device.type == "cpu":
            return
        if self._sent is not None:
            # Its memory on the device goes back to the allocator here, whose next owner comes after the compute lane.
            self._device.wait(self._sent[0])
        if self._at_home is None or self._at_home.dtype != scale.dtype:
            self._at_home = self._device.host_empty((), scale.dtype)
        on_device = Cell("clipping factor on the device")
        self.arrived = self._device.submit(
            "d2h",
            partial(self._device.copy, self._at_home, scale),
            after=distinct([self._device.mark(writes=[on_device]), *self._readers]),
            reads=[on_device],
            writes=[self.cell],
            label="clipping factor",
            nbytes=scale.nbytes,
        )
        self._readers.clear()
        self._sent = self.arrived, scale

    def clip_each(self, value: float) -> None:
        """Let the coming updates use gradients between ``-value`` and ``value``."""
        if any(weight.total is not None and weight.total.filled for weight in self._weights):
            self._clamp = value if self._clamp is None else min(self._clamp, value)


class RestClipping:
    """The gradients of parameters outside the blocks, which torch's own functions clip."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._squares: list[Tensor] | None = None

    def begin(self) -> None:
        """An iteration begins."""
        self._squares = None

    def squares(self) -> list[Tensor]:
        """Return the squared norms of their gradients, before they were clipped."""
        if self._squares is None:
            grads = [param.grad for param in self._params if param.grad is not None]
            self._squares = [vector_norm(grad, dtype=torch.float32).square() for grad in grads]
        return self._squares

    def clip_each(self, value: float) -> None:
        """Clamp their gradients."""
        rest = [param for param in self._params if param.grad is not None]
        if rest:  # torch's function fails for none
            clip_grad_value_(rest, value)


def _standing(total: Sum | None, param: Tensor) -> Tensor:
    """Return a tensor whose ``grad`` is ``total``, if there is a gradient in it; ``param`` itself without a sum."""
    if total is None:
        return param
    place = total.host if total.view is None else total.view
    stand_in = place.detach()
    stand_in.grad = place if total.filled else None
    return stand_in


def require_positive(setting: str, value: float) -> None:
    """Raise ``ConfigError`` for a limit of 0 or less."""
    if not value > 0:
        raise ConfigError(f"{setting} must be more than 0; leave clipping out to keep gradients as they are")


def norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each of ``grads``, which are on one device, with the bits of torch's clipping."""
    by_position: dict[int, Tensor] = {}
    with plain_torch():  # a number per tensor takes no part in the budget
        # Of one dtype at a time, as torch's clipping: for several, the kernel is another one.
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            alike = [at for at, grad in enumerate(grads) if grad.dtype == dtype]
            # One tensor holds their norms: an allocator gives every tensor more than 4 bytes.
            by_position |= zip(alike, torch.stack(foreach_norm([grads[at] for at in alike])).unbind(), strict=True)
    return [by_position[at] for at in range(len(grads))]


def total_norm(
    grads: Sequence[Tensor],
    norm_type: float,
    *,
    known: Mapping[int, Tensor] | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Return the norm of the norms of ``grads``: ``torch.nn.utils.get_total_norm``.

    That function takes the norms device by device, so that their sum would come in another order than in plain
    training, where all gradients are on one device. Here each norm is taken where its tensor is, and they are summed in
    that function's order: those of one dtype before those of the next, else in the order of ``grads``. ``grads`` are on
    whatever devices; the result is where the first one's norm is. ``known`` has norms, by the ids of gradients, which
    may be elsewhere; those gradients are not read. Raises ``RuntimeError`` with ``error_if_nonfinite``, if it is not
    finite.
    """
    known = known or {}
    if not known and len({grad.device for grad in grads}) <= 1:
        return get_total_norm(grads, norm_type, error_if_nonfinite)
    # That order is of a hash table, so it is asked for, with stand-ins on one device that have nothing in them.
    stand_ins = {torch.empty(0, dtype=grad.dtype): grad for grad in grads}
    of_dtypes = grouped_by_device_and_dtype([list(stand_ins)]).values()
    ordered = [stand_ins[stand_in] for (alike,), _ in of_dtypes for stand_in in alike]
    first = known[id(grads[0])].device if id(grads[0]) in known else grads[0].device
    norms_by_grad = {at: norm.to(first) for at, norm in known.items()}
    unknown = [grad for grad in ordered if id(grad) not in known]
    for device, dtype in dict.fromkeys((grad.device, grad.dtype) for grad in unknown):
        alike = [grad for grad in unknown if (grad.device, grad.dtype) == (device, dtype)]
        moved = torch.stack(foreach_norm(alike, norm_type)).to(first)  # in one copy
        norms_by_grad |= zip(map(id, alike), moved.unbind(), strict=True)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norms_by_grad[id(grad)] for grad in ordered]), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        get_total_norm([norm], norm_type, True)  # raises torch's error
    return norm
