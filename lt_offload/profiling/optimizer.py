"""Costs of an optimizer: bytes of state per tensor, and the speed of updates on the host and on the device.

Any ``torch.optim.Optimizer`` that updates each tensor on its own is measured by running it on stand-ins; none is known
by name. Host updates are measured in memory like the engine's, with far more of it than caches hold.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

from lt_offload import limits
from lt_offload.arguments import shown
from lt_offload.compat.torch import DataDependentOutputException, FakeTensorMode, tree_map
from lt_offload.errors import ConfigError, OffloadError, named
from lt_offload.machine.accounting import Account
from lt_offload.machine.dispatch import OperationMode
from lt_offload.machine.driver import in_what_room
from lt_offload.machine.numa import MemoryNode, memory_node_of
from lt_offload.machine.pages import map_pages
from lt_offload.model.optimizers import (
    STATE_ALIGNMENT,
    StateAllocator,
    is_known,
    of_none,
    of_parameters,
    own_options,
    places_of,
    put,
    tensors_of,
    twin_of,
)
from lt_offload.optim import AdamW, native, torch_adam
from lt_offload.optim.rows import updates_rows
from lt_offload.profiling.hardware import available_host_bytes
from lt_offload.profiling.meters import AHEAD, Roofline, Stopwatch, Watch, fastest
from lt_offload.schema.profile import HardwareProfile, OptimizerProfile
from lt_offload.units import round_up

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
AnyOptimizer = Optimizer | OptimizerFactory | str
"""An optimizer, what makes one, or a name in :data:`OPTIMIZERS`."""

_OF_SHAPES = (Muon, Adafactor)
"""Optimizers of torch that take memory by the shape of a matrix: products of its rows, or sums of them."""
_STEPS, _UNCHANGED = 16, 3
_SAMPLE_ELEMENTS, _LEAST_ELEMENTS = 1 << 22, 1 << 16
"""Elements of a trial's tensor, and the fewest that a device has to have room for."""
_ESTIMATE_SHAPE = (256, 256)
_ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 23}
"""Elements updated in one measurement, by device: with gradients and states half a gigabyte for an fp32 AdamW, more
than caches of servers hold; the emulated device is not worth so much time."""
_TRIAL_SHAPE = (512, 2048)
"""Shape of tensors whose update takes milliseconds."""
_RAM_SHARE = 0.1
_TOLERANCE = 0.03
"""More threads are not taken for less than this gain."""
_CORE_BYTES_PER_S = 12e9
"""For estimates: the host memory traffic of one core that updates, an assumption for cores of desktops."""

_CODING_SHARE = 0.5
"""For estimates: as much of that traffic a core has while it codes states of eight bits, an assumption, too; measured
figures of the cores that there were are in ``results/bench-update.json``."""


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adamw8bit": partial(AdamW, state_dtype="8bit"),
    "adam": partial(torch.optim.Adam, fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "adafactor": Adafactor,
}
"""Optimizers that have a name here; any other can be given itself."""


