"""The cost of layers that read their weights in host memory (zero copy).

Layers are recognised by their structure, whatever the model. Known are those whose reads can be told: embeddings,
products with one matrix (``nn.Linear``, ``Conv1D``), and layers that scale or shift features (norms), if they have no
modules and no buffers but numbers, and take one tensor; and whatever has stored weights. Tensors of other layers get no
figures, so no plan reads them in host memory.

Bytes are a model, for every device:

* an embedding reads one row per token in the forward, nothing in the backward;
* a norm reads its vectors once in either direction;
* a stored weight (``model/forms``) is opened once in either direction. Of experts, those are opened that the tokens
  of the batch choose; without numbers, every choice counts as equally likely;
* a product reads its matrix once for every :data:`TILE` rows of activations, in the forward and again in the backward
  for the gradient of its input, unless the matrix is so small (:data:`CACHE_BYTES`) that the device's cache has it
  after the first time. Tiles are not smaller than that, nor are caches: both assumptions are on the safe side.

Seconds are those bytes at the speed of the link, on top of everything else, as if none were hidden behind arithmetic.
On a CUDA device they are measured instead, one layer of each kind.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import DisableTorchDispatch, is_fake
from lt_offload.errors import UnsupportedError
from lt_offload.machine.zero_copy import locked, refusal, zero_copy_of, zero_copy_view
from lt_offload.model.blocks import Structure
from lt_offload.model.compiled import is_compiled
from lt_offload.model.forms.experts import is_routed
from lt_offload.model.forms.layer import pieces_of, stored_of
from lt_offload.profiling.meters import Meter, fastest
from lt_offload.profiling.rates import measure_direct
from lt_offload.schema.profile import HardwareProfile, ReadProfile, ZeroCopyProfile
from lt_offload.units import format_bytes

_log = logging.getLogger(__name__)

HostCopy = Callable[[Tensor], AbstractContextManager[Tensor]]

TILE = 128
"""Rows of activations for which a product reads its matrix once."""

CACHE_BYTES = 1 << 20
"""Matrices up to this size are taken to stay in the device's cache while a product reads them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """One parameter, read by one call of the layer that owns it."""

    module: nn.Module
    parameter: str
    """Its name in ``module``."""
    shape: torch.Size
    """Shape of the layer's input."""
    forward_bytes: int
    backward_bytes: int

    @property
    def tensor(self) -> nn.Parameter:
        """The parameter."""
        return self.module.get_parameter(self.parameter)

    @property
    def signature(self) -> object:
        """A key that is equal for reads that take equally long."""
        return type(self.module), self.parameter, self.shape, self.tensor.shape, self.tensor.dtype


