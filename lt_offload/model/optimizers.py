"""Updates of weights one by one: the optimizer is tried on a few small tensors, and no two may overlap.

And what its states are: tensors of each parameter's, wherever they are in it, and entries of no parameter.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.compat.torch import FakeTensorMode, address_of, forget_step_hooks, tree_leaves
from lt_offload.machine.accounting import tensors_in
from lt_offload.machine.dispatch import OperationMode
from lt_offload.model.snapshot import untouched
from lt_offload.model.state.generators import GLOBAL, is_generator, same_state, state_of
from lt_offload.units import round_up

_KNOWN = ("torch.optim.", "transformers.optimization.", "lt_offload.optim.")
_SIDE = 8
"""Elements of a stand-in along each dimension, at most."""
_FEWEST = 3
_GROUPS = 4
_STEPS = 2
_SCALES = (1e-3, 1.0, 1e3)
"""Sizes of the gradients: a step that depends on all of them then depends on the largest."""
_PLAIN = (int, float, str, type(None))
_OWN = ("params", "param_groups", "state", "step", "defaults")
STATE_ALIGNMENT = 8
"""State tensors of one weight stand side by side, each at a multiple of this many bytes: the largest element size."""

Stand = tuple[int, nn.Parameter]
"""A parameter group, and a small tensor like one of its parameters."""
Verdict = Literal["alone", "joint", "idle", "random", "shared", "unknown"]


@dataclass(frozen=True, slots=True)
class OptimizerTrial:
    """Effects of an optimizer on a few small tensors."""

    verdict: Verdict
    """``alone``: one tensor at a time, in another order, gives the same numbers, bit for bit; ``joint``: it does not;
    ``idle``: nothing changes, the optimizer hands the work to others; ``random``: it draws from a generator that all
    tensors share; ``shared``: its state has entries of no parameter that are no plain numbers; ``unknown``: it could
    not be tried, e.g. because it needs a GPU or a closure."""
    without_gradients: bool = False
    """Tensors without a gradient change, too."""


def tried(optimizer: Optimizer) -> OptimizerTrial:
    """Try ``optimizer``, which is not changed; those of torch, transformers and this package are known to work."""
    if is_known(optimizer):
        return OptimizerTrial("alone")
    # Such a class wraps another optimizer, whose groups it shows and which does its work.
    if isinstance(getattr(type(optimizer), "param_groups", None), property):
        return OptimizerTrial("idle")
    try:
        together, counted = _stepped(optimizer, one_by_one=False)
        alone, _ = _stepped(optimizer, one_by_one=True)
    except _Refused as refused:
        return OptimizerTrial(refused.args[0])
    except Exception:  # whatever a foreign optimizer raises on tensors that it was not made for
        return OptimizerTrial("unknown")
    if not _moved(optimizer, together):
        return OptimizerTrial("idle")
    if not all(map(_equal, together, alone)):
        return OptimizerTrial("joint")
    try:
        acts, idle = _stepped_idly(optimizer)
    except Exception:  # it does not ask whether there is a gradient
        acts, idle = True, []
    try:  # the loop's own step(), which finds no gradients, counts for the updates
        counts = _equal(counted, _stepped_idly(optimizer, empty=True)[1] if acts else idle)
    except Exception:  # whatever a foreign optimizer raises where it has nothing to update: the loop's step would, too
        counts = False
    return OptimizerTrial("alone" if counts else "joint", without_gradients=acts)


def is_known(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` is of a package that needs no trial."""
    return f"{type(optimizer).__module__}.".startswith(_KNOWN)


