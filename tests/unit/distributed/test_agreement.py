"""What processes have to have alike is named where it differs; one profile is made of all, and files are shared."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from lt_offload.distributed.merge import largest, merged
from lt_offload.distributed.peers import OpenFile
from lt_offload.distributed.sums import BUCKET_BYTES
from lt_offload.errors import ConfigError
from lt_offload.strategy.several.facts import compare
from tests.support.profiles.small import small_profile
from tests.support.samples import make_profile


def test_a_difference_names_field_values_and_process() -> None:
    compare([{"precision": "32-true", "blocks": 4}] * 3)
    with pytest.raises(ConfigError, match="precision differs .* process 0 has '32', process 2 'bf16'"):
        compare([{"precision": "32"}, {"precision": "32"}, {"precision": "bf16"}])


def test_of_long_lists_the_difference_is_told() -> None:
    names = tuple(f"layer.{i}" for i in range(9))
    with pytest.raises(ConfigError, match=r"process 0 has 9, among them layer.3, process 1 8;"):
        compare([{"names": names}, {"names": (*names[:3], *names[4:])}])


def test_the_slowest_and_the_largest_count() -> None:
    one = make_profile(layers=2, tensors_per_layer=2)
    keep = one.blocks[1].options[0]
    slow = replace(keep, forward_s=2 * keep.forward_s, saved_bytes=keep.saved_bytes // 2)
    block = replace(one.blocks[1], options=(slow, *one.blocks[1].options[1:]))
    hardware = replace(one.hardware, h2d_bytes_per_s=one.hardware.h2d_bytes_per_s / 2, device_bytes=10**8)
    other = replace(one, blocks=(one.blocks[0], block, *one.blocks[2:]), hardware=hardware)
    for profiles in ([one, other], [other, one]):
        found = merged(profiles, per_machine=2, on_cuda=False)
        option = found.blocks[1].options[0]
        assert (option.forward_s, option.saved_bytes) == (2 * keep.forward_s, keep.saved_bytes)
        assert found.hardware.h2d_bytes_per_s == one.hardware.h2d_bytes_per_s / 2
        assert found.hardware.device_bytes == 10**8
        assert found.hardware.host_bytes == one.hardware.host_bytes // 2
        assert (found.processes, found.machines) == (2, 1)
        assert found.fingerprint == one.fingerprint
        assert found.shared_bytes == one.shared_bytes


def test_on_gpus_plans_leave_room_for_what_is_added_up() -> None:
    one = make_profile(layers=2, tensors_per_layer=2)
    assert merged([one, one], per_machine=2, on_cuda=True).shared_bytes == one.shared_bytes + 2 * BUCKET_BYTES


def test_the_largest_has_what_any_needs_and_the_options_of_all() -> None:
    short = replace(small_profile(3), iterations=(1,))
    block = short.blocks[1]
    keep, *others = block.options
    padded = replace(block, options=(replace(keep, saved_bytes=keep.saved_bytes + 7), *others[1:]), graphed=True)
    shorter = replace(short, sequence_length=short.sequence_length - 1, shared_bytes=short.shared_bytes + 5)
    shorter = replace(shorter, blocks=(short.blocks[0], padded, *short.blocks[2:]), iterations=(4, 5))
    for found in (largest([short, shorter]), largest([shorter, short])):
        assert found.sequence_length == short.sequence_length
        assert found.shared_bytes == short.shared_bytes + 5
        assert found.blocks[1].options[0].saved_bytes == keep.saved_bytes + 7
        assert [option.name for option in found.blocks[1].options] == [option.name for option in padded.options]
        assert found.blocks[1].graphed
        assert found.blocks[2:] == short.blocks[2:]
        assert sorted(found.iterations) == [1, 4, 5]


def opened() -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, b"some bytes")
    return descriptor


def test_it_is_the_same_file() -> None:
    first = opened()
    second = OpenFile.of(first).open()
    assert first != second
    assert os.pread(second, 4, 5) == b"byte"
    os.close(first)
    os.pwrite(second, b"B", 5)  # it is there as long as somebody has it
    assert os.pread(second, 4, 5) == b"Byte"
    os.close(second)


def test_what_cannot_be_opened_is_said() -> None:
    told = OpenFile.of(opened())
    for wrong in (replace(told, descriptor=told.descriptor + 1000), replace(told, identity=(0, 0, 0))):
        with pytest.raises(ConfigError, match=f"/proc/{os.getpid()}/fd/.* cannot be opened: .*in one container"):
            wrong.open()
    os.close(told.descriptor)
