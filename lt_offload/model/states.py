"""An optimizer's states: the tensors of each parameter's, wherever they are in it, and entries of no parameter.

Most states are dictionaries of tensors; some hold lists or dictionaries of tensors. A *place* says where one is: a key
of the state, or for what is further down a tuple of keys and indices, the first of which is a key of the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Place = Any
State = Mapping[Any, Any]

_SEQUENCES = (list, tuple, deque)


def tensors_of(state: State) -> dict[Place, Tensor]:
    """Return the tensors of ``state`` by their places; sparse ones are not among them, and stay where they are."""
    found: dict[Place, Tensor] = {}
    for key, value in list(state.items()):  # listed: another thread may be adding those that it has made
        if isinstance(value, Tensor) and value.layout is torch.strided:
            found[key] = value
        elif isinstance(value, (dict, *_SEQUENCES)):
            found.update(_below(value, (key,)))
    return found


def _below(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _below(inner, (*path, key))
    elif isinstance(value, _SEQUENCES):
        for index, inner in enumerate(value):
            yield from _below(inner, (*path, index))


def tensor_at(state: State, place: Place) -> Tensor | None:
    """Return the tensor at ``place``; None if there is none."""
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
        items = [value if index == place[depth] else item for index, item in enumerate(holder)]
        value = type(holder)(*items) if hasattr(holder, "_fields") else type(holder)(items)


def of_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the states of the parameters, as far as there are any."""
    return [state for key, state in list(optimizer.state.items()) if isinstance(key, Tensor)]


def of_none(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the entries that belong to no parameter: counters, as a rule."""
    return {key: value for key, value in list(optimizer.state.items()) if not isinstance(key, Tensor)}
