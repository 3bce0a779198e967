"""Is everything that touches device memory ordered? And does it show where it is not?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.cuda._sanitizer import DEFAULT_STREAM_ID, EventHandler

from tests.gpu.races.sanitizer import PAGE, arguments_on
from tests.gpu.target import Target
from tests.gpu.worker import FAULTS, call

pytestmark = pytest.mark.no_cover

CASES: list[dict[str, Any]] = [
    {"options": ["keep", "recompute", "offload", "mixed", "reload"], "places": ["device", "paged", "host"]},
    {"options": ["offload"], "places": ["paged", "host"], "family": "llama-tied", "dtype": "bfloat16", "lag": 0},
    {"options": ["mixed"], "places": ["host"], "family": "bloom", "dropout": 0.1, "lora": True},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_all_accesses_are_ordered(case: dict[str, Any], target: Target, found: Any) -> None:
    seen = call("sanitized", kind=target.kind, fault=None, **case)
    found(**seen)
    assert seen["race"] is None
    if target.kind != "cpu":  # there the checker knows what was declared, and sees no launches
        assert seen["copies"] > 20
        assert seen["launches"] > 10 * seen["copies"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_ordered_is_noticed(fault: str, target: Target) -> None:
    assert call("sanitized", kind=target.kind, fault=fault, **CASES[0])["race"]


@pytest.mark.quick
def test_ranges_that_overlap_are_one_memory() -> None:
    """Wherever a tensor begins; on another stream a page may be written only behind an event."""
    slab = torch.zeros(8 * PAGE, dtype=torch.uint8)
    slab = slab[-slab.data_ptr() % PAGE :]
    wide, inner, beside = slab[: 4 * PAGE], slab[2 * PAGE : 3 * PAGE], slab[4 * PAGE : 5 * PAGE]
    handler, other, event = EventHandler(), 7, 99

    def copies(stream: int, target: torch.Tensor) -> list[Any]:
        """A copy into ``target`` on ``stream``."""
        schema, seen = torch.ops.aten.copy_.default._schema, arguments_on("cpu")()
        seen.parse_inputs(schema, (target, torch.ones_like(target)), {}, is_factory=False)
        return handler._handle_kernel_launch(stream, set(), seen.dataptrs_written, set(), "copy", seen.tensor_aliases)

    handler._handle_stream_creation(other)
    assert copies(DEFAULT_STREAM_ID, wide) == []
    assert copies(other, beside) == []
    assert len(copies(other, inner)) == 1
    handler._handle_event_record(event, other)
    handler._handle_event_wait(event, DEFAULT_STREAM_ID)
    assert copies(DEFAULT_STREAM_ID, wide) == []