def named_optimizer(optimizer: AnyOptimizer) -> Optimizer | OptimizerFactory:
    """Return ``optimizer``, or what makes the one of that name; ``ConfigError`` if there is none."""
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer.lower() not in OPTIMIZERS:
        raise ConfigError(f"optimizer={optimizer!r} is not known by name; known are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optimizer.lower()]


def build_optimizer(optimizer: AnyOptimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Return ``optimizer``, made for ``parameters`` if it is a name or a factory.

    Raises:
        ConfigError: if there is nothing to train, no optimizer of that name, or the factory makes none.
    """
    factory = named_optimizer(optimizer)
    if isinstance(factory, Optimizer):
        return factory
    if not parameters:
        raise ConfigError("the model has no trainable parameter; set requires_grad_(True) on those to be trained")
    why = ""
    try:
        made = factory(parameters)
    except TypeError as error:
        made, why = None, f" ({error})"
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer={shown(optimizer)} makes no torch.optim.Optimizer of a list of parameters{why}; give "
            "torch.optim.AdamW, for example, or one that is made already"
        )
    return made


class UpdateSizes:
    """Bytes that the update of each tensor takes, those of one kind (shape, dtype and group) tried once.

    ``scratch_ratio``: bytes that one takes for a moment at least, per byte: on a GPU kernels make what no operation
    shows.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, *, scratch_ratio: float = 0.0) -> None:
        self._optimizer, self._device, self._ratio = optimizer, device, scratch_ratio
        self._places = places_of(optimizer)
        self._states: dict[object, int] = {}
        self._scratch: dict[object, int] = {}

    def state(self, parameter: nn.Parameter) -> int:
        """Return the bytes of the state of ``parameter``; 0 if the optimizer does not update it.

        They are those of all state tensors of more than one element, each rounded up to 8 bytes.
        """
        kind = self._kind(parameter)
        if kind is None:
            return 0
        if kind not in self._states:
            state = self._optimizer.state.get(parameter)
            held = _state_bytes(state) if state else 0
            if not state or not is_known(self._optimizer):  # others may hold more some steps later
                held = max(held, _tried(self._sample(parameter), torch.device("cpu"), _state_after_steps))
            self._states[kind] = held
        return self._states[kind]

    def by_rows(self, parameter: nn.Parameter) -> bool:
        """Return whether some rows of ``parameter`` can be updated by themselves."""
        return updates_rows(self._optimizer, parameter)

    def scratch(self, parameter: nn.Parameter) -> int | None:
        """Return the bytes that an update of ``parameter`` on the device takes for a moment, beside its state.

        None where the largest tensor tells: most optimizers that are known do to each element what they do to any
        other.
        Ours takes large tensors in pieces on a GPU, so that it knows by itself.
        """
        kind = self._kind(parameter)
        if kind is not None and isinstance(self._optimizer, AdamW) and self._device.type == "cuda":
            return self._optimizer.scratch_bytes(parameter)
        if kind is None or (is_known(self._optimizer) and not isinstance(self._optimizer, _OF_SHAPES)):
            return None
        if kind not in self._scratch:
            room = self.state(parameter) / max(1, parameter.numel())
            seen = _tried(self._sample(parameter), self._device, partial(_scratch_of_steps, room))
            self._scratch[kind] = max(seen, math.ceil(parameter.nbytes * self._ratio))
        return self._scratch[kind]

    def scratch_of_all(self, parameters: Sequence[nn.Parameter], ratio: float) -> int:
        """Return the bytes that one step of the optimizer takes for a moment on the device, for all ``parameters``.

        As torch takes them on a GPU by itself: all at once (foreach). ``ratio``: bytes per byte of a tensor, where the
        largest tensor tells (:meth:`scratch`).
        """
        trained = [parameter for parameter in parameters if self._kind(parameter) is not None]
        scratches = [self.scratch(parameter) for parameter in trained]
        return sum(int(p.nbytes * ratio) if own is None else own for p, own in zip(trained, scratches, strict=True))

    def _kind(self, parameter: nn.Parameter) -> object:
        place = self._places.get(parameter)
        if place is None or not parameter.requires_grad:
            return None
        alone = own_options(self._optimizer, parameter, place)
        return tuple(parameter.shape), parameter.dtype, place[0], repr(sorted(alone.items()))

    def _sample(self, parameter: nn.Parameter) -> _Sample:
        place, shape = self._places[parameter], tuple(parameter.shape)
        return _Sample(self._optimizer, place, shape, parameter.dtype, parameter)


def _state_bytes(state: Mapping[str, Any]) -> int:
    tensors = {id(value): value for value in tensors_of(state).values() if value.numel() > 1}
    return sum(round_up(t.nbytes, STATE_ALIGNMENT) for t in tensors.values())


def _tried(sample: _Sample, device: torch.device, trial: Callable[[_Sample, torch.device], int]) -> int:
    """Return the bytes that ``trial`` counts in the first steps of a tensor like ``sample``.

    Fake tensors are tried first, which take no memory. Real ones follow, with fewer rows if there are very many, where
    fake ones do not work, or where a foreign step goes on by numbers, which fake tensors do not have.
    """
    try:
        # A fallback would compute on real tensors; states that were made with the optimizer are real.
        with FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True), _Answers() as answers:
            fake = trial(sample, device)
        if is_known(sample.optimizer) or not answers.used:
            return fake
    except Exception:  # whatever a foreign optimizer meets on fake tensors
        fake = 0
    part = replace(sample, shape=_cut(sample.shape, _SAMPLE_ELEMENTS))
    share = math.prod(part.shape) / max(1, math.prod(sample.shape))
    real = trial(part, torch.device("cpu"))
    return real if share == 1 else max(fake, round_up(math.ceil(real / share), STATE_ALIGNMENT))


