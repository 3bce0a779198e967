"""What travels together has one range on both sides, and what lies side by side on both is one copy."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lt_offload.execute.memory.common import share_out
from lt_offload.execute.memory.groups import Layout
from lt_offload.execute.memory.live_group import LiveGroup
from lt_offload.execute.memory.residency import Transfer, coalesced
from lt_offload.execute.memory.tensors import Weight, add_in_order, carve
from lt_offload.plan.assembly.groups import group_tensors
from lt_offload.plan.assembly.ops import Draft
from lt_offload.schema.plan import ALIGNMENT, Plan, Prediction, one_batch
from tests.support.hostile.device import HostileDevice

SHAPES = ((7, 5), (16, 16), (3,), (128, 2), (10,))
DTYPES = (torch.float32, torch.bfloat16)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def weights_of(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Weight]:
    torch.manual_seed(0)
    made = [torch.randn(shape).to(DTYPES[i % 2]) for i, shape in enumerate(shapes)]
    return [Weight(i, f"w{i}", torch.nn.Parameter(tensor)) for i, tensor in enumerate(made)]


def op(id: int, kind: Any, tensors: tuple[int, ...], *, offsets: tuple[int, ...] = (), **fields: Any) -> Draft:
    lane = "h2d" if kind == "prefetch" else "none" if kind == "drop" else "d2h"
    return Draft(
        **{"payload": "weight"} | fields,
        id=id,
        kind=kind,
        step=0,
        block=0,
        lane=lane,
        tensors=tensors,
        offsets=offsets,
    )


def plan_of(weights: list[Weight], *ops: Draft, state_bytes: tuple[int, ...] = (0,) * len(SHAPES)) -> Plan:
    grouped = group_tensors(
        ops,
        {},
        weight_bytes=[aligned(weight.nbytes) for weight in weights],
        state_bytes=state_bytes,
        first_block=[0] * len(weights),
    )
    return Plan(
        fingerprint="",
        model="",
        planner="test",
        batch_size=1,
        sequence_length=1,
        budget_bytes=1,
        host_budget_bytes=1,
        options=("keep",),
        update_places=("device",) * len(SHAPES),
        timeline=one_batch(1),
        groups=grouped.groups,
        initial=(),
        ops=grouped.ops,
        gradient_bytes=1 << 20,
        arena_bytes=1 << 20,
        predicted=Prediction(
            iteration_s=1.0, lower_bound_s=1.0, no_offload_s=1.0, device_peak_bytes=1, host_peak_bytes=1
        ),
    )


@pytest.fixture
def device() -> Any:
    made = HostileDevice(1 << 22, "lazy", check=True)
    made.reserve(1 << 20)
    yield made
    made.close()


def offsets_of(weights: list[Weight], start: int = 0, gaps: tuple[int, ...] = ()) -> tuple[int, ...]:
    found = []
    for weight in weights:
        start += ALIGNMENT if weight.index in gaps else 0
        found.append(start)
        start += aligned(weight.nbytes)
    return tuple(found)


def members(groups: list[LiveGroup]) -> list[list[int]]:
    return [[member.index for member in group.members] for group in groups]


@pytest.mark.parametrize("gaps", [(), (1,), (1, 3)])
def test_copies_are_as_few_as_the_ranges(device: HostileDevice, gaps: tuple[int, ...]) -> None:
    """Dropped apart, so that there is a group for each, but fetched together."""
    weights = weights_of()
    before = [weight.host.clone() for weight in weights]
    fetch = op(0, "prefetch", (0, 1, 2, 3, 4), offsets=offsets_of(weights, gaps=gaps))
    layout = Layout(device, weights, [weights], plan_of(weights, fetch, *(op(1 + i, "drop", (i,)) for i in range(5))))
    assert members(layout.all) == [[0], [1], [2], [3], [4]]
    for group, offset in zip(layout.all, fetch.offsets, strict=True):
        group.attach(device.place(offset, group.room))
    assert len(coalesced(layout.all)) == 1 + len(gaps)
    transfer = Transfer(device, layout.all, label="fetch")
    event = transfer.fetch()
    assert event is not None
    device.wait(event, reads=[group.buffer for group in layout.all if group.buffer is not None])
    assert all(torch.equal(w.view, x) for w, x in zip(weights, before, strict=True) if w.view is not None)

    for weight in weights[1:3]:
        assert weight.view is not None
        weight.view.add_(1)
        weight.group.changed_on_device()
    event = Transfer(device, layout.all, label="back").write_back()
    assert event is not None
    device.synchronize(event)
    for weight, old in zip(weights, before, strict=True):
        assert torch.equal(weight.host, old + 1 if weight.index in (1, 2) else old)
        assert weight.param.data.data_ptr() == weight.host.data_ptr()


def test_what_is_apart_on_the_host_is_not_one_range(device: HostileDevice) -> None:
    weights = weights_of()
    fetch = op(0, "prefetch", (0, 1, 2, 3, 4), offsets=offsets_of(weights))
    layout = Layout(device, weights, [weights], plan_of(weights, fetch, *(op(1 + i, "drop", (i,)) for i in range(5))))
    first, _, third, *_ = layout.all
    first.attach(device.place(0, first.room))
    third.attach(device.place(first.room, third.room))
    assert [host.data_ptr() for host, _ in coalesced([first, third])] == [first.host.data_ptr(), third.host.data_ptr()]


def test_saving_one_tensor_writes_its_bytes_only(device: HostileDevice) -> None:
    weights = weights_of(((4, 4), (4096,), (4, 4)))
    Layout(device, weights, [weights], None)
    assert len({w.group for w in weights}) == 1
    for tensor in (weights[0].host, carve(torch.zeros(1 << 16, dtype=torch.uint8), 512, weights[0].host)):
        file = io.BytesIO()
        torch.save(tensor, file)
        assert file.tell() < 4096


def test_places_are_added_up_in_their_order_piece_by_piece() -> None:
    generator = torch.Generator().manual_seed(0)
    # More than one piece, and a last one that is shorter.
    places = [torch.randn(3, 50_001, generator=generator) * 10.0**power for power in (0, 4, -3)]
    expected = (places[0] + places[1]) + places[2]
    assert not torch.equal(expected, places[0] + (places[1] + places[2])), "the order shows"
    before = [place.clone() for place in places[1:]]
    found = add_in_order(places)
    assert found is places[0]
    assert torch.equal(found, expected)
    assert all(map(torch.equal, places[1:], before))


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5))
def test_nobody_has_more_than_the_largest_tensor_above_others(sizes: list[int], count: int) -> None:
    owners = share_out(sizes, count)
    held = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(count)]
    assert sum(held) == sum(sizes)
    assert max(held) - min(held) <= max(sizes, default=0)
