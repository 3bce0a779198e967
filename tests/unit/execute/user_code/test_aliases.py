"""Weights whose memory others hold are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload.execute.user_code.aliases import find_aliases

HOLDERS: dict[str, tuple[Callable[[nn.Parameter], Any], bool]] = {
    "nobody": (lambda p: None, False),
    "a clone": (lambda p: [p.detach().clone()], False),
    "a tensor": (lambda p: [p.detach()], True),
    "a view": (lambda p: {"row": p.detach()[0]}, True),
    "an array": (lambda p: [p.detach().numpy()], True),
    "a capsule": (lambda p: [p.detach().__dlpack__()], True),
    "a tensor of a capsule": (lambda p: [torch.from_dlpack(p.detach())], True),
    "another process": (lambda p: p.share_memory_().shape, True),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_who_holds_a_weight(name: str) -> None:
    hold, held = HOLDERS[name]
    model = nn.Linear(3, 3)
    kept = hold(model.weight)
    found = find_aliases([model.weight, model.bias], [])
    assert found == ({0} if held else set())
    del kept


def test_weights_in_one_storage_do_not_hold_each_other() -> None:
    whole = torch.zeros(8)
    parts = [nn.Parameter(whole[:4]), nn.Parameter(whole[4:6])]
    buffer = nn.Parameter(whole[6:])
    del whole
    assert find_aliases(parts, [buffer]) == frozenset()
    assert find_aliases(parts, []) == {0, 1}