def _state_after_steps(sample: _Sample, device: torch.device) -> int:
    """Return the most bytes of the state after one of the first steps; three that leave it alone are enough."""
    most, sizes = 1 if is_known(sample.optimizer) else _STEPS, list[int]()
    stand_in = _ParameterStandIn(sample, device)
    # Not all fused kernels run on fake tensors; the state is the same.
    group = stand_in.optimizer.param_groups[0]
    group.update({name: False for name in ("fused", "foreach") if name in group})
    stand_in.copy_state()
    if type(stand_in.optimizer) is AdamW:  # it knows: steps of large tensors in pieces take seconds, even of fake ones
        return _state_bytes(AdamW.new_state(stand_in.parameters[0], group))
    while len(sizes) < most and (len(sizes) < _UNCHANGED or len(set(sizes[-_UNCHANGED:])) > 1):
        stand_in.step()
        sizes.append(_state_bytes(stand_in.state))
    return max(sizes)


def _scratch_of_steps(room: float, sample: _Sample, device: torch.device) -> int:
    """Return the most bytes that one of the first steps takes for a moment, with ``room`` for states, per element.

    It is that of one tensor, or half that of two: some optimizers (Muon's kin) stack matrices of one shape.
    """
    most, nbytes = 0, int(room * math.prod(sample.shape)) + STATE_ALIGNMENT
    for copies in (1, 2):
        stand_in = _ParameterStandIn(sample, device, copies=copies)
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(copies)]
        stand_in.copy_state()
        for _ in range(_STEPS):
            stand_in.fill_gradients()
            newborn = not _state_bytes(stand_in.state)
            # States that this step makes are no scratch: they get memory that is there already.
            places = zip(stand_in.parameters, memory, strict=True) if newborn else ()
            with Account() as account, StateAllocator(places):
                stand_in.step()
            most = max(most, math.ceil(account.peak / copies))
    return most


class _Answers(OperationMode):
    """Within the context, fake tensors that are asked for a number say 1."""

    beside_compiled = False

    def __init__(self) -> None:
        super().__init__()
        self.used = False
        """True once a number was asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            self.used = True
            return 1.0 if args[0].dtype.is_floating_point else 1


@dataclass(frozen=True, slots=True)
class _Sample:
    optimizer: Optimizer
    place: tuple[int, int]
    """The group of the parameter that it stands for, and its position in that group."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    like: nn.Parameter
    """The parameter that it stands for, which may be larger."""


