"""The compiled kernel updates weights of any dtype on the host by AdamW in one pass over memory.

The kernel comes with a wheel; elsewhere it is compiled for this processor when it is first needed, which takes a
compiler and a few seconds once (:mod:`lt_offload.compiling`). It is used only if it gives the very numbers of torch's
own kernel here; where it does not, or there is none, the log says why and :mod:`lt_offload.optim.plain` updates
instead.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import math
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lt_offload.compat.torch import LIBRARY
from lt_offload.compiling import build, load, shipped
from lt_offload.optim import blockwise, plain
from lt_offload.optim.plain import Entry, Options, converted, tail

_log = logging.getLogger(__name__)

Made = TypeVar("Made")

_SOURCE = Path(__file__).with_name("adamw.cpp")
_CACHE_LINE = 64
"""Bytes: torch's fused kernel rounds what is left over after the last whole one in another way."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the kernel for the dtypes of weights."""
_MOMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
"""The same for moments."""
_OWN = 3
"""The same for moments in the dtype of the weight."""
_ONCE, _MASTERS, _NOISE, _EACH = range(4)
"""The same for what is rounded, and when."""
_MODE = 0x140102
"""Of MKL's vector functions, as torch calls them: the most exact, with denormal numbers, without errors."""
_SAMPLE, _WORTH = 1 << 12, 0.9


Numbers = np.ndarray[Any, np.dtype[Any]]


Kind = tuple[int, int, int]
"""Numbers of the kernel for the dtype of the weight, for the moments, and for what is rounded."""

_PARTED = ("weight", "low", "grad", "exp_avg", "exp_avg_sq")
"""Arrays of which parts are updated."""
_ARRAYS = np.dtype([(name, "u8") for name in (*_PARTED, "scale", "scale_sq")])
"""Arguments of the kernel for a tensor: addresses, 0 where there is none."""
_STEPS = np.dtype(
    [("negative_size", "f4"), ("correction", "f4"), ("seed", "u4"), ("first", "u4"), ("moment_seed", "u4")]
)
"""The same: numbers."""


class _Map(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float * 16) for name in ("unit", "less", "ratio", "bounds")]

    @classmethod
    def of(cls, ladder: blockwise.Ladder) -> _Map:
        rows = (ladder.unit, ladder.less, ladder.ratio, ladder.bounds)
        return cls(*((ctypes.c_float * 16)(*row.tolist()) for row in rows))


class _Maps(ctypes.Structure):
    _fields_ = [("with_sign", _Map), ("without", _Map)]


class _KernelCommon(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_float) for name in ("keep", "decay", "weight1", "beta2", "weight2", "eps", "scale")),
        ("maps", ctypes.c_void_p),
        ("root", ctypes.c_void_p),
        ("limit", ctypes.c_void_p),
        ("mode", ctypes.c_int64),
        ("corrects", ctypes.c_int64),
    ]


