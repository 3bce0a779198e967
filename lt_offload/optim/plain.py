"""AdamW by torch's own operations, on any device and for every dtype and layout: what all other ways are compared with.

The arithmetic is that of torch's fused kernel. Low-precision tensors are updated piece by piece: what is converted
stays in the cache and takes little memory. Moments in bfloat16 or eight bits are fp32 for the update of a piece.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from lt_offload.compat.torch import fused_adamw_
from lt_offload.optim import blockwise


class Entry(NamedTuple):
    """One parameter to update."""

    param: Tensor
    grad: Tensor
    master: Tensor | None
    """Tensor updated instead of ``param``, which is then rounded from it; None: ``param`` itself is updated."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: float
    """Number of this update, 1 for the first."""
    seed: int | None = None
    """Seed of the noise by which ``param`` is rounded from fp32, which nobody keeps; see :func:`stochastic`.
    None: it is rounded to nearest, if at all."""
    first: int = 0
    """Number of the first element, where this is part of a tensor."""
    exp_avg_scale: Tensor | None = None
    """Scales of the blocks of ``exp_avg``, where that has eight bits; see :mod:`lt_offload.optim.blockwise`."""
    exp_avg_sq_scale: Tensor | None = None
    moment_seed: int = 0
    """Seed of the noise by which ``exp_avg_sq`` is rounded, where that is bfloat16."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors among the fields, scales last."""
        return (*self[:5], self.exp_avg_scale, self.exp_avg_sq_scale)

    @property
    def in_blocks(self) -> bool:
        """True if the moments have eight bits."""
        return self.exp_avg_scale is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Settings that entries of one group have in common."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False
    grad_scale: float | Tensor = 1.0
    """Factor on every gradient, applied in the precision of the moments."""
    decoupled: bool = True
    """False: weight decay is part of the gradient, as in Adam."""
    each: bool = False
    """Every operation is rounded to the dtype of the tensors, as in torch's way without a fused kernel."""

    @property
    def scales(self) -> bool:
        """True if the factor may change anything; one in a tensor is not looked at, it may be on a device."""
        return isinstance(self.grad_scale, Tensor) or self.grad_scale != 1.0

    def size(self, step: float) -> float:
        """Return the length of a step, in units of the moments' ratio."""
        size: float = float(self.lr) / (1 - self.beta1**step)
        return size

    def correction(self, step: float) -> float:
        """Return what the root of the second moment is divided by."""
        square = 1 - self.beta2**step
        return square**0.5 if self.each else math.sqrt(square)  # as torch does it


def tail(entry: Entry, unit: int) -> Entry:
    """Return what is left of a contiguous ``entry`` after as many whole units as it has."""
    start = entry.param.numel() // unit * unit
    return piece(entry, start, entry.param.numel())


