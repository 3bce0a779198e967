"""Three ways to cost a run: time, a count of work (for machines that are not here), an account of device memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lt_offload.compat.torch import (
    FLASH_ON_CPU,
    FLASH_ON_CPU_BACKWARD,
    DataDependentOutputException,
    DynamicOutputShapeException,
    address_of,
    packet_of,
    schema_of,
)
from lt_offload.errors import ModelError
from lt_offload.machine.accounting import Account, tensors_in, workspace
from lt_offload.machine.dispatch import OperationMode, repeats, writes
from lt_offload.machine.driver import occupy
from lt_offload.schema.profile import HardwareProfile

LAUNCH_SECONDS = 1e-5
"""Host time to launch one operation, for estimates."""

AHEAD = 1.5
"""A host that is ahead of a device by so many times what its launches take stays ahead."""

_AGREE = 0.05
"""The two fastest of several repetitions differ by less than this part if nothing has disturbed them."""
_MOST = 4
"""So many repetitions are enough in any case. However long one was: a machine may have stood still in it."""
_aten = torch.ops.aten
_attention: Callable[..., int] = sdpa_flop_count
_attention_backward: Callable[..., int] = sdpa_backward_flop_count
_IS_CAUSAL = {FLASH_ON_CPU: 4, FLASH_ON_CPU_BACKWARD: 7}
"""The position of the argument that hides later tokens."""
_TILE = 128
"""Tokens of the pieces that kernels of attention multiply: those that are hidden entirely are left out."""
_ALLOCATE = frozenset({torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format})
"""Operations that only take memory."""
_GATHERS = frozenset({_aten.embedding.default})
_grouped_mm = _aten._grouped_mm.default
"""The products of all experts of a mixture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """Time since the lap before."""

    seconds: float = 0.0
    launch_s: float = 0.0
    """The part in which the host launched the work; 0 where the host does the work itself."""


class Stopwatch:
    """Measures on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.lags = device.type == "cuda"
        """True: a device runs later what the host has launched."""
        self._device = device
        self._begin: Any = None
        """An event on the device, behind the work that kept it busy."""
        self._last = time.perf_counter()

    def lap(self, behind: float = 0.0) -> Lap:
        """Return the time since the last call, all work of the device included.

        In training the host is ahead of a GPU, which then goes from kernel to kernel. Behind something that takes as
        long as the launches, a block is timed like that, by the device's clock, without the gaps that a device has
        while it waits for the first kernels; ``launch_s`` means nothing then if the host had to wait.
        """
        launched = time.perf_counter()
        # Up to here the host has launched work; what follows is waiting for it.
        end = None if self._begin is None else self._mark()
        if self.lags:
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._last
        if end is not None:
            seconds = self._begin.elapsed_time(end) / 1e3
        lap = Lap(seconds=seconds, launch_s=launched - self._last if self.lags else 0.0)
        self._begin = None
        if self.lags and behind > 0:
            occupy(self._device, behind)
            self._begin = self._mark()
        # Only now: the launch of what keeps the device busy is no part of the lap.
        self._last = time.perf_counter()
        return lap

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def enough(self, seconds: Sequence[float]) -> bool:
        """Return whether two times agree: others on the machine make times longer, and never shorter."""
        return len(seconds) >= _MOST or (len(seconds) > 1 and 2 * scatter(fastest(seconds)) < _AGREE)


def fastest(seconds: Sequence[float]) -> list[float]:
    """Return the two shortest of several times, or the only one; only these count."""
    return sorted(seconds)[:2]


def scatter(seconds: Sequence[float]) -> float:
    """Return half the distance between the extremes of repeated measurements, relative to their :func:`fastest`."""
    counts = sum(fastest(seconds))
    return (max(seconds) - min(seconds)) / counts * len(fastest(seconds)) / 2 if counts > 0 else 0.0


class Roofline(OperationMode):
    """Counts flops and bytes of every operation and divides by the rates of ``hardware``: nothing need be computed.

    ``unmasked``: masks that are the same for all heads hide later tokens only, so that kernels would leave these out.
    """

    def __init__(self, hardware: HardwareProfile, *, unmasked: bool = False) -> None:
        super().__init__()
        self._unmasked = unmasked
        self._rates = {getattr(torch, name): rate for name, rate in hardware.flops_per_s.items()}
        self._memory_rate = hardware.device_memory_bytes_per_s
        self._seconds = self._launch_s = 0.0
        self.traffic = 0
        """Bytes read and written so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation (on fake tensors: only its shapes) and count it."""
        out = _result(func, args, kwargs or {})
        read = list(tensors_in((args, kwargs or {})))
        written = _written(func, args, kwargs or {}, read, out)
        # A view costs nothing, and neither does memory without numbers: no kernel runs for it.
        if written and func not in _ALLOCATE:
            filled = _filled(func, args)
            read = [tensor for tensor in read if tensor is not filled]
            if func in _GATHERS:  # reads as many rows of its table as it returns
                read = [*read[1:], *written]
            traffic = sum(tensor.nbytes for tensor in (*read, *written))
            own = workspace(func)
            if own is not None:  # first a weight is unpacked, then that is multiplied, in the dtype of the input
                unpacked = own(args, kwargs or {})
                self.traffic += unpacked
                self._seconds += unpacked / self._memory_rate
                traffic += unpacked
            work = self._flops(func, args, kwargs or {}, out)
            if func in _IS_CAUSAL:
                work *= self._shown(func, args, kwargs or {})
            work /= self._rate(read)
            runs = repeats()
            self.traffic += traffic * runs
            # Arithmetic and memory work at the same time: the slower of them tells.
            self._seconds += max(work, traffic / self._memory_rate) * runs
            self._launch_s += LAUNCH_SECONDS * runs
        return out

    lags = False
    """Launches are counted, not timed."""

    def lap(self, behind: float = 0.0) -> Lap:
        """Return the estimate for the operations since the last call."""
        lap = Lap(seconds=self._seconds, launch_s=self._launch_s)
        self._seconds = self._launch_s = 0.0
        return lap

    def enough(self, seconds: Sequence[float]) -> bool:
        """Return True: counting again gives the same."""
        return True

    def _rate(self, read: list[Tensor]) -> float:
        # The first tensor is multiplied. Others may have another dtype and are not: the logarithms of attention's
        # sums, offsets, packed weights. What has no rate counts as the slowest.
        slowest = min(self._rates.values())
        return self._rates.get(read[0].dtype, slowest) if read else slowest

    def _shown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        mask, place = kwargs.get("attn_mask"), _IS_CAUSAL[func]
        causal = kwargs.get("is_causal", len(args) > place and args[place])
        if self._unmasked and mask is not None:
            causal = mask.dim() < 3 or mask.shape[-3] == 1
        return min(1.0, (1 + _TILE / args[0].shape[-2]) / 2) if causal else 1.0

    @staticmethod
    def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        if func is FLASH_ON_CPU:
            return _attention(*(tensor.shape for tensor in args[:3]))
        if func is FLASH_ON_CPU_BACKWARD:
            return _attention_backward(*(tensor.shape for tensor in args[:4]))
        if schema_of(func).name == "bitsandbytes::gemm_4bit":
            return 2.0 * float(out.numel() * args[0].shape[-1])
        if func is _grouped_mm:  # a group has some of the rows, columns or terms, and all groups have each of them once
            left, right = args[:2]
            if right.dim() == 2 and left.dim() == 3:
                return 2.0 * float(left.shape[1] * right.numel())
            return 2.0 * float(left.numel() * right.shape[-1])
        count = flop_registry.get(packet_of(func))
        return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0


Meter = Stopwatch | Roofline
"""Tells the time of computations that ran between two calls of ``lap``, and when they have run often enough."""


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of ``func`` for fake tensors.

    Torch multiplies groups in every floating dtype; its rule for fake tensors knows one of them.
    """
    if func is not _grouped_mm or args[0].dtype == args[1].dtype == torch.bfloat16:
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise ModelError(
                f"{func} asks for numbers, as where experts are given tokens in turn, and without weights there are "
                "none: this model trains, but is planned only with its weights, when training begins"
            ) from None
    left, right = args[:2]
    parts = left.shape[:-2] if right.dim() == 3 else ()  # groups of rows or columns lie side by side
    if left.dim() == right.dim() == 2:  # each group of terms has a product
        parts = (args[2] if len(args) > 2 else kwargs["offs"]).shape
    return left.new_empty((*parts, left.shape[-2], right.shape[-1]), dtype=kwargs.get("out_dtype") or left.dtype)