class Kernel:
    """The compiled kernel."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._run = load(library, Path(torch.__file__).parent).lt_offload_adamw  # lets go of the interpreter lock
        self._run.restype = None
        self._run.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 4]
        self._maps = _Maps(*(_Map.of(blockwise.ladder(signed)) for signed in (True, False)))
        self._root, self._limit = _library_root()
        self.unlike: set[Kind] = set()
        """Kinds of updates that are not as torch does them here."""
        self.corrects = self._corrects()
        """Divide by products that are corrected; no bit depends on it."""

    def _corrects(self) -> bool:
        """Return whether that is faster on this processor, by some updates in the cache of a core."""
        options = Options(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
        ones = [torch.ones(_SAMPLE, dtype=torch.float32, device="cpu") for _ in range(4)]
        tables = _tables([Entry(ones[0], ones[1], None, ones[2], ones[3], 1.0)] * 32, options)
        sizes, times = np.full(32, _SAMPLE), {True: math.inf, False: math.inf}
        for self.corrects in (True, False) * 8:
            began = time.thread_time()  # what other processes do beside does not count
            self._update(sizes, *tables, (0, _OWN, _ONCE), options, threads=1)
            times[self.corrects] = min(times[self.corrects], time.thread_time() - began)
        return times[True] < _WORTH * times[False]

    @staticmethod
    def kind(entry: Entry, options: Options) -> Kind | None:
        """Return what the kernel calls an update like this one; None if it is for no such tensors."""
        param, grad, master, exp_avg, exp_avg_sq = entry[:5]
        scales = {scale.dtype for scale in entry[8:10] if scale is not None}
        if (
            type(exp_avg) is not Tensor  # fake tensors have no memory
            or type(exp_avg_sq) is not Tensor
            or not param.is_cpu
            or param.dtype is not grad.dtype
            or param.dtype not in _TYPES
            or exp_avg.dtype is not exp_avg_sq.dtype
            or (exp_avg.dtype is torch.uint8) != entry.in_blocks
            or (master is not None and master.dtype is not torch.float32)
            or not scales <= {torch.float32}
            or not all(tensor is None or tensor.is_contiguous() for tensor in entry.tensors)
        ):
            return None
        number, dtype, itself = _TYPES[param.dtype], param.dtype, master is None and entry.seed is None
        if itself and exp_avg.dtype is dtype:
            return None if options.scales and number else (number, _OWN, _EACH if options.each else _ONCE)
        if exp_avg.dtype not in _MOMENTS or itself != (number == 0) or (dtype is torch.float16 and master is None):
            return None
        return number, _MOMENTS[exp_avg.dtype], _ONCE if itself else _NOISE if master is None else _MASTERS

    def update(self, entries: Sequence[Entry], options: Options) -> None:
        """Update ``entries``, all of which it takes and which are of one kind; gradients stay as they are."""
        if not entries:
            return
        kind = self.kind(entries[0], options)
        assert kind is not None
        # What is left over after whole units torch's fused kernel rounds in another way: so it does that part itself.
        unit = _CACHE_LINE // (2 if kind[0] and kind[1] == _OWN else 4)
        unit = 1 if kind[2] == _EACH else blockwise.BLOCK if entries[0].in_blocks else unit
        plain.update([tail(entry, unit) for entry in entries if entry.param.numel() % unit], options)
        whole = [entry for entry in entries if entry.param.numel() >= unit]
        sizes = [entry.param.numel() // unit * unit for entry in whole]
        self._update(np.array(sizes, dtype=np.int64), *_tables(whole, options), kind, options)

    def update_ranges(self, entry: Entry, ranges: Sequence[tuple[int, int, int]], options: Options) -> None:
        """Update parts of ``entry``, which it takes: first element, size, and begin of the gradient of each."""
        kind = self.kind(entry, options)
        assert kind is not None
        starts, sizes, begins = np.ascontiguousarray(np.array(ranges, dtype=np.int64).reshape(-1, 3).T)
        arrays, steps = (np.repeat(table, len(sizes)) for table in _tables([entry], options))
        tensors = (entry.param if entry.master is None else entry.master, entry.param, entry.grad, *entry[3:5])
        for name, tensor in zip(_PARTED, tensors, strict=True):
            offsets = (begins if name == "grad" else starts) * tensor.element_size()
            arrays[name] += np.where(arrays[name] > 0, offsets, 0).astype(np.uint64)
        steps["first"] += starts.astype(np.uint32)
        self._update(sizes, arrays, steps, kind, options)
        # As in `update`: without this, a graph that has saved the weight would go on with other numbers unnoticed.
        torch.autograd.graph.increment_version([entry.param])

    def _update(
        self, sizes: Numbers, arrays: Numbers, steps: Numbers, kind: Kind, options: Options, threads: int = 0
    ) -> None:
        common = _KernelCommon(
            keep=1 - float(options.lr) * options.weight_decay if options.decoupled else 1,
            decay=0 if options.decoupled else options.weight_decay,
            weight1=1 - options.beta1,
            beta2=options.beta2,
            weight2=1 - options.beta2,
            eps=options.eps,
            scale=(-1 if options.maximize else 1) * float(options.grad_scale),
            maps=ctypes.addressof(self._maps),
            root=self._root if kind == (0, _OWN, _EACH) else None,
            limit=self._limit,
            mode=_MODE,
            corrects=self.corrects,
        )
        tables = (table.ctypes.data for table in (sizes, arrays, steps))
        self._run(len(sizes), *tables, ctypes.byref(common), *kind, threads or torch.get_num_threads())


def _library_root() -> tuple[int | None, int | None]:
    """Return the addresses of the root that torch takes of fp32 tensors, and of what limits its threads.

    MKL's is not always the number that is nearest; it would use threads for some hundred numbers. None: it is the
    processor's.
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None, None
    try:
        library = ctypes.CDLL(LIBRARY)
        functions = library.vmsSqrt, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None, None
    root, limit = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return root, limit