def piece(entry: Entry, start: int, end: int) -> Entry:
    """Return elements of a contiguous ``entry``, as views; from the begin of a block, where it is in blocks."""
    scales = slice(start // blockwise.BLOCK, blockwise.blocks(end))
    part = converted(entry, lambda tensor: tensor.view(-1)[start:end], lambda scale: scale[scales])
    return part._replace(first=entry.first + start)


def converted(
    entry: Entry, convert: Callable[[Tensor], Tensor], scales: Callable[[Tensor], Tensor] | None = None
) -> Entry:
    """Return ``entry`` with other tensors: what ``convert`` makes of each, and ``scales``, if given, of the scales."""
    scale = scales or convert
    return entry._replace(
        exp_avg_scale=None if entry.exp_avg_scale is None else scale(entry.exp_avg_scale),
        exp_avg_sq_scale=None if entry.exp_avg_sq_scale is None else scale(entry.exp_avg_sq_scale),
        param=convert(entry.param),
        grad=convert(entry.grad),
        master=None if entry.master is None else convert(entry.master),
        exp_avg=convert(entry.exp_avg),
        exp_avg_sq=convert(entry.exp_avg_sq),
    )


def with_moments(entry: Entry, dtype: torch.dtype) -> Entry:
    """Return ``entry``, whose moments are fp32, with moments of ``dtype``: bfloat16, or ``uint8`` for eight bits."""
    if dtype != torch.uint8:
        return entry._replace(exp_avg=entry.exp_avg.to(dtype), exp_avg_sq=entry.exp_avg_sq.to(dtype))
    exp_avg, scale = blockwise.encode(entry.exp_avg, signed=True)
    exp_avg_sq, scale_sq = blockwise.encode(entry.exp_avg_sq, signed=False)
    return entry._replace(exp_avg=exp_avg, exp_avg_scale=scale, exp_avg_sq=exp_avg_sq, exp_avg_sq_scale=scale_sq)


_HOST_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 22
"""Elements of a piece. The fused kernel rounds what is left over behind the last full vector in another way, so pieces
are multiples of every vector length, and of blocks: then they give the bits of a whole tensor."""


_COPIES = {torch.float32: 0, torch.bfloat16: 22, torch.uint8: 34}
"""Bytes per element that moments take for a moment while they are fp32 and are written back, by their dtype."""
_COUNTERS = 1 << 12
"""Bytes for numbers of steps and the like."""


def scratch_bytes(param: Tensor, moments: torch.dtype, *, noisy: bool) -> int:
    """Return the most bytes that an update of ``param`` on a device takes for a moment; ``noisy``: noise rounds it."""
    # The gradient in fp32; the weight, and three copies of as many integers, by which it is rounded.
    each = 4 + _COPIES.get(moments, 0) + (18 if noisy else 0)
    return min(param.numel(), _DEVICE_PIECE) * each + _COUNTERS


def update(entries: Sequence[Entry], options: Options) -> None:
    """Update ``entries`` in place; gradients stay as they are."""
    together: defaultdict[tuple[torch.device, torch.dtype], list[Entry]] = defaultdict(list)
    for entry in entries:
        # The fused kernel can do these as they are, and many at once; the others need a copy in fp32, which has to stay
        # small.
        own = entry.exp_avg.dtype == entry.param.dtype
        if entry.master is None and entry.seed is None and own and not options.scales:
            together[entry.param.device, entry.param.dtype].append(entry)
            continue
        for part in _pieces(entry):
            _apart(part, options)
    for alike in together.values():
        _fused(alike, options)


def _apart(entry: Entry, options: Options) -> None:
    """Update one entry whose gradient or moments are not what the fused kernel takes, or whose weight it rounds not."""
    target = entry.param if entry.master is None else entry.master
    if entry.seed is not None:
        target = torch.empty_like(entry.param, dtype=torch.float32).copy_(entry.param)
    # A copy, as gradients stay as they are, and in the precision of what is updated.
    grad = torch.empty_like(target).copy_(entry.grad)
    if options.scales:
        grad.mul_(options.grad_scale)
    exp_avg, exp_avg_sq = _wide_moments(entry)
    _fused([entry._replace(param=target, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)], options)
    _keep_moments(entry, exp_avg, exp_avg_sq)
    if entry.seed is not None:
        entry.param.copy_(stochastic(target, entry.seed, entry.first))
    elif entry.master is not None:
        entry.param.copy_(target)


def _wide_moments(entry: Entry) -> tuple[Tensor, Tensor]:
    """Return the moments of ``entry`` as the kernel takes them: themselves, or copies in fp32."""
    if entry.exp_avg_scale is not None and entry.exp_avg_sq_scale is not None:
        exp_avg = blockwise.decode(entry.exp_avg, entry.exp_avg_scale, signed=True)
        return exp_avg, blockwise.decode(entry.exp_avg_sq, entry.exp_avg_sq_scale, signed=False)
    if entry.exp_avg.dtype == torch.bfloat16:
        return entry.exp_avg.float(), entry.exp_avg_sq.float()
    return entry.exp_avg, entry.exp_avg_sq


def _keep_moments(entry: Entry, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Write the moments that :func:`_wide_moments` has made back.

    In bfloat16 the first is rounded to nearest, as it changes by much more than half of a last bit at a time (1/512 to
    1/256 of a number, and ``1 - beta1`` is 0.1). The second is rounded at random: it changes by ``1 - beta2``, 0.001 as
    a rule, and to nearest it would never get any smaller.
    """
    if entry.exp_avg_scale is not None and entry.exp_avg_sq_scale is not None:
        moments = (entry.exp_avg, entry.exp_avg_scale, exp_avg), (entry.exp_avg_sq, entry.exp_avg_sq_scale, exp_avg_sq)
        for codes, scales, wide in moments:
            new_codes, new_scales = blockwise.encode(wide, signed=codes is entry.exp_avg)
            codes.copy_(new_codes)
            scales.copy_(new_scales)
    elif exp_avg is not entry.exp_avg:
        entry.exp_avg.copy_(exp_avg)
        entry.exp_avg_sq.copy_(stochastic(exp_avg_sq, entry.moment_seed, entry.first))


_GOLDEN, _FIRST, _SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
"""Factors of the hash by which noise is made: 2**32 over the golden ratio, and those of C. Wellons's ``lowbias32``."""


def stochastic(values: Tensor, seed: int, first: int = 0) -> Tensor:
    """Return fp32 ``values`` in bfloat16, each rounded up or down at random, so that the mean is the value itself.

    A value between two neighbours becomes the upper one with the probability of its distance from the lower one
    (Gupta et al., Deep Learning with Limited Numerical Precision, 2015, on rounding modes): noise of 16 bits is added
    to the bits that bfloat16 lacks, and these are cut off. NaN and infinities stay what they are.

    The noise of an element is a hash of its number and the seed, by 32-bit arithmetic that is the same on every device:
    it does not depend on who rounds, in which order, or in how many pieces. ``seed`` has 32 bits; ``first`` is the
    number of the first element in the order of rows.
    """
    noise = torch.arange(first, first + values.numel(), device=values.device).to(torch.int32)
    noise.mul_(_signed(_GOLDEN)).add_(_signed(seed))
    noise.bitwise_xor_((noise >> 16) & 0xFFFF).mul_(_signed(_FIRST))
    noise.bitwise_xor_((noise >> 15) & 0x1FFFF).mul_(_signed(_SECOND))
    noise = (noise >> 16) & 0xFFFF
    rounded = noise.view(values.shape).add(values.view(torch.int32)).bitwise_and_(_signed(0xFFFF0000))
    return torch.where(values.isnan(), values, rounded.view(torch.float32)).to(torch.bfloat16)


def _signed(bits: int) -> int:
    return (bits & 0xFFFFFFFF) - (1 << 32 if bits & 0x80000000 else 0)


def _pieces(entry: Entry) -> Iterator[Entry]:
    """Cut an entry into pieces of bounded size, if its tensors have one order in memory that allows it."""
    length = _HOST_PIECE if entry.param.device.type == "cpu" else _DEVICE_PIECE
    if entry.param.numel() <= length or not all(t is None or t.is_contiguous() for t in entry.tensors):
        yield entry
        return
    for start in range(0, entry.param.numel(), length):
        yield piece(entry, start, start + length)


def _fused(entries: Sequence[Entry], options: Options) -> None:
    """Update ``param`` itself, and no other; the entries are on one device."""
    params, grads = [entry.param for entry in entries], [entry.grad for entry in entries]
    exp_avgs, exp_avg_sqs = [entry.exp_avg for entry in entries], [entry.exp_avg_sq for entry in entries]
    common: dict[str, Any] = {name: getattr(options, name) for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
    common |= {"amsgrad": False, "maximize": options.maximize}
    if options.each or not options.decoupled:
        # This counts by itself.
        before = [torch.full((), entry.step - 1, dtype=torch.float32, device=entry.param.device) for entry in entries]
        common |= {"foreach": False, "fused": not options.each, "decoupled_weight_decay": options.decoupled}
        adam(params, grads, exp_avgs, exp_avg_sqs, [], before, **common)
        return
    steps: dict[float, Tensor] = {}
    for entry in entries:
        if entry.step not in steps:
            steps[entry.step] = torch.full((), entry.step, dtype=torch.float32, device=entry.param.device)
    fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, [], [steps[entry.step] for entry in entries], **common)
