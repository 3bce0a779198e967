"""Models of a few tensors, and plans for them in as little memory as they need: to compare bounds with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from lt_offload.plan import Plan, check, simulate
from lt_offload.plan.assembly.just_in_time import Missed
from lt_offload.plan.assembly.plan import build
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import budget_for
from lt_offload.schema.profile import BlockProfile, OptionProfile, Profile, TensorProfile
from scripts.planning import just_in_time
from tests.support.profiles.fixtures import ADAM_3060, GB, RTX_3060, option, tensor

RAM = int(500 * GB)
_ROOMS = (1.0, 1.02, 1.1, 1.3)
"""Device memory over what decisions need at least."""


def tiny_profile(rng: np.random.Generator, blocks: int) -> Profile:
    """Return a model of so many blocks with measured peaks; tensors, speeds and memory differ widely."""
    states = int(rng.integers(0, 3))
    tensors = [
        tensor(f"{block}.{index}", _shape(rng), block, trainable=bool(rng.random() < 0.85), states=states)
        for block in range(blocks)
        for index in range(int(rng.integers(1, 4 if blocks > 2 else 3)))
    ]
    if rng.random() < 0.3:
        tensors.append(tensor("tied", _shape(rng), 0, blocks - 1, states=states))
    tensors[-1] = replace(tensors[-1], trainable=True)
    first = min(found.blocks[0] for found in tensors if found.trainable)
    interface, slow = int(rng.uniform(0, 0.1) * GB), float(rng.uniform(0.3, 3))
    return Profile(
        model="tiny",
        dtype="float32",
        batch_size=1,
        sequence_length=1,
        tensors=tuple(tensors),
        blocks=tuple(
            BlockProfile(
                name=str(block),
                kind="layer",
                input_bytes=interface if block else 0,
                output_bytes=interface if block < blocks - 1 else 0,
                launch_s=0.0,
                options=_options(rng, block, tensors, slow, last=block == blocks - 1),
                has_backward=block >= first,
                chained=block > 0,
            )
            for block in range(blocks)
        ),
        optimizer=replace(
            ADAM_3060,
            scratch_ratio=float(rng.choice([0.0, 1.0])),
            host_bytes_per_s=ADAM_3060.host_bytes_per_s * float(rng.uniform(0.5, 20)),
        ),
        hardware=replace(
            RTX_3060,
            h2d_bytes_per_s=float(rng.uniform(3, 20)) * GB,
            d2h_bytes_per_s=float(rng.uniform(3, 20)) * GB,
            context_bytes=0,
            device_bytes=int(1000 * GB),
        ),
    )


def _shape(rng: np.random.Generator) -> tuple[int, int]:
    return int(np.exp(rng.uniform(np.log(200), np.log(20_000)))), 4096


def _options(
    rng: np.random.Generator, block: int, tensors: list[TensorProfile], slow: float, *, last: bool
) -> tuple[OptionProfile, ...]:
    forward, saved, peak = slow * float(rng.uniform(0.01, 0.1)), float(rng.uniform(0.02, 1)), float(rng.uniform(0, 0.5))
    found = [
        option("keep", forward, 2 * forward, saved, 0, 0.05, peak),
        option("recompute", forward, 3 * forward, 0, 0, 0.1, saved + peak),
        option("offload", forward, 2.1 * forward, 0, saved / 2, saved / 2 + 0.1, saved + peak),
    ]
    if block:
        found.append(option("discard", forward, 2 * forward, 0, 0, 0.1, saved + peak))
    # Forwards that run again have the costs of "keep".
    chosen = [0, *(index for index in range(1, len(found)) if rng.random() < 0.6)]
    gradients = [found.bytes for found in tensors if found.trainable and block in found.blocks]
    beside, measured = float(rng.random()), bool(rng.random() < 0.6)

    def with_peaks(o: OptionProfile) -> OptionProfile:
        """Between that of activations or gradients alone, and that of both."""
        alone = o.backward_peak_bytes
        held, passing = (
            int(max(alone, extra) + beside * min(alone, extra)) for extra in (sum(gradients), max(gradients, default=0))
        )
        return replace(o, held_peak_bytes=held, passing_peak_bytes=min(held, passing))

    options = [with_peaks(found[index]) if measured else found[index] for index in chosen]
    if last and rng.random() < 0.5:
        options = [replace(o, before_loss_bytes=int(o.forward_peak_bytes * rng.random())) for o in options]
    return tuple(replace(o, keeps_input=o.name == "recompute" or bool(rng.integers(2))) for o in options)


def fastest_plans(profile: Profile, decisions: Iterable[Decisions]) -> Iterator[Plan]:
    """Yield plans of ``decisions`` with budgets that they just fit in, each faster than those with smaller ones.

    Seconds are those of the simulation.
    """
    found = []
    for decided, room in itertools.product(decisions, _ROOMS):
        sets = Sets(decided, profile)
        capacity = int(sets.room_needed * room)
        schedule = just_in_time(sets, profile, capacity)
        if isinstance(schedule, Missed):
            continue
        plan = build(
            schedule, profile, planner="every", budget_bytes=budget_for(capacity, profile), host_budget_bytes=RAM
        )
        trace = simulate(plan, profile)
        predicted = replace(plan.predicted, iteration_s=trace.iteration_time, device_peak_bytes=trace.device_peak)
        found.append(replace(plan, predicted=predicted, budget_bytes=trace.device_peak))
    best = np.inf
    for plan in sorted(found, key=lambda plan: (plan.budget_bytes, plan.predicted.iteration_s)):
        if plan.predicted.iteration_s < best:
            best = plan.predicted.iteration_s
            assert check(plan, profile) == []
            yield plan
