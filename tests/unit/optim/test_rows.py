"""Updates of some rows of a matrix at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload.optim import AdamW, native
from lt_offload.optim.rows import RowUpdates, updates_rows

MAKERS: dict[str, tuple[torch.dtype, Callable[[Any], torch.optim.Optimizer]]] = {
    "torch": (torch.float32, lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True)),
    "fp32": (torch.float32, lambda params: AdamW(params, lr=1e-2)),
    "masters": (torch.bfloat16, lambda params: AdamW(params, lr=1e-2)),
    "noise": (torch.bfloat16, lambda params: AdamW(params, lr=1e-2, stochastic_rounding=True)),
    "half": (torch.float16, lambda params: AdamW(params, lr=1e-2)),
    "bfloat16 moments": (torch.bfloat16, lambda params: AdamW(params, lr=1e-2, state_dtype="bfloat16")),
    "both": (
        torch.bfloat16,
        lambda params: AdamW(params, lr=1e-2, stochastic_rounding=True, state_dtype="bfloat16"),
    ),
}


@pytest.mark.parametrize("compiled", [True, False], ids=["native", "operations"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shape", [(37, 16), (501, 48), (130, 1040)], ids=str)
def test_rows_in_two_parts_have_the_bits_of_a_whole_update(shape: tuple[int, int], name: str, compiled: bool) -> None:
    dtype, make = MAKERS[name]
    torch.manual_seed(0)
    whole, parted = (nn.Parameter(torch.randn(shape).to(dtype)) for _ in range(2))
    parted.data.copy_(whole.data)
    one, other = make([whole]), make([parted])
    assert updates_rows(other, parted)
    state: dict[str, Any] = {}
    with native.left_out() if not compiled else torch.no_grad():
        for _ in range(3):
            grad = torch.randn(shape).to(dtype)
            whole.grad = grad.clone()
            one.step()
            rows = RowUpdates(other, parted, other.param_groups[0])
            if not state:
                state = rows.new_state(parted.data)
            late = sorted({0, shape[0] - 1, *torch.randint(shape[0], (shape[0] // 3,)).tolist()})
            ranges = [(row, row + 1) for row in late]
            early = [(a + 1, b) for a, b in zip(late, late[1:], strict=False) if a + 1 < b]
            rows.run(parted.data, grad, state, early, begins=True)
            rows.run(parted.data, grad[late], state, ranges, begins=False)
    assert torch.equal(whole, parted)
    assert one.state[whole].keys() == state.keys()
    for key, value in one.state[whole].items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True, amsgrad=True),
        lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
        lambda params: AdamW(params, state_dtype="8bit"),
    ],
    ids=["not fused", "amsgrad", "Adam", "8 bits"],
)
def test_other_optimizers_update_tables_as_a_whole(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    table = nn.Parameter(torch.zeros(8, 32))
    assert not updates_rows(make([table]), table)


def test_rows_that_are_no_whole_cache_lines_are_updated_with_the_table() -> None:
    odd, vector = nn.Parameter(torch.zeros(8, 30)), nn.Parameter(torch.zeros(32))
    assert not any(updates_rows(AdamW([odd, vector]), p) for p in (odd, vector, nn.Parameter(torch.zeros(8, 32))))
    half_a_line = nn.Parameter(torch.zeros(8, 16, dtype=torch.bfloat16))
    assert updates_rows(AdamW([half_a_line]), half_a_line)
    assert not updates_rows(torch.optim.AdamW([half_a_line], fused=True), half_a_line)
