"""Random decisions that are valid: forwards that run again, weights read in host memory, everything else too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lt_offload.plan.iteration.decisions import BlockChoice, Choices, Rerun, Stay, TensorChoice, uses
from lt_offload.schema.profile import Profile


def random_choices(rng: np.random.Generator, profile: Profile) -> Choices:
    """Return valid decisions for a profile whose blocks but the first are chained."""
    options = _options(rng, profile)
    reruns = _reruns(rng, profile, options)
    blocks = _blocks(rng, profile, options, reruns)
    tensors = tuple(_tensor(rng, profile, index, reruns) for index in range(len(profile.tensors)))
    return Choices(tensors=tensors, blocks=blocks, reruns=reruns)


def _options(rng: np.random.Generator, profile: Profile) -> list[str]:
    """What runs again only after the block before needs one that has not saved everything."""
    found: list[str] = []
    for block in profile.blocks:
        names = [o.name for o in block.options]
        if not block.has_backward:
            names = ["keep"]
        elif not found or found[-1] not in ("recompute", "reload", "discard"):
            names = [name for name in names if name != "discard"]
        found.append(str(rng.choice(names)))
    return found


def _reruns(rng: np.random.Generator, profile: Profile, options: list[str]) -> dict[int, tuple[Rerun, ...]]:
    saved = {"recompute": "input", "reload": "input", "discard": "nothing"}
    state = [
        saved.get(option, "all") if block.has_backward else "frozen"
        for block, option in zip(profile.blocks, options, strict=True)
    ]
    steps, found = 2 * len(options), {}
    for block in reversed(range(len(options))):
        chains: list[Rerun] = []
        for _ in range(int(rng.integers(3)) if rng.uniform() < 0.5 else 0):
            starts = [b for b in range(chains[-1].block + 1 if chains else 0, block + 1) if state[b] == "input"]
            if starts:
                start = int(rng.choice(starts))
                reach = [start]
                while reach[-1] < block and state[reach[-1] + 1] in ("input", "nothing"):
                    reach.append(reach[-1] + 1)
                chains += _chain(rng, state, start, int(rng.choice(reach)), block)
        if state[block] == "nothing":
            start = max(b for b in range(block) if state[b] == "input")
            chains = [again for again in chains if again.block < start]
            chains += _chain(rng, state, start, block, block)
        if chains:
            found[steps - 1 - block] = tuple(chains)
        state[block] = "done"
    return found


def _chain(rng: np.random.Generator, state: list[str], start: int, end: int, backward: int) -> list[Rerun]:
    saves = []
    for block in reversed(range(start, end + 1)):
        options = ["input"]
        if block == backward or state[block + 1] != "nothing":
            options.append("all")
        if block and block != backward and state[block - 1] not in ("all", "frozen"):
            options.append("nothing")
        state[block] = str(rng.choice(options))
        saves.append(Rerun(block=block, save=state[block]))  # type: ignore[arg-type]
    return saves[::-1]


def _blocks(
    rng: np.random.Generator, profile: Profile, options: list[str], reruns: dict[int, tuple[Rerun, ...]]
) -> tuple[BlockChoice, ...]:
    steps, found = 2 * len(options), []
    for index, (block, option) in enumerate(zip(profile.blocks, options, strict=True)):
        choice = BlockChoice(option=option)  # type: ignore[arg-type]
        if block.has_backward and block.option(option).offload_bytes:
            again = [step for step, chain in reruns.items() if index in [rerun.block for rerun in chain]]
            needed = min([steps - 1 - index, *again])
            until = min(index + int(rng.integers(3)), needed - 1)
            choice = replace(choice, until=until, fetch=int(rng.integers(until + 1, needed + 1)))
        found.append(choice)
    return tuple(found)


def _tensor(
    rng: np.random.Generator, profile: Profile, index: int, reruns: dict[int, tuple[Rerun, ...]]
) -> TensorChoice:
    """Positions are steps since the one after the last backward."""
    tensor, steps = profile.tensors[index], 2 * len(profile.blocks)
    needed = uses(tensor.blocks, profile, reruns)
    update = needed[-1]
    place = str(rng.choice(["device", "host"])) if tensor.trainable else "none"
    if place != "host" and rng.uniform() < 0.3:
        return TensorChoice(place=place)  # type: ignore[arg-type]
    direct = [s for s in needed if tensor.direct and (s != update or place != "device") and rng.uniform() < 0.4]
    at = sorted((step - update - 1) % steps for step in needed if step not in direct)
    stays, before = [], -1
    while at:
        count = int(rng.integers(1, len(at) + 1))
        group, at = at[:count], at[count:]
        start = int(rng.integers(before + 1, group[0] + 1))
        before = int(rng.integers(group[-1], at[0])) if at and rng.uniform() < 0.5 else group[-1]
        stays.append(Stay(start=(start + update + 1) % steps, end=(before + update + 1) % steps))
    choice = TensorChoice(place=place, stays=tuple(stays), direct=tuple(direct))  # type: ignore[arg-type]
    if place == "device":
        states = replace(choice, place="paged", state_stay=Stay(start=update - 1, end=update), state_leave=update)
        choice = states if tensor.state_bytes and rng.uniform() < 0.5 else choice
        return replace(choice, write_back=update)
    if place == "host":
        written = tensor.direct is not None and rng.uniform() < 0.5
        until = min(update + int(rng.integers(3)), steps - 1)
        return replace(choice, grad_direct=written, grad_until=None if written else until)
    return choice