class _ParameterStandIn:
    """Tensors of its own with a copy of the optimizer that updates them: same class and options, no state, no hooks."""

    def __init__(self, sample: _Sample, device: torch.device, *, copies: int = 1) -> None:
        self._sample = sample
        made = [torch.zeros(sample.shape, dtype=sample.dtype, device=device) for _ in range(copies)]
        self.parameters = [nn.Parameter(tensor) for tensor in made]
        optimizer, stands = sample.optimizer, [(sample.place[0], parameter) for parameter in self.parameters]
        alone = own_options(optimizer, sample.like, sample.place)
        own: dict[Tensor, Any] = dict.fromkeys(self.parameters, alone)
        self.optimizer = twin_of(optimizer, stands, defaultdict(dict, of_none(optimizer)), own)

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.optimizer.state[self.parameters[0]])

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    def map(self) -> None:
        """Move everything to memory like that of the engine for a GPU."""
        states = [value for state in of_parameters(self.optimizer) for value in tensors_of(state).values()]
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for tensor in (*self.parameters, *grads, *states):
            if tensor.numel() > 1:
                mapped = map_pages(tensor.nbytes).view(tensor.dtype, tensor.numel(), 0)
                tensor.data = mapped.view(tensor.shape).copy_(tensor.data)

    def fill_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, 1e-3)

    def update(self) -> None:
        """Update as the engine does, where there is a state: on the host by the compiled kernel, if that is for it."""
        self.fill_gradients()
        torch_adam.update(self.optimizer)

    def step(self) -> None:
        self.fill_gradients()
        try:
            try:
                type(self.optimizer).step(self.optimizer)
            except KeyError:
                if self.state or not self._sample.optimizer.state.get(self._sample.like):
                    raise
                self.copy_state()  # it was made with the optimizer, not by its first step (Adagrad)
                type(self.optimizer).step(self.optimizer)
        except (DataDependentOutputException, OffloadError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            use = f"optimizer {type(self.optimizer).__name__}, whose step() ends in {named(error)}"
            raise limits.UNTRIED.error(use) from error

    def copy_state(self) -> None:
        like = self._sample.like
        for mine in self.parameters if self._sample.optimizer.state.get(like) else ():
            state = self.optimizer.state[mine]
            # Makes new lists and dictionaries all the way down, so that nothing is put into those of the real
            # optimizer.
            state.update(tree_map(lambda value: value, dict(self._sample.optimizer.state[like])))
            for place, value in tensors_of(state).items():
                same = value.shape == like.shape
                put(state, place, torch.ones_like(mine, dtype=value.dtype) if same else value.clone())


def measure_optimizer(optimizer: Optimizer, device: torch.device) -> OptimizerProfile:
    """Time updates of large tensors on the host and on ``device``, with the flags and the dtype that will be used.

    Beside a GPU, the host is tried with several numbers of threads; on the emulated device, which computes with the
    same cores, it keeps those that torch uses.
    """
    name, sample = type(optimizer).__name__, _largest(optimizer)

    def scratch(most: int) -> float:
        return _scratch(_ParameterStandIn(replace(sample, shape=_cut(sample.shape, most)), device), device)

    if device.type != "cuda":
        stand_in = _host_stand_in(optimizer, sample, _ELEMENTS["cpu"])
        speed = _speed(stand_in, device)
        return OptimizerProfile(
            name=name,
            host_bytes_per_s=speed,
            device_bytes_per_s=speed,
            scratch_ratio=scratch(_LEAST_ELEMENTS),  # per byte, which a few rows show
            host_kernel=torch_adam.by_kernel(stand_in.optimizer),
        )
    speeds, by_kernel = _host_speeds(optimizer, sample, memory_node_of(device))
    # The fewest that are about as fast as any.
    threads = next(n for n, speed in speeds.items() if speed >= (1 - _TOLERANCE) * max(speeds.values()))

    def device_speed(most: int) -> float:
        return _speed(_as_large(optimizer, sample, device, most), device)

    return OptimizerProfile(
        name=name,
        host_bytes_per_s=speeds[threads],
        # Of as many elements as there are or as find room: more than caches hold.
        device_bytes_per_s=in_what_room(device_speed, _ELEMENTS["cuda"], least=_LEAST_ELEMENTS),
        scratch_ratio=in_what_room(scratch, _SAMPLE_ELEMENTS, least=_LEAST_ELEMENTS),
        host_threads=threads,
        host_speeds={n: speed for n, speed in speeds.items() if n <= threads},
        host_kernel=by_kernel,
    )


def _host_speeds(optimizer: Optimizer, sample: _Sample, node: MemoryNode) -> tuple[dict[int, float], bool]:
    """Return the speed of updates on the host by number of threads, and whether the compiled kernel does them."""
    cores = len(node.cores) or len(os.sched_getaffinity(0))
    before = torch.get_num_threads()

    def measure() -> tuple[dict[int, float], bool]:
        stand_in = _host_stand_in(optimizer, sample, _ELEMENTS["cuda"])
        stand_in.step()  # makes the state
        stand_in.map()
        speeds = {}
        for threads in thread_counts(cores - 1):
            torch.set_num_threads(threads)
            speeds[threads] = _speed(stand_in, torch.device("cpu"))
        return speeds, torch_adam.by_kernel(stand_in.optimizer)

    try:
        return node.run(measure)
    finally:
        torch.set_num_threads(before)  # torch gives the worker's choice to threads that are yet to come


def thread_counts(most: int) -> list[int]:
    """Return the numbers of threads to try: powers of two, and ``most`` (at least one)."""
    counts = [1 << k for k in range(max(1, most).bit_length())]
    return counts if counts[-1] >= most else [*counts, most]


def _host_stand_in(optimizer: Optimizer, sample: _Sample, most: int) -> _ParameterStandIn:
    room = _RAM_SHARE * available_host_bytes() / 16  # bytes per element of fp32 AdamW, or of bfloat16 with masters
    return _as_large(optimizer, sample, torch.device("cpu"), min(most, int(room)))


def _as_large(optimizer: Optimizer, sample: _Sample, device: torch.device, most: int) -> _ParameterStandIn:
    """Return copies of ``sample``, in total as large as the parameters, but of ``most`` elements at most."""
    elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    part = replace(sample, shape=_cut(sample.shape, most))
    copies = min(elements, most) // max(1, math.prod(part.shape))
    return _ParameterStandIn(part, device, copies=max(1, copies))


def trial_updates(optimizer: Optimizer, *, mapped: bool) -> list[Callable[[], None]]:
    """Return updates on the host as ``optimizer`` does them, each of other tensors, together more than caches hold.

    ``mapped``: they are in memory like that of the engine for a GPU.
    """
    sample = replace(_largest(optimizer), shape=_TRIAL_SHAPE)
    trials = _ELEMENTS["cuda" if mapped else "cpu"] // 2 // math.prod(_TRIAL_SHAPE)
    stand_ins = [_ParameterStandIn(sample, torch.device("cpu")) for _ in range(trials)]
    for stand_in in stand_ins:
        stand_in.step()  # makes the state
        if mapped:
            stand_in.map()
    return [stand_in.update for stand_in in stand_ins]


def estimate_optimizer(optimizer: Optimizer, hardware: HardwareProfile) -> OptimizerProfile:
    """Estimate the speed of updates from the bytes that an update moves."""
    stand_in = _ParameterStandIn(replace(_largest(optimizer), shape=_ESTIMATE_SHAPE), torch.device("cpu"))
    stand_in.step()  # makes the state
    stand_in.update()  # loads the kernel and tries it, which would be counted below
    with Roofline(hardware) as meter:
        stand_in.update()
    ratio = device_ratio = meter.traffic / stand_in.nbytes
    bandwidth, core = hardware.host_memory_bytes_per_s, _CORE_BYTES_PER_S
    dtypes = {value.dtype for value in tensors_of(stand_in.state).values() if value.numel() > 1}
    ours = isinstance(optimizer, AdamW)
    if not ours or dtypes & {torch.uint8, torch.bfloat16}:
        # On a device by operations of torch's. Of ours, states of fewer bits are decoded and coded anew by them.
        with native.left_out(), Roofline(hardware) as meter:
            stand_in.update()
        device_ratio = meter.traffic / stand_in.nbytes
    if torch.uint8 in dtypes:
        core *= _CODING_SHARE
    threads = max(1, math.ceil(bandwidth / core))
    return OptimizerProfile(
        name=type(optimizer).__name__,
        host_bytes_per_s=bandwidth / ratio,
        device_bytes_per_s=hardware.device_memory_bytes_per_s / device_ratio,
        fused_bytes_per_s=hardware.device_memory_bytes_per_s / ratio if ours and ratio < device_ratio else 0.0,
        scratch_ratio=_scratch(stand_in, torch.device("cpu")),
        host_threads=threads,
        host_speeds={n: min(bandwidth, n * core) / ratio for n in thread_counts(threads)},
        host_kernel=torch_adam.by_kernel(stand_in.optimizer),
    )


def _largest(optimizer: Optimizer) -> _Sample:
    parameter, place = max(places_of(optimizer).items(), key=lambda pair: pair[0].numel())
    return _Sample(optimizer, place, _cut(tuple(parameter.shape), _SAMPLE_ELEMENTS), parameter.dtype, parameter)


def _cut(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return ``shape`` with fewer rows, if it has too many elements for a trial, of at least one row."""
    row = max(1, math.prod(shape[1:]))
    return (max(1, min(shape[0], most // row)), *shape[1:]) if shape else shape


def _speed(stand_in: _ParameterStandIn, device: torch.device) -> float:
    watch = Stopwatch(device)
    stand_in.step()  # makes the state
    stand_in.update()  # loads the kernel
    launch_s, times = 0.0, list[float]()
    if watch.lags:
        watch.lap()
        stand_in.update()
        launch_s = watch.lap().launch_s
    while not watch.enough(times):
        watch.lap(AHEAD * launch_s)
        stand_in.update()
        times.append(watch.lap().seconds)
    return stand_in.nbytes / statistics.mean(fastest(times))


def _scratch(stand_in: _ParameterStandIn, device: torch.device) -> float:
    """Return the bytes that an update takes for a moment, per parameter byte: RAdam's begin with the sixth step."""
    stand_in.step()  # makes the state
    watch = Watch(device)
    with watch:
        for _ in range(_STEPS):
            stand_in.step()
    return watch.whole_peak() / stand_in.nbytes
