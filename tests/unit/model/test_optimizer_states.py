"""Tensors of optimizer states by their places, in whatever holds them."""

from __future__ import annotations

from collections import deque, namedtuple
from typing import Any

import torch
from torch import nn

from lt_offload.model.optimizers import of_none, of_parameters, put, tensor_at, tensors_of

Pair = namedtuple("Pair", ("left", "right"))  # noqa: PYI024


def test_each_tensor_has_a_place_where_it_can_be_replaced() -> None:
    tensors = [torch.full((2,), float(number)) for number in range(6)]
    state: dict[Any, Any] = {
        "mean": tensors[0],
        "sides": [tensors[1], [], ({"rows": tensors[2]}, 3)],
        0.9: deque([tensors[3]], maxlen=2),
        "pair": Pair(None, (tensors[4],)),
        ("a", "b"): tensors[5],
        "step": 7,
    }
    found = tensors_of(state)
    assert list(found) == ["mean", ("sides", 0), ("sides", 2, 0, "rows"), (0.9, 0), ("pair", 1, 0), ("a", "b")]
    assert all(a is b is tensor_at(state, place) for (place, a), b in zip(found.items(), tensors, strict=True))
    for place, tensor in found.items():
        put(state, place, tensor + 10)
    assert [float(tensor[0]) for tensor in tensors_of(state).values()] == [10, 11, 12, 13, 14, 15]
    assert isinstance(state["pair"], Pair)
    assert state["sides"][2][1] == 3
    assert state[0.9].maxlen == 2


def test_entries_of_no_parameter_are_told_from_states() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    entries: dict[Any, Any] = optimizer.state
    entries["total"] = 3
    assert of_none(optimizer) == {"total": 3}
    assert of_parameters(optimizer) == [optimizer.state[parameter]]
