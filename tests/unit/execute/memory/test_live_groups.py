"""What travels together has one range on both sides, and what lies side by side on both is one copy."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lt_offload.errors import OverBudget
from lt_offload.execute.memory.common import share_out
from lt_offload.execute.memory.groups import Layout
from lt_offload.execute.memory.live_group import LiveGroup
from lt_offload.execute.memory.residency import Transfer, coalesced
from lt_offload.execute.memory.tensors import States, Weight, add_in_order, carve
from lt_offload.schema.plan import ALIGNMENT, Payload, TensorGroup
from tests.support.hostile.device import HostileDevice

SHAPES = ((7, 5), (16, 16), (3,), (128, 2), (10,))
DTYPES = (torch.float32, torch.bfloat16)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def weights_of(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Weight]:
    torch.manual_seed(0)
    made = [torch.randn(shape).to(DTYPES[i % 2]) for i, shape in enumerate(shapes)]
    return [Weight(i, f"w{i}", torch.nn.Parameter(tensor)) for i, tensor in enumerate(made)]


def apart(device: HostileDevice, weights: list[Weight], *, states: bool = False) -> list[LiveGroup]:
    """A group for each of ``weights``, or for the two states of each."""
    payload: Payload = "state" if states else "weight"
    sizes = [aligned(weight.nbytes * (1 + states)) for weight in weights]
    groups = [TensorGroup(payload=payload, tensors=(at,), sizes=(size,)) for at, size in enumerate(sizes)]
    found = Layout(device, weights, [weights], groups).all
    return [group for group in found if isinstance(group.members[0], States) == states]


@pytest.fixture
def device() -> Any:
    made = HostileDevice(1 << 22, "lazy", check=True)
    made.reserve(1 << 20)
    yield made
    made.close()


@pytest.mark.parametrize("gaps", [(), (1,), (1, 3)])
def test_copies_are_as_few_as_the_ranges(device: HostileDevice, gaps: tuple[int, ...]) -> None:
    weights = weights_of()
    before = [weight.host.clone() for weight in weights]
    groups, offset = apart(device, weights), 0
    for at, group in enumerate(groups):
        offset += ALIGNMENT if at in gaps else 0
        group.attach(device.place(offset, group.room))
        offset += group.room
    assert len(coalesced(groups)) == 1 + len(gaps)
    event = Transfer(device, groups, label="fetch").fetch()
    assert event is not None
    device.wait(event, reads=[group.buffer for group in groups if group.buffer is not None])
    assert all(torch.equal(w.view, x) for w, x in zip(weights, before, strict=True) if w.view is not None)

    for weight in weights[1:3]:
        assert weight.view is not None
        weight.view.add_(1)
        weight.group.changed_on_device()
    event = Transfer(device, groups, label="back").write_back()
    assert event is not None
    device.synchronize(event)
    for weight, old in zip(weights, before, strict=True):
        assert torch.equal(weight.host, old + 1 if weight.index in (1, 2) else old)
        assert weight.param.data.data_ptr() == weight.host.data_ptr()


def test_what_is_apart_on_the_host_is_not_one_range(device: HostileDevice) -> None:
    first, _, third, *_ = apart(device, weights_of())
    first.attach(device.place(0, first.room))
    third.attach(device.place(first.room, third.room))
    assert [host.data_ptr() for host, _ in coalesced([first, third])] == [first.host.data_ptr(), third.host.data_ptr()]


def test_states_travel_as_they_are_and_none_grows_beyond_its_room(device: HostileDevice) -> None:
    (weight,) = weights = weights_of(((16, 16),))
    (group,) = apart(device, weights, states=True)
    made = {"step": torch.tensor(1.0), "m": torch.randn(16, 16), "v": torch.randn(16, 16)}
    before = {name: tensor.clone() for name, tensor in made.items()}
    weight.states.refresh(made)
    group.attach(device.place(0, group.room))
    event = Transfer(device, [group], label="fetch").fetch()
    assert event is not None
    device.wait(event)
    assert {name: torch.equal(view, before[name]) for name, view in weight.states.view.items()} == {
        "m": True,
        "v": True,
    }
    group.detach()
    with pytest.raises(OverBudget, match="the plan has kept"):
        weight.states.refresh({"m": torch.zeros(1000)})


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
