"""One profile of several, of all processes of a run or of several batches: the longest times, and the largest sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from lt_offload.distributed.sums import BUCKET_BYTES
from lt_offload.schema.profile import Profile

_LEAST = ("device_bytes", "host_bytes", "pinnable_bytes")
"""Fields of which the smallest counts, as of speeds: they say what there is, not what is needed."""
_ALONE = (
    "contention",
    "batch_size",
    "sequence_length",
    "schema",
    "host_threads",
    "chunk_tokens",
    "processes",
    "machines",
)
"""Fits of several numbers, and names in the form of numbers: as in the profile that the others are added to."""


def merged(
    profiles: Sequence[Profile],
    *,
    per_machine: int,
    machines: int = 1,
    on_cuda: bool,
    common_updates: bool = False,
    added_up_first: bool = False,
) -> Profile:
    """Return the profile that one plan for all is made for.

    Times are the longest, speeds the lowest, sizes the largest of any process. The RAM that each may take is its part
    of the machine's, and what all have in common counts by its part. ``profiles`` are of one model, in the order of
    ranks. ``on_cuda``: gradients are added up in device memory that plans have to leave. ``common_updates``: weights
    that the host updates are in memory that processes of a machine have in common. ``added_up_first``: gradients of all
    are added up before the first update.
    """
    base = max(profiles, key=lambda profile: profile.batch_size * profile.sequence_length)
    joint: Profile = _merged("", [base, *profiles])
    machine = replace(
        joint.hardware,
        host_bytes=joint.hardware.host_bytes // per_machine,
        pinnable_bytes=joint.hardware.pinnable_bytes // per_machine,
    )
    buckets = 2 * BUCKET_BYTES if on_cuda else 0
    optimizer = joint.optimizer
    if common_updates:  # of what a plan updates on the host each process does its part
        optimizer = replace(
            optimizer,
            host_bytes_per_s=per_machine * optimizer.host_bytes_per_s,
            host_speeds={threads: per_machine * speed for threads, speed in optimizer.host_speeds.items()},
        )
    return replace(
        joint,
        hardware=machine,
        optimizer=optimizer,
        shared_bytes=joint.shared_bytes + buckets,
        processes=per_machine,
        machines=machines,
        common_updates=common_updates,
        added_up_first=added_up_first,
    )


def largest(profiles: Sequence[Profile]) -> Profile:
    """Return the profile of a plan that has room for the batches of all ``profiles``, which are of one model."""
    by_block = zip(*(profile.blocks for profile in profiles), strict=True)
    kept = [set.intersection(*({o.name for o in block.options} for block in same)) for same in by_block]
    alike = []
    for profile in profiles:
        options = [
            tuple(o for o in b.options if o.name in names) for b, names in zip(profile.blocks, kept, strict=True)
        ]
        blocks = (replace(block, options=of) for block, of in zip(profile.blocks, options, strict=True))
        alike.append(replace(profile, blocks=tuple(blocks)))
    base = max(alike, key=lambda profile: profile.batch_size * profile.sequence_length)
    joint: Profile = _merged("", [base, *alike])
    return replace(joint, iterations=tuple(iteration for profile in profiles for iteration in profile.iterations))


def _merged(name: str, values: Sequence[Any]) -> Any:
    """Return what is put in the place of ``values``, the first of which is the base."""
    base = values[0]
    if name in ("graphed", "chained"):  # what restricts plans
        return any(values) if name == "graphed" else all(values)
    if name in _ALONE or any(type(value) is not type(base) for value in values):
        return base
    if is_dataclass(base) and not isinstance(base, type):
        return replace(
            base, **{f.name: _merged(f.name, [getattr(value, f.name) for value in values]) for f in fields(base)}
        )
    if isinstance(base, tuple) and len({len(value) for value in values}) == 1:
        return tuple(_merged(name, column) for column in zip(*values, strict=True))
    if isinstance(base, dict):
        alike = all(value.keys() == base.keys() for value in values)
        return {key: _merged(name, [v[key] for v in values]) for key in base} if alike else base
    if isinstance(base, bool) or not isinstance(base, int | float):
        return base
    least = name in _LEAST or name.endswith("_per_s") or name == "host_speeds"
    return min(values) if least else max(values)
