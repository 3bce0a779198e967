"""Decisions of the linear program, in fractions, before they become whole tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.profile import OptionName, Profile

Flow = NDArray[np.float64]
"""One value per tau = (step - last backward step of the group) mod T."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tensors used by the same set of blocks: one parameter ``w`` of the program."""

    tensors: tuple[int, ...]
    blocks: tuple[int, ...]
    bytes: int
    trainable_bytes: int
    state_bytes: int
    last_backward: int
    """Step g of the last use."""


def groups(profile: Profile) -> tuple[Group, ...]:
    """Return the parameter groups of ``profile``, in order of first use."""
    steps = timeline(profile)
    # Tensors with the same uses need the same rows: one variable for all of them keeps the program small.
    members: dict[tuple[int, ...], list[int]] = {}
    for index, tensor in enumerate(profile.tensors):
        members.setdefault(tensor.blocks, []).append(index)
    return tuple(
        Group(
            tensors=tuple(indices),
            blocks=blocks,
            bytes=sum(profile.tensors[i].bytes for i in indices),
            trainable_bytes=sum(profile.tensors[i].bytes for i in indices if profile.tensors[i].trainable),
            state_bytes=sum(profile.tensors[i].state_bytes for i in indices),
            last_backward=steps.backward(blocks[0]),
        )
        for blocks, indices in sorted(members.items())
        if blocks
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFlows:
    """Fractions in [0, 1] for one group, per tau. Each field says of which bytes they are fractions."""

    host_share: float
    """X: fraction of the trainable bytes updated on the host."""
    resident: Flow
    """R: of all bytes, on the device during the whole step."""
    prefetch: Flow
    """P: of all bytes, copied to the device during the step."""
    write_back: Flow
    """OW: of all bytes, updated weights copied to the host during the step."""
    state_resident: Flow
    """S: of the state bytes, behind the update step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A solved program: fractional flows with whole options."""

    groups: tuple[Group, ...]
    flows: tuple[GroupFlows, ...]
    options: tuple[OptionName, ...]
    """One per block."""
    iteration_s: float
    """Objective without tie-break terms."""