def _tables(entries: Sequence[Entry], options: Options) -> tuple[Numbers, Numbers]:
    arrays, steps = [], []
    for entry in entries:
        param = entry.param.data_ptr()
        weight, low = (param, 0) if entry.master is None else (entry.master.data_ptr(), param)
        moments = (entry.exp_avg.data_ptr(), entry.exp_avg_sq.data_ptr())
        scales = (0 if scale is None else scale.data_ptr() for scale in (entry.exp_avg_scale, entry.exp_avg_sq_scale))
        arrays.append((weight, low, entry.grad.data_ptr(), *moments, *scales))
        size, correction = options.size(entry.step), options.correction(entry.step)
        steps.append((-size, correction, entry.seed or 0, entry.first & 0xFFFFFFFF, entry.moment_seed))
    return np.array(arrays, dtype=_ARRAYS), np.array(steps, dtype=_STEPS)


_left_out: list[None] = []
"""One for each :func:`left_out` that is entered."""


@contextmanager
def left_out() -> Iterator[None]:
    """Within the context, in all threads, updates on the host are by the operations that a device has."""
    _left_out.append(None)
    try:
        yield
    finally:
        _left_out.pop()


def takes(entry: Entry, options: Options) -> bool:
    """Return whether there is a kernel for an update like this one."""
    kind = Kernel.kind(entry, options)
    compiled = kernel() if kind is not None and not _left_out else None
    return compiled is not None and kind not in compiled.unlike


def update_ranges(entry: Entry, ranges: Sequence[tuple[int, int, int]], options: Options) -> bool:
    """Update parts of ``entry`` as :meth:`Kernel.update_ranges` does; return whether there is a kernel for it."""
    compiled = kernel() if not entry.in_blocks and takes(entry, options) else None
    if compiled is None:
        return False
    compiled.update_ranges(entry, ranges, options)
    return True


def update(entries: Sequence[Entry], options: Options) -> list[Entry]:
    """Update the entries that there is a kernel for, and return the others."""
    kinds: defaultdict[Kind | None, list[Entry]] = defaultdict(list)
    for entry in entries:
        kinds[Kernel.kind(entry, options)].append(entry)
    rest = kinds.pop(None, [])
    compiled = kernel() if kinds and not _left_out else None
    if compiled is None:
        return list(entries)
    for kind in compiled.unlike:
        rest += kinds.pop(kind, [])
    for alike in kinds.values():
        number = next(_numbers)
        _updates[number] = alike, options
        grads = [entry.grad for entry in alike]
        others = (tensor for entry in alike for tensor in (entry.param, *entry.tensors[2:]))
        try:
            torch.ops.lt_offload.adamw_([tensor for tensor in others if tensor is not None], grads, number)
        finally:
            del _updates[number]
        # The kernel writes past torch: a graph that has saved a weight has to notice all the same.
        torch.autograd.graph.increment_version([entry.param for entry in alike])
    return rest