def _filled(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the tensor that an operation of ours is given for its result, and does not read; None if there is none."""
    arguments = schema_of(func).arguments
    return args[0] if args and arguments and arguments[0].name == "out" else None


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read: list[Tensor], out: Any) -> list[Tensor]:
    """Return the tensors that an operation writes; none if its results are views of its arguments."""
    results = list(tensors_in(out))
    if schema_of(func).is_mutable:
        arguments = enumerate((*args, *kwargs.values()))
        return results or [*tensors_in([one for place, one in arguments if writes(func, place, len(args), kwargs)])]
    known = {address_of(tensor.untyped_storage()) for tensor in read}
    return [tensor for tensor in results if address_of(tensor.untyped_storage()) not in known]


class Watch:
    """Device memory in use during a phase: storages by account, and on CUDA the workspaces of kernels."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._account = Account(device_type=device.type, timeline=True)
        self._left_out: set[int] = set()
        self._outside = self._beside = 0
        self.slack = 0
        """The most that torch's allocator held beyond what it had allocated, over all phases."""

    @property
    def current(self) -> int:
        """Bytes in use."""
        return self._account.current

    def __enter__(self) -> None:
        self._account.reset_peak()
        if self._cuda is not None:
            torch.cuda.empty_cache()  # what is left of other blocks would give way under the cap
            torch.cuda.reset_peak_memory_stats(self._cuda)
            # What torch holds that is not under account: weights, and whatever was there before.
            self._outside = torch.cuda.memory_allocated(self._cuda) - self._account.current
        self._account.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._account.__exit__(*error)
        if self._cuda is not None:
            allocated = torch.cuda.max_memory_allocated(self._cuda)
            # Workspaces of kernels are no storages, which the account would see. Both peaks need not be at the same
            # time, so this may be too little, but never counts a storage twice.
            self._beside = max(0, allocated - self._outside - self._account.peak)
            self.slack = max(self.slack, torch.cuda.max_memory_reserved(self._cuda) - allocated)

    def leave_out(self, gradient: Tensor) -> None:
        """Do not count ``gradient``."""
        serial = self._account.serial(gradient)
        if serial is not None:
            self._left_out.add(serial)

    def peak(self) -> int:
        """Return the peak of the last phase."""
        return self._account.peak_without(self._left_out) + self._beside

    def whole_peak(self) -> int:
        """Return the peak of the last phase, with the gradients that were to be left out."""
        return self._account.peak + self._beside

    def held_peak(self) -> int:
        """Return the peak of the last phase if the gradients left out had stayed to its end."""
        return self._account.peak_holding(self._left_out) + self._beside
