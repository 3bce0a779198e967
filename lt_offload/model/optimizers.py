"""Whether weights can be updated one by one: the optimizer is tried on a few small tensors, and no two may overlap."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.model.snapshot import untouched

_KNOWN = ("torch.optim.", "transformers.optimization.", "lt_offload.optim.")
_SIDE = 8
"""Elements of a stand-in along each dimension, at most."""
_FEWEST = 3
_GROUPS = 4
_STEPS = 2
_SCALES = (1e-3, 1.0, 1e3)
"""Of the gradients: what depends on all of them depends on the largest."""
_OWN = ("params", "param_groups", "state", "step", "defaults")

Stand = tuple[int, nn.Parameter]
"""A parameter group, and a small tensor like one of its parameters."""
Verdict = Literal["alone", "joint", "idle", "unknown"]


@dataclass(frozen=True, slots=True)
class OptimizerTrial:
    """What an optimizer does to a few small tensors."""

    verdict: Verdict
    """``alone``: one tensor at a time, in another order, gives the same numbers, bit for bit; ``joint``: it does not;
    ``idle``: nothing changes, the optimizer hands the work to others; ``unknown``: it could not be tried, e.g. because
    it needs a GPU or a closure."""
    without_gradients: bool = False
    """Tensors without a gradient change, too."""


def tried(optimizer: Optimizer) -> OptimizerTrial:
    """Try ``optimizer``, which is not changed; those of torch, transformers and this package are known to work."""
    if f"{type(optimizer).__module__}.".startswith(_KNOWN):
        return OptimizerTrial("alone")
    try:
        together, counted = _stepped(optimizer, one_by_one=False)
        alone, _ = _stepped(optimizer, one_by_one=True)
    except Exception:  # whatever a foreign optimizer raises on tensors that it was not made for
        return OptimizerTrial("unknown")
    if not _moved(optimizer, together):
        return OptimizerTrial("idle")
    if not all(map(_equal, together, alone)):
        return OptimizerTrial("joint")
    acts = _acts_without_gradients(optimizer)
    try:  # the loop's own step(), which finds no gradients, counts for the updates
        counts = _equal(counted, _stepped_idly(optimizer, empty=acts))
    except Exception:
        counts = False
    return OptimizerTrial("alone" if counts else "joint", without_gradients=acts)


def _stepped(optimizer: Optimizer, *, one_by_one: bool) -> tuple[list[list[Any]], list[Any]]:
    """Step stand-ins; return, for each, itself and its state; and what an optimizer of all of them has counted."""
    stands = _stands(optimizer)
    states: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    parts = [[stand] for stand in reversed(stands)] if one_by_one else [stands]
    with untouched(optimizer=optimizer):
        twins = [_twin(optimizer, part, states) for part in parts]
        for step in range(_STEPS):
            torch.manual_seed(step)
            for number, (_, stand) in enumerate(stands):
                generator = torch.Generator().manual_seed(7 * number + step)
                scale = _SCALES[number % len(_SCALES)]
                grad = torch.randn(stand.shape, generator=generator, dtype=torch.float32) * scale
                stand.grad = grad.to(stand.dtype)
            for twin in twins:
                type(twin).step(twin)
        counted = _counted(twins[0])
    return [[stand.detach(), *(value for _, value in sorted(states[stand].items()))] for _, stand in stands], counted


def _stepped_idly(optimizer: Optimizer, *, empty: bool) -> list[Any]:
    """Return what an optimizer counts in steps without gradients; ``empty``: without tensors."""
    with untouched(optimizer=optimizer):
        twin = _twin(optimizer, _stands(optimizer), defaultdict(dict))
        for group in twin.param_groups if empty else ():
            group["params"] = []
        for _ in range(_STEPS):
            type(twin).step(twin)
        return _counted(twin)


def _counted(twin: Optimizer) -> list[Any]:
    """Return the numbers in options and attributes."""
    places = [*twin.param_groups, vars(twin)]
    found = [value for place in places for key, value in place.items() if key not in _OWN]
    numbers = [value for value in found if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)]
    return [value.clone() if isinstance(value, Tensor) else value for value in numbers]


def _acts_without_gradients(optimizer: Optimizer) -> bool:
    stands = _stands(optimizer)
    before = [stand.detach().clone() for _, stand in stands]
    state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    try:
        with untouched(optimizer=optimizer):
            twin = _twin(optimizer, stands, state)
            type(twin).step(twin)
    except Exception:  # it does not ask whether there is a gradient
        return True
    same = (torch.equal(old, stand.detach()) for old, (_, stand) in zip(before, stands, strict=True))
    return any(state.values()) or any(stand.grad is not None for _, stand in stands) or not all(same)


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


def _twin(optimizer: Optimizer, stands: Sequence[Stand], state: defaultdict[Any, dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class and options over ``stands``, without hooks."""
    twin: Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    groups: dict[int, dict[str, Any]] = {}
    for index, stand in stands:
        live = optimizer.param_groups[index]
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in live.items()}
        groups.setdefault(index, copied | {"params": []})["params"].append(stand)
    twin.param_groups, twin.state = list(groups.values()), state
    return twin


def _equal(left: Sequence[Any], right: Sequence[Any]) -> bool:
    pairs = zip(left, right, strict=False)
    return len(left) == len(right) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs
    )


def overlap(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Return the names of two of ``tensors`` in the same memory, at least one of which is trained; None if none are."""
    spans = []
    for name, tensor in {id(t): (name, t) for name, t in tensors}.values():
        if not tensor.is_meta and tensor.numel() and tensor.data_ptr():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), name, tensor.requires_grad))
    furthest: dict[bool, tuple[int, str]] = {}
    """How far those that are trained, and the others, reach so far, and whose end that is."""
    for start, end, name, trained in sorted(spans):
        for other in (True, False):
            if (trained or other) and other in furthest and furthest[other][0] > start:
                return furthest[other][1], name
        if trained not in furthest or end > furthest[trained][0]:
            furthest[trained] = end, name
    return None