def draws_for_large(optimizer: Optimizer) -> bool:
    """Return whether the first step of a tensor of ``optimizer`` draws random numbers, tried in full size, as fakes.

    The stand-ins of :func:`tried` are small, and some draw for large tensors only. Draws of later steps, and
    of steps that do not run on fakes, are seen by :class:`DrawWatch` when they happen.
    """
    kinds = {
        (index, tuple(parameter.shape), parameter.dtype): None
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return not is_known(optimizer) and any(_draws(optimizer, *kind) for kind in kinds)


def _draws(optimizer: Optimizer, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    with untouched(optimizer=optimizer):
        before = _generators(optimizer)
        fakes = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        try:
            with fakes, DrawWatch(optimizer, partial(_Refused, "random")):
                stand = nn.Parameter(torch.zeros(shape, dtype=dtype))
                stand.grad = torch.zeros_like(stand)
                twin = twin_of(optimizer, [(index, stand)], defaultdict(dict, of_none(optimizer)))
                type(twin).step(twin)
        except _Refused:
            return True
        except Exception:  # whatever a foreign optimizer meets on fake tensors
            pass
        return not all(map(same_state, _generators(optimizer), before))


def _held(optimizer: Optimizer) -> Iterator[Any]:
    for place in (vars(optimizer), *optimizer.param_groups):
        for value in place.values():
            if is_generator(value):
                yield value


def _defaults() -> list[torch.Generator]:
    gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *(torch.cuda.default_generators if gpu else ())]


def _generators(optimizer: Optimizer) -> list[Any]:
    """Return where the generators are that a step may draw from: those of torch, Python, NumPy, and its own."""
    return [*(one.get_state() for one in _defaults()), *map(state_of, (*GLOBAL, *_held(optimizer)))]


class _Refused(Exception):
    """A step has drawn random numbers, or put something into its state that all tensors share: the verdict."""


class DrawWatch(OperationMode):
    """Within the context, an operation that draws from a generator shared by the tensors of ``optimizer`` is an error.

    It sees the operations of its own thread, so that the rest of a program may draw meanwhile. One that a step makes
    for a tensor, and seeds, is not shared.
    """

    def __init__(self, optimizer: Optimizer, error: Callable[[], Exception]) -> None:
        super().__init__()
        self._error = error
        shared: list[Any] = [*_defaults(), *(one for one in _held(optimizer) if isinstance(one, torch.Generator))]
        self._shared = {address_of(one) for one in shared}  # operations get other objects for the same generators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            rngs: list[Any] = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, torch.Generator)]
            if not rngs or address_of(rngs[0]) in self._shared:
                raise self._error()
        return func(*args, **(kwargs or {}))


def _stepped(optimizer: Optimizer, *, one_by_one: bool) -> tuple[list[list[Any]], list[Any]]:
    """Step stand-ins; return, for each, itself and its state; and what an optimizer of all of them has counted."""
    stands = _stands(optimizer)
    entries = of_none(optimizer)
    # In reverse, so that an update which depends on those before it gives other numbers.
    parts = [[stand] for stand in reversed(stands)] if one_by_one else [stands]
    with untouched(optimizer=optimizer):
        twins = [twin_of(optimizer, part, defaultdict(dict, entries)) for part in parts]
        for step in range(_STEPS):
            torch.manual_seed(step)
            for number, (_, stand) in enumerate(stands):
                generator = torch.Generator().manual_seed(7 * number + step)
                scale = _SCALES[number % len(_SCALES)]
                grad = torch.randn(stand.shape, generator=generator, dtype=torch.float32) * scale
                stand.grad = grad.to(stand.dtype)
            before = _generators(optimizer)
            for twin in twins:
                type(twin).step(twin)
            if not all(map(same_state, _generators(optimizer), before)):
                raise _Refused("random")
            for of_twin in map(of_none, twins):
                if of_twin.keys() != entries.keys() or not all(isinstance(value, _PLAIN) for value in of_twin.values()):
                    raise _Refused("shared")
        counted = _counted(twins[0])
    states = {stand: twin.state[stand] for twin in twins for group in twin.param_groups for stand in group["params"]}
    ordered = {stand: sorted(state.items(), key=lambda item: str(item[0])) for stand, state in states.items()}
    return [[stand.detach(), *tree_leaves([value for _, value in ordered[stand]])] for _, stand in stands], counted


def _stepped_idly(optimizer: Optimizer, *, empty: bool = False) -> tuple[bool, list[Any]]:
    """Return whether steps without gradients change anything, and what they count; ``empty``: without tensors."""
    stands = _stands(optimizer)
    before = [stand.detach().clone() for _, stand in stands]
    state: defaultdict[Any, Any] = defaultdict(dict, of_none(optimizer))
    with untouched(optimizer=optimizer):
        twin = twin_of(optimizer, stands, state)
        for group in twin.param_groups if empty else ():
            group["params"] = []
        for _ in range(_STEPS):
            type(twin).step(twin)
        counted = _counted(twin)
    same = (torch.equal(old, stand.detach()) for old, (_, stand) in zip(before, stands, strict=True))
    made = any(value for key, value in state.items() if isinstance(key, Tensor))
    return made or any(stand.grad is not None for _, stand in stands) or not all(same), counted


def _counted(twin: Optimizer) -> list[Any]:
    places = [*twin.param_groups, vars(twin), of_none(twin)]
    values = [value for place in places for key, value in place.items() if key not in _OWN]
    numbers = [value for value in values if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)]
    return [value.clone() if isinstance(value, Tensor) else value for value in numbers]


