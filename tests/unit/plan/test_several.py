"""RAM of several processes of one machine: what they have in common counts once, all else in each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_offload.errors import InfeasibleError
from lt_offload.plan import solve
from lt_offload.plan.iteration.memory import host_bytes, lasting_host_bytes
from tests.support.profiles.fixtures import llama7b_b4

MODEL = llama7b_b4(4)
FOUR = replace(MODEL, processes=4)
TOGETHER = replace(FOUR, common_updates=True)
HOSTED = {"planner": "l2l", "delayed": True}


def test_weights_and_states_that_the_host_updates_count_once_on_a_machine() -> None:
    memory = "6GB"
    alone, each = (solve(profile, memory=memory, **HOSTED) for profile in (MODEL, TOGETHER))  # type: ignore[arg-type]
    assert "host" in each.update_places
    trained = [t for t, place in zip(MODEL.tensors, each.update_places, strict=True) if place == "host"]
    frozen = [t for t in MODEL.tensors if not t.trainable]
    shared = sum(t.bytes + t.state_bytes for t in (*trained, *frozen))
    assert each.update_places == alone.update_places
    assert host_bytes(each, MODEL) - host_bytes(each, TOGETHER) == shared - -(-shared // 4)
    assert any("RAM is that of one of 4 processes" in note for note in each.notes)
    assert not any("RAM is that of one" in note for note in alone.notes)


def test_without_owners_only_frozen_weights_count_once() -> None:
    frozen = replace(FOUR, tensors=tuple(replace(t, trainable=False, state_bytes=0) for t in FOUR.tensors))
    options = tuple("keep" for _ in FOUR.blocks)
    least = lasting_host_bytes(options, (), replace(frozen, processes=1))  # type: ignore[arg-type]
    weights = sum(tensor.bytes for tensor in frozen.tensors)
    assert least - lasting_host_bytes(options, (), frozen) == weights - -(-weights // 4)  # type: ignore[arg-type]
    assert lasting_host_bytes(options, (), FOUR) == lasting_host_bytes(options, (), MODEL)  # type: ignore[arg-type]


def test_too_little_ram_is_said_for_the_machine() -> None:
    with pytest.raises(InfeasibleError, match="for 4 processes, which have frozen weights and those") as raised:
        solve(TOGETHER, memory="6GB", host_memory=1000)
    alone = lasting_host_bytes(tuple("keep" for _ in FOUR.blocks), (), TOGETHER)  # type: ignore[arg-type]
    assert raised.value.needed_host_bytes is not None
    assert raised.value.needed_host_bytes % 4 == 0
    assert "host_memory=4 kB is too small" in str(raised.value)
    assert raised.value.needed_host_bytes <= 4 * alone