class Readers:
    """Within the context, notes which layers of the blocks read which parameters, and how much of them."""

    def __init__(self, structure: Structure) -> None:
        self._structure, self._tensors = structure, structure.tensors
        blocks = list(enumerate(structure.blocks))
        self._count = len(blocks)
        self._uses = [[index for index, block in blocks if i in block.tensors] for i in range(len(self._tensors))]
        self._index = {parameter: index for index, (_, parameter) in enumerate(self._tensors)}
        self._blocks = {module: index for index, block in blocks for module in block.module.modules()}
        self._reads: dict[tuple[int, int], list[Read]] = {}
        """By tensor and block."""
        self.noted: list[Read] = []
        """All of them, as they came."""
        self._seconds: dict[object, tuple[float, float]] = {}
        """By signature: seconds of a forward and a backward, where they have been measured."""
        self._write_rate = math.inf
        """Bytes per second of gradients that the device writes to host memory, where it has been measured."""
        self._hooks: list[Any] = []
        self._counts = True

    def __enter__(self) -> Self:
        # Hooks inside a compiled block would be compiled with it: of its tensors nothing is known.
        compiled = {m for block in self._structure.blocks if is_compiled(block.module) for m in block.module.modules()}
        owners = [m for m in self._blocks if m not in compiled and next(m.parameters(recurse=False), None) is not None]
        self._hooks = [module.register_forward_hook(self._called, with_kwargs=True) for module in owners]
        return self

    def __exit__(self, *error: object) -> None:
        self._counts = False  # blocks are measured with the hooks that they had when they were called, these among them
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Enclose a run of a block that training would not make: its reads do not count."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def of(self, structure: Structure) -> Readers:
        """Return the same for the blocks of ``structure``."""
        readers = Readers(structure)
        for read in (read for calls in self._reads.values() for read in calls):
            if read.module in readers._blocks:
                readers._note(read)
        return readers

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if is_routed(module):  # by name, too, and in any order
            bound = signature(module.forward).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        for read in reads(module, (*args, *kwargs.values()), out) if self._counts else ():
            self._note(read)

    def _note(self, read: Read) -> None:
        # Not a parameter of somebody else, whom functional_call has called the module with.
        if read.tensor in self._index:
            self._reads.setdefault((self._index[read.tensor], self._blocks[read.module]), []).append(read)
            self.noted.append(read)

    def note_like(self, reads: Sequence[Read], module: nn.Module, other: nn.Module) -> None:
        """Note ``reads`` by ``module`` as those of ``other``, which is like it."""
        places = dict(zip(module.modules(), other.modules(), strict=True))
        for read in reads:
            self._note(replace(read, module=places[read.module]))

    def measure_on(self, device: torch.device, meter: Meter, say: Callable[[str], None]) -> None:
        """Measure one read of every kind on a CUDA ``device``; if it cannot read host memory, no tensor has figures."""
        say("measuring reads of host memory")
        view_of, synchronize = partial(zero_copy_view, device=device), partial(torch.cuda.synchronize, device)
        try:
            with locked(torch.empty(1024, dtype=torch.int32)) as probe:
                reason = refusal(view_of, probe, synchronize)
            if not reason:
                speeds = measure_direct(device, view_of)
                reason = speeds.too_slow
            if not reason:
                self._write_rate = speeds.write
                _log.info(
                    "weights can be read in host memory, at %s/s; gradients can be written there, at %s/s",
                    format_bytes(speeds.read),
                    format_bytes(speeds.write),
                )
                self.measure(lambda data: zero_copy_of(data, device), device, meter)
        except UnsupportedError as error:  # some containers do not allow to lock memory
            reason = str(error)
        if reason:
            say(f"weights cannot be read in host memory: {reason}")
            _log.info("weights cannot be read in host memory: %s", reason)
            # Figures that stayed would make plans read weights where this device cannot.
            self._reads.clear()

    def measure(self, host_copy: HostCopy, device: torch.device, meter: Meter) -> None:
        """Measure one read of every kind; ``host_copy`` copies a tensor to host memory that ``device`` sees."""
        for calls in self._reads.values():
            for read in calls:
                if read.signature not in self._seconds and not is_routed(read.module):
                    self._seconds[read.signature] = _extra_seconds(read, host_copy, device, meter)

    def profile(self, tensor: int, hardware: HardwareProfile) -> ZeroCopyProfile | None:
        """Return the costs of ``tensor``; None if the reads of one of the blocks that use it cannot be told."""
        calls = [self._reads.get((tensor, block), []) for block in self._uses[tensor]]
        parameter = self._tensors[tensor][1]
        # Host memory can be a tensor of the device only where it is contiguous.
        if not all(calls) or not parameter.is_contiguous():
            return None
        return ZeroCopyProfile(
            reads=tuple(self._of_block(reads, hardware.h2d_bytes_per_s) for reads in calls),
            grad_s=parameter.nbytes / min(hardware.d2h_bytes_per_s, self._write_rate),
        )

    def looked_up(self, tensor: int) -> int:
        """Return the bytes of rows of ``tensor`` that a batch looks up, if it is a table that all tokens share.

        0 where it is not read in the first block and in the last one, in the first by embeddings alone.
        """
        if self._uses[tensor] != [0, self._count - 1] or not self._tensors[tensor][1].requires_grad:
            return 0
        if is_compiled(self._structure.blocks[0].module):
            return 0  # nobody sees what is looked up inside
        calls = self._reads.get((tensor, 0), [])
        if not all(isinstance(read.module, nn.Embedding) and not read.module.sparse for read in calls):
            return 0
        return sum(read.forward_bytes for read in calls)

    def _of_block(self, calls: list[Read], rate: float) -> ReadProfile:
        """Return the cost of all reads of one tensor by one block together."""
        costs = [self._cost(read, rate) for read in calls]
        forward_s, backward_s, forward_bytes, backward_bytes = (sum(figures) for figures in zip(*costs, strict=True))
        return ReadProfile(
            forward_s=forward_s,
            backward_s=backward_s,
            forward_bytes=int(forward_bytes),
            backward_bytes=int(backward_bytes),
        )

    def _cost(self, read: Read, rate: float) -> tuple[float, float, float, float]:
        """Return seconds of forward and backward, and bytes of both: no more than the link carries in that time."""
        if read.signature not in self._seconds:
            return read.forward_bytes / rate, read.backward_bytes / rate, read.forward_bytes, read.backward_bytes
        forward_s, backward_s = self._seconds[read.signature]
        least = read.tensor.nbytes
        return (
            forward_s,
            backward_s,
            min(read.forward_bytes, max(least, forward_s * rate)),
            min(read.backward_bytes, max(least, backward_s * rate)),
        )