# An operation of torch's, so that whoever watches what runs (profilers, counters of memory traffic) sees this too.
_library = torch.library.Library("lt_offload", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("adamw_(Tensor(a!)[] written, Tensor[] grads, int number) -> ()")  # type: ignore[no-untyped-call]
_numbers = itertools.count()
_updates: dict[int, tuple[list[Entry], Options]] = {}
"""Updates under way, by number: the operation shows the tensors alone."""


def _adamw(_written: list[Tensor], _grads: list[Tensor], number: int) -> None:
    compiled = kernel()
    assert compiled is not None
    compiled.update(*_updates[number])


_library.impl("adamw_", _adamw, "CPU")  # type: ignore[no-untyped-call]


@functools.cache
def kernel() -> Kernel | None:
    """Return the kernel, None if there is none on this machine; the log says why, once."""
    slower = "AdamW is slower than it could be on the host: no compiled kernel, as %s"
    return loaded(_SOURCE, Kernel, agrees, slower, "numbers are not those of torch's kernel")


def loaded(
    source: Path, make: Callable[[Path], Made], agrees: Callable[[Made], bool], slower: str, unlike: str
) -> Made | None:
    """Return what ``make`` makes of the library of ``source``: that of the wheel, or one that is compiled here.

    None if there is none on this machine, or it does not agree: the log says that it is ``slower``, and why.
    """
    library, compiled = shipped(source, torch.backends.cpu.get_cpu_capability()), None
    try:
        if library.is_file():
            try:
                compiled = make(library)
            except OSError as error:
                _log.info("%s cannot be loaded and is compiled anew: %s", library, error)
        compiled = make(build(source)) if compiled is None else compiled
    except (OSError, subprocess.SubprocessError) as error:
        lines = [line for line in (getattr(error, "stderr", None) or "").splitlines() if "error" in line]
        reason = lines[0].strip() if lines else str(error)
    else:
        if agrees(compiled):
            return compiled
        reason = f"its {unlike} on this processor"
    _log.warning(slower, reason)
    return None


def agrees(compiled: Kernel) -> bool:
    """Return whether ``compiled`` rounds as torch does on this processor, tried on random numbers.

    Where it does so but for some updates that are rounded after each operation, these are in ``compiled.unlike``.
    """
    # Below and above one half torch interpolates in two ways.
    for beta1, step in ((0.9, 1.0), (0.25, 7.0)):
        common = Options(lr=1e-2, beta1=beta1, beta2=0.99, eps=1e-3, weight_decay=0.1)
        for entry, changes in _samples(step, torch.Generator("cpu").manual_seed(0)):
            options, right = replace(common, **changes), converted(entry, Tensor.clone)
            compiled.update([entry], options)
            plain.update([right], options)
            pairs = zip(entry.tensors, right.tensors, strict=True)
            if not all(a is None or b is None or torch.equal(a, b) for a, b in pairs):
                kind = compiled.kind(entry, options)
                assert kind is not None
                compiled.unlike.add(kind)
    return all(way == _EACH for *_, way in compiled.unlike)


def _samples(step: float, generator: torch.Generator) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Yield an update of each kind that the kernel knows, and options."""

    def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
        one, other = (torch.randn(_SAMPLE, generator=generator, dtype=torch.float32, device="cpu") for _ in range(2))
        return (one * other.mul_(3).exp_()).to(dtype)

    for dtype in _TYPES:
        param, grad, kept = (numbers(dtype) for _ in range(3))
        own = Entry(param, grad, None, kept, kept.abs(), step)
        for each, decoupled in itertools.product((False, True), (True, False)):
            if decoupled or not each or dtype == torch.float32:
                yield converted(own, Tensor.clone), {"each": each, "decoupled": decoupled}
        wide = Entry(param, grad, None, numbers(), numbers().abs_(), step, moment_seed=(1 << 32) - 1)
        masters = [wide if dtype == torch.float32 else wide._replace(master=numbers())]
        noise = [wide._replace(seed=1 << 31)] if dtype == torch.bfloat16 else []
        for entry, moments in itertools.product((*masters, *noise), _MOMENTS):
            yield plain.with_moments(converted(entry, Tensor.clone), moments), {"grad_scale": 0.3}
