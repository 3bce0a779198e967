"""Makes decisions take less device memory, at the price of time: copies get less room to run beside computations.

Whole tensors need more memory than the fractions they were rounded from, in a few steps. Only those steps are touched:
memory on the way out is given back earlier there, and memory on the way in is taken later. Knows nothing of offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lt_offload.plan.arena import live_bytes
from lt_offload.plan.choices import Choices
from lt_offload.plan.copies import device_copies
from lt_offload.plan.flexible import FlexibleStay, with_stays
from lt_offload.plan.memory import backward_steps, framework_bytes
from lt_offload.profile.types import Profile


def squeeze_framework(choices: Choices, profile: Profile, limit: int) -> Choices:
    """Return ``choices`` with the framework's peak at ``limit`` bytes, or as near above it as possible."""
    used = framework_bytes(choices.usage, profile)
    tensors, blocks = list(choices.tensors), list(choices.blocks)
    while used.max() > limit:
        step = int(used.argmax())
        moves = list(_framework_moves(replace(choices, tensors=tuple(tensors), blocks=tuple(blocks)), profile, step))
        if not moves:
            break
        over = int(used[step]) - limit
        move = min(moves, key=lambda move: (move.bytes < over, move.bytes if move.bytes >= over else -move.bytes))
        used[move.first : move.last + 1] -= move.bytes
        if move.kind == "grad":
            tensors[move.index] = replace(tensors[move.index], grad_until=step - 1)
        elif move.kind == "out":
            blocks[move.index] = replace(blocks[move.index], until=step - 1)
        else:
            blocks[move.index] = replace(blocks[move.index], fetch=step + 1)
    return Choices(tensors=tuple(tensors), blocks=tuple(blocks))


@dataclass(frozen=True, slots=True)
class _Move:
    """Frees ``bytes`` in the steps ``first`` to ``last``."""

    kind: str
    index: int
    bytes: int
    first: int
    last: int


def _framework_moves(choices: Choices, profile: Profile, step: int) -> Iterator[_Move]:
    for t, (tensor, choice) in enumerate(zip(profile.tensors, choices.tensors, strict=True)):
        until = choice.grad_until
        if until is not None and backward_steps(tensor.blocks, profile)[-1] < step <= until:
            yield _Move("grad", t, tensor.bytes, step, until)
    for index, (block, chosen) in enumerate(zip(profile.blocks, choices.blocks, strict=True)):
        if chosen.until is None or chosen.fetch is None:
            continue
        nbytes = block.option(chosen.option).offload_bytes
        if index < step <= chosen.until:
            yield _Move("out", index, nbytes, step, chosen.until)
        if chosen.fetch <= step < 2 * len(profile.blocks) - 1 - index:
            yield _Move("in", index, nbytes, chosen.fetch, step)


def squeeze_arena(choices: Choices, profile: Profile, limit: int) -> Choices:
    """Return ``choices`` with the peak of live arena bytes at ``limit``, or as near above it as possible."""
    steps = 2 * len(profile.blocks)
    copies = device_copies(choices, profile)
    live = live_bytes([copy.lifetime(steps) for copy in copies], steps)
    stays = [FlexibleStay(copy, choices, profile) for copy in copies if copy.stay is not None]
    while live.max() > limit:
        step = int(live.argmax())
        over = int(live[step]) - limit
        moves = [(cost, stay.copy.room, at, late) for at, stay in enumerate(stays) for cost, late in stay.moves(step)]
        if not moves:
            break
        # The shortest delay first; of those the smallest buffer that is enough, else the largest.
        _, room, at, late = min(moves, key=lambda m: (m[0], m[1] < over, m[1] if m[1] >= over else -m[1]))
        live[stays[at].shorten(step, late)] -= room
    return with_stays(choices, stays)