def _moved(optimizer: Optimizer, stepped: Sequence[Sequence[Any]]) -> bool:
    """Return whether steps have changed something, or might not have because the learning rate is 0."""
    before = [stand for _, stand in _stands(optimizer)]
    changed = (len(row) > 1 or not torch.equal(old, row[0]) for old, row in zip(before, stepped, strict=True))
    holds = any(isinstance(value, Optimizer) for value in vars(optimizer).values())
    return any(changed) or not (holds or all(group.get("lr", 1.0) for group in optimizer.param_groups))


def _stands(optimizer: Optimizer) -> list[Stand]:
    stands: list[Stand] = []
    groups = [(index, group["params"]) for index, group in enumerate(optimizer.param_groups) if group["params"]]
    for index, parameters in groups[:_GROUPS]:
        each = max(2, -(-_FEWEST // len(groups)))
        for number in range(each):
            like = parameters[number * (len(parameters) - 1) // (each - 1)]
            generator = torch.Generator().manual_seed(len(stands))
            shape = [max(1, min(_SIDE, size)) for size in like.shape]
            stands.append((index, nn.Parameter(torch.randn(shape, generator=generator).to(like.dtype))))
    return stands


def twin_of(
    optimizer: Optimizer,
    stands: Sequence[Stand],
    state: defaultdict[Any, Any],
    alone: Mapping[Tensor, Mapping[str, Any]] | None = None,
) -> Optimizer:
    """Return an optimizer of the same class and options over ``stands``, without hooks; some have own options."""
    # Not by its constructor, whose arguments nobody has kept.
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    # A scheduler puts its own ``step`` on the object, and that one steps the real optimizer.
    vars(made).pop("step", None)
    vars(made).update(managed(optimizer, alone or {}))
    forget_step_hooks(made)
    groups: dict[int, dict[str, Any]] = {}
    for index, stand in stands:
        groups.setdefault(index, copied(optimizer.param_groups[index]) | {"params": []})["params"].append(stand)
    made.param_groups, made.state = list(groups.values()), state
    return made


def copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter ``group``; of those that are tensors, copies."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


def with_more(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer like this one, with its states, that has ``parameters`` in its first group as well."""
    present = [(index, p) for index, group in enumerate(optimizer.param_groups) for p in group["params"]]
    held = {parameter for _, parameter in present}
    return twin_of(optimizer, [*present, *((0, p) for p in parameters if p not in held)], optimizer.state)


def _equal(left: Sequence[Any], right: Sequence[Any]) -> bool:
    pairs = zip(left, right, strict=False)
    return len(left) == len(right) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs
    )


def overlap(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Return the names of two of ``tensors`` in the same memory, at least one of which is trained; None if none are."""
    spans = []
    parts = [(name, part) for name, tensor in tensors for part in tensors_in(tensor)]
    # By identity: a tied tensor has two names and shares nothing with another.
    for name, tensor in {id(t): (name, t) for name, t in parts}.values():
        if not tensor.is_meta and tensor.numel() and tensor.data_ptr():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), name, tensor.requires_grad))
    furthest: dict[bool, tuple[int, str]] = {}
    """For trained tensors and for others: the furthest end of one so far, and its name."""
    for start, end, name, trained in sorted(spans):
        for other in (True, False):
            if (trained or other) and other in furthest and furthest[other][0] > start:
                return furthest[other][1], name
        if trained not in furthest or end > furthest[trained][0]:
            furthest[trained] = end, name
    return None


# -- states --------------------------------------------------------------------------------------------------------

Place = Any
"""Place of a tensor in a state: a key, or for what is further down, in lists or dictionaries, a tuple of keys and
indices, the first of which is a key of the state."""
_SEQUENCES = (list, tuple, deque)


def tensors_of(state: Mapping[Any, Any]) -> dict[Place, Tensor]:
    """Return the tensors of ``state`` by their places; sparse ones are not among them, and stay where they are."""
    tensors: dict[Place, Tensor] = {}
    for key, value in list(state.items()):  # listed: another thread may be adding those that it has made
        if isinstance(value, Tensor) and value.layout is torch.strided:
            tensors[key] = value
        elif isinstance(value, (dict, *_SEQUENCES)):
            tensors.update(_below(value, (key,)))
    return tensors


def _below(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _below(inner, (*path, key))
    elif isinstance(value, _SEQUENCES):
        for index, inner in enumerate(value):
            yield from _below(inner, (*path, index))


def tensor_at(state: Mapping[Any, Any], place: Place) -> Tensor | None:
    """Return the tensor at ``place``; None if there is none."""
    # A key of a state may be a tuple itself.
    value = state.get(place)
    if value is None and isinstance(place, tuple):
        value = state
        try:
            for key in place:
                value = value[key]
        except (LookupError, TypeError):
            return None
    return value if isinstance(value, Tensor) else None


def put(state: dict[Any, Any], place: Place, tensor: Tensor) -> None:
    """Let ``tensor`` be what is at ``place``, where there is a tensor already."""
    if not isinstance(place, tuple) or place in state:
        state[place] = tensor
        return
    value: Any = tensor
    for depth in reversed(range(len(place))):
        holder: Any = state
        for key in place[:depth]:
            holder = holder[key]
        if not isinstance(holder, tuple):
            holder[place[depth]] = value
            return
        # A tuple cannot be written to: it is made again, and then put into what holds it, from the inside out.
        items = [value if index == place[depth] else item for index, item in enumerate(holder)]
        value = type(holder)(*items) if hasattr(holder, "_fields") else type(holder)(items)


def of_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the states of the parameters, as far as there are any."""
    return [state for key, state in list(optimizer.state.items()) if isinstance(key, Tensor)]


def of_none(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the entries that belong to no parameter: counters, as a rule."""
    return {key: value for key, value in list(optimizer.state.items()) if not isinstance(key, Tensor)}


# -- options of single tensors ---------------------------------------------------------------------------------------


class _Manager:
    """Stands for bitsandbytes' ``GlobalOptimManager`` in an optimizer of some tensors, which have no other place."""

    def __init__(self, options: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self.pid2config = {id(tensor): dict(own) for tensor, own in options.items() if own}
        self.index2config: dict[tuple[int, int], Any] = {}
        self.module_weight_config_triple: list[Any] = []
        self.uses_config_override = bool(self.pid2config)


def places_of(optimizer: Optimizer) -> dict[nn.Parameter, tuple[int, int]]:
    """Return the group of each parameter, and where it is in that."""
    return {p: (g, i) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])}


def own_options(optimizer: Optimizer, parameter: nn.Parameter, place: tuple[int, int]) -> dict[str, Any]:
    """Return the options of ``parameter`` alone: those that bitsandbytes' ``GlobalOptimManager`` has for it.

    As a step of ``optimizer`` would find them, whose first one takes those over that were registered with modules.
    """
    manager = _manager(optimizer)
    if manager is None:
        return {}
    by_place, by_identity = manager.index2config.get(place, {}), manager.pid2config.get(id(parameter), {})
    if not getattr(optimizer, "initialized", True):
        for module, name, options in manager.module_weight_config_triple:
            if getattr(module, name, None) is parameter:
                by_place = by_identity = options
    return {**by_place, **by_identity}


def managed(optimizer: Optimizer, options: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the attributes of an optimizer that stands for ``optimizer``, whose tensors have ``options`` alone."""
    return {} if _manager(optimizer) is None else {"mng": _Manager(options)}


def _manager(optimizer: Optimizer) -> Any:
    manager = vars(optimizer).get("mng")
    return manager if hasattr(manager, "pid2config") else None


_FACTORIES = {
    torch.ops.aten.zeros_like.default: 0.0,
    torch.ops.aten.ones_like.default: 1.0,
    torch.ops.aten.empty_like.default: None,
}


class StateAllocator(OperationMode):
    """Lets the first update of ``places`` (weights, memory) make its states there, as far as that memory goes."""

    def __init__(self, places: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._free = {_address(weight): (memory, 0) for weight, memory in places}
        """By where a weight is: the memory for its states, and how much of it is taken."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        free = self._free.get(_address(args[0])) if func in _FACTORIES and args[0].is_contiguous() else None
        if free:
            like, (memory, offset) = args[0], free
            dtype = (kwargs or {}).get("dtype") or like.dtype
            end = offset + like.numel() * dtype.itemsize
            # A counter of one element does not travel, and has no place in the plan.
            if like.numel() > 1 and end <= memory.numel():
                self._free[_address(like)] = (memory, round_up(end, STATE_ALIGNMENT))
                # Through ``data``, so that the optimizer holds a tensor whose memory can be exchanged: states are on
                # the device for the update only, and the same tensor objects are on the host afterwards.
                born = torch.empty(0, dtype=dtype, device=like.device)
                born.data = memory[offset:end].view(dtype).view(like.shape)
                value = _FACTORIES[func]
                return born if value is None else born.fill_(value)
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> tuple[int, int]:
    """Return where ``tensor`` begins, also of one that has no memory."""
    return address_of(tensor.untyped_storage()), int(tensor.storage_offset()) * tensor.element_size()