def reads(module: nn.Module, args: tuple[Any, ...], out: Any) -> Iterator[Read]:
    """Yield the reads of its own parameters by a call of ``module``; nothing if they cannot be told."""
    if stored_of(module):
        yield from _of_stored(module, args)
        return
    x = args[0] if len(args) == 1 else None
    if not isinstance(x, Tensor) or not isinstance(out, Tensor):
        return
    if any(True for _ in module.children()) or any(buffer.ndim for buffer in module.buffers()):
        return  # it reads, and may write, more than its input and its own parameters, as one does that is parametrized
    own = dict(module.named_parameters(recurse=False))
    if not all(isinstance(tensor, nn.Parameter) for tensor in own.values()):
        return  # torch.func.functional_call has put others in their place
    weight = own.get("weight")
    if isinstance(module, nn.Embedding):
        if module.max_norm is None:  # otherwise the forward writes, too
            yield _read(module, "weight", x, out.numel() * module.weight.element_size(), 0)
    elif (
        weight is not None
        and [x.shape[-1], out.shape[-1]] in (list(weight.shape), list(weight.shape)[::-1])
        and x.shape[:-1] == out.shape[:-1]
    ):
        passes = 1 if weight.nbytes <= CACHE_BYTES else -(-x.numel() // x.shape[-1] // TILE)
        yield _read(module, "weight", x, passes * weight.nbytes, passes * weight.nbytes)
        if "bias" in own:
            yield _read(module, "bias", x, own["bias"].nbytes, 0)
    elif x.shape == out.shape and all(p.shape == out.shape[-1:] for p in own.values()):
        for name, parameter in own.items():
            yield _read(module, name, x, parameter.nbytes, parameter.nbytes)


def _of_stored(module: nn.Module, args: tuple[Any, ...]) -> Iterator[Read]:
    x, share = args[0], 1.0
    if is_routed(module):
        chosen, experts = args[1], next(stored.shape[0] for stored in stored_of(module).values())
        known = not (is_fake(chosen) or chosen.is_meta)
        # What watches the operations of a block must not see one that its other runs do not make.
        with DisableTorchDispatch():
            share = len(chosen.unique()) / experts if known else 1 - (1 - 1 / experts) ** chosen.numel()
    for name in stored_of(module):
        for piece, tensor in zip(stored_of(module)[name].names(name), pieces_of(module, name), strict=True):
            nbytes = round(share * tensor.nbytes)
            yield _read(module, piece, x, nbytes, nbytes)


def _read(module: nn.Module, name: str, x: Tensor, forward: int, backward: int) -> Read:
    return Read(module=module, parameter=name, shape=x.shape, forward_bytes=forward, backward_bytes=backward)


def _extra_seconds(read: Read, host_copy: HostCopy, device: torch.device, meter: Meter) -> tuple[float, float]:
    held = [(parameter, parameter.data) for parameter in read.module.parameters(recurse=False)]
    own, data = read.tensor, read.tensor.data
    try:
        for parameter, before in held:
            parameter.data = before.to(device)
        near = _seconds(read, device, meter)
        # The parameter itself is what the context fills: the layer then reads host memory, and nothing else changes.
        with host_copy(data) as own.data:
            far = _seconds(read, device, meter)
    finally:
        for parameter, before in held:
            parameter.data = before
    return max(0.0, far[0] - near[0]), max(0.0, far[1] - near[1])


def _seconds(read: Read, device: torch.device, meter: Meter) -> tuple[float, float]:
    """Return the time of the layer's forward and of the part of its backward that leads to its input."""
    module = read.module
    if isinstance(module, nn.Embedding):
        x = torch.arange(read.shape.numel(), device=device).remainder(module.num_embeddings).view(read.shape)
    else:
        dtype = next((stored.dtype for stored in stored_of(module).values()), read.tensor.dtype)
        x = torch.zeros(read.shape, dtype=dtype, device=device, requires_grad=True)
    laps: list[tuple[float, float]] = []
    while len(laps) < 2 or not meter.enough([sum(lap) for lap in laps[1:]]):
        meter.lap()
        # Not a call of the module, which would call hooks of users.
        out = module.forward(x)
        forward = meter.lap().seconds
        if x.requires_grad:
            # A gradient of its own, made before the clock starts, as a backward is given one.
            gradient = torch.zeros_like(out)
            meter.lap()
            torch.autograd.grad(out, x, gradient)
        laps.append((forward, meter.lap().seconds if x.requires_grad else 0.0))
    forwards, backwards = zip(*laps[1:], strict=True)  # the first one warms up
    return statistics.mean(fastest(forwards)), statistics.mean(fastest(backwards))
