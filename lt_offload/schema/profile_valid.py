"""Whether a profile from a file can be one: what planners take for granted. Knows the profile's types only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise

from lt_offload.schema.files import MOST_NUMBER
from lt_offload.schema.profile import BlockProfile, HardwareProfile, Profile, TensorProfile


def problems(profile: Profile) -> Iterator[str]:
    """Yield what no measured or estimated profile has, one sentence each; nothing if ``profile`` is sound."""
    optimizer = profile.optimizer
    for name, value in (
        ("batch_size", profile.batch_size),
        ("sequence_length", profile.sequence_length),
        ("optimizer.host_bytes_per_s", optimizer.host_bytes_per_s),
        ("optimizer.device_bytes_per_s", optimizer.device_bytes_per_s),
    ):
        if value <= 0:
            yield f"{name} is {value}, it has to be positive"
    for name, value in (
        ("shared_bytes", profile.shared_bytes),
        ("slack_bytes", profile.slack_bytes),
        ("optimizer.scratch_ratio", optimizer.scratch_ratio),
        ("optimizer.host_threads", optimizer.host_threads),
    ):
        if value < 0:
            yield f"{name} is {value}, it cannot be negative"
    yield from (f"hardware.{problem}" for problem in problems_of_machine(profile.hardware))
    if len(profile.blocks) < 2:
        yield f"it has {len(profile.blocks)} blocks, a model has two or more"
    backward = [block.has_backward for block in profile.blocks]
    if any(before and not after for before, after in pairwise(backward)):
        yield "blocks: one without a backward comes after one with a backward"
    for at, block in enumerate(profile.blocks):
        yield from (f"blocks.{at}: {problem}" for problem in _of_block(block))
    for at, tensor in enumerate(profile.tensors):
        yield from (f"tensors.{at}: {problem}" for problem in _of_tensor(tensor, backward))


def problems_of_machine(machine: HardwareProfile) -> Iterator[str]:
    """Yield the same for a machine alone."""
    values = {field.name: getattr(machine, field.name) for field in fields(machine)}
    values |= {f"flops_per_s.{dtype}": rate for dtype, rate in machine.flops_per_s.items()}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    for name, value in numbers.items():
        if not 0 <= value <= MOST_NUMBER:
            yield f"{name} is {value}, it cannot be negative, infinite or so large"
    for name in ("device_bytes", "host_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s"):
        if numbers[name] == 0:
            yield f"{name} is 0, it has to be positive"


def _of_block(block: BlockProfile) -> Iterator[str]:
    names = [option.name for option in block.options]
    if not names or len(set(names)) < len(names):
        yield f"its options are {', '.join(names) or 'none'}; it needs one or more different ones"
    if min(block.input_bytes, block.output_bytes) < 0 or block.launch_s < 0:
        yield "a size or time is negative"
    for option in block.options:
        sizes = (option.saved_bytes, option.offload_bytes, option.forward_peak_bytes, option.backward_peak_bytes)
        if min(sizes) < 0 or min(option.forward_s, option.backward_s) < 0:
            yield f"option {option.name}: a size or time is negative"


def _of_tensor(tensor: TensorProfile, backward: list[bool]) -> Iterator[str]:
    if tensor.bytes < 0 or tensor.state_bytes < 0 or any(length < 0 for length in tensor.shape):
        yield "a size is negative"
    if not tensor.blocks or list(tensor.blocks) != sorted(set(tensor.blocks)):
        yield f"its blocks {tensor.blocks} are not one or more in ascending order"
    elif not 0 <= tensor.blocks[0] <= tensor.blocks[-1] < len(backward):
        yield f"its blocks {tensor.blocks} do not exist, there are {len(backward)}"
    elif tensor.trainable and not any(backward[block] for block in tensor.blocks):
        yield "it is trainable, but no block that uses it has a backward"
    if tensor.zero_copy is not None and len(tensor.zero_copy.reads) != len(tensor.blocks):
        yield f"zero_copy.reads: {len(tensor.zero_copy.reads)} for {len(tensor.blocks)} blocks"
    if tensor.zero_copy is not None and any(min(r.forward_bytes, r.backward_bytes) < 0 for r in tensor.zero_copy.reads):
        yield "zero_copy.reads: a size is negative"
