"""Random decisions that are valid: forwards that run again, weights read in host memory, everything else too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lt_offload.plan.iteration.decisions import Decisions, Interval, Recomputation, TensorDecision, uses
from lt_offload.schema.profile import Profile


def random_decisions(rng: np.random.Generator, profile: Profile) -> Decisions:
    """Return valid decisions for a profile whose blocks but the first are chained."""
    options = _options(rng, profile)
    recomputations = _reruns(rng, profile, options)
    tensors = tuple(_tensor(rng, profile, index, recomputations) for index in range(len(profile.tensors)))
    return Decisions(tensors=tensors, options=tuple(options), recomputations=recomputations)  # type: ignore[arg-type]


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


def _reruns(rng: np.random.Generator, profile: Profile, options: list[str]) -> dict[int, tuple[Recomputation, ...]]:
    saved = {"recompute": "input", "reload": "input", "discard": "nothing"}
    state = [
        saved.get(option, "all") if block.has_backward else "frozen"
        for block, option in zip(profile.blocks, options, strict=True)
    ]
    steps, found = 2 * len(options), {}
    for block in reversed(range(len(options))):
        chains: list[Recomputation] = []
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


def _chain(rng: np.random.Generator, state: list[str], start: int, end: int, backward: int) -> list[Recomputation]:
    saves = []
    for block in reversed(range(start, end + 1)):
        options = ["input"]
        if block == backward or state[block + 1] != "nothing":
            options.append("all")
        if block and block != backward and state[block - 1] not in ("all", "frozen"):
            options.append("nothing")
        state[block] = str(rng.choice(options))
        saves.append(Recomputation(block=block, save=state[block]))  # type: ignore[arg-type]
    return saves[::-1]


def _tensor(
    rng: np.random.Generator, profile: Profile, index: int, recomputations: dict[int, tuple[Recomputation, ...]]
) -> TensorDecision:
    """Positions are steps since the one after the last backward."""
    tensor, steps = profile.tensors[index], 2 * len(profile.blocks)
    needed = uses(tensor.blocks, profile, recomputations)
    update = needed[-1]
    place = str(rng.choice(["device", "host"])) if tensor.trainable else "none"
    if place != "host" and rng.uniform() < 0.3:
        return TensorDecision(place=place)  # type: ignore[arg-type]
    zero_copy = [s for s in needed if tensor.zero_copy and (s != update or place != "device") and rng.uniform() < 0.4]
    at = sorted((step - update - 1) % steps for step in needed if step not in zero_copy)
    stays = []
    while at:
        count = int(rng.integers(1, len(at) + 1))
        group, at = at[:count], at[count:]
        stays.append(Interval(start=(group[0] + update + 1) % steps, end=(group[-1] + update + 1) % steps))
    decision = TensorDecision(place=place, stays=tuple(stays), zero_copy=tuple(zero_copy))  # type: ignore[arg-type]
    if place == "device":
        paged = tensor.state_bytes and rng.uniform() < 0.5
        return replace(decision, place="paged" if paged else "device", write_back=update)
    if place == "host":
        return replace(decision, grad_zero_copy=tensor.zero_copy is not None and rng.uniform() < 0.5)
    return decision
