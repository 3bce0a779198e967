"""Who else holds the memory of weights is found, and whether it can be read without operations on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload.execute.user_code.aliases import find_aliases

HOLDERS: dict[str, tuple[Callable[[nn.Parameter], Any], bool, bool]] = {
    "nobody": (lambda p: None, False, False),
    "a clone": (lambda p: [p.detach().clone()], False, False),
    "a tensor": (lambda p: [p.detach()], True, False),
    "a view": (lambda p: {"row": p.detach()[0]}, True, False),
    "an array": (lambda p: [p.detach().numpy()], True, True),
    "a capsule": (lambda p: [p.detach().__dlpack__()], True, True),
    "a tensor of a capsule": (lambda p: [torch.from_dlpack(p.detach())], True, True),
    "another process": (lambda p: p.share_memory_().shape, True, True),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_who_holds_a_weight(name: str) -> None:
    hold, held, unseen = HOLDERS[name]
    model = nn.Linear(3, 3)
    kept = hold(model.weight)
    found = find_aliases([model.weight, model.bias], [])
    assert (0 in found.held, 0 in found.unseen) == (held, unseen)
    assert 1 not in found.held | found.unseen
    del kept


def test_weights_in_one_storage_do_not_hold_each_other() -> None:
    whole = torch.zeros(8)
    parts = [nn.Parameter(whole[:4]), nn.Parameter(whole[4:6])]
    buffer = nn.Parameter(whole[6:])
    del whole
    assert find_aliases(parts, [buffer]).held == frozenset()
    assert find_aliases(parts, []).held == {0, 1}
