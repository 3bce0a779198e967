"""Random profiles, and the rules of the OFFMATE program replayed on a solution, written without the program's code."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.model import LinearProgram
from lt_offload.plan.planners.offmate.solution import Group
from lt_offload.schema.profile import BlockProfile, OptionProfile, Profile
from scripts.papers.offmate_program import PaperProgram, SolvedFlows, SolvedProgram
from tests.support.profiles.fixtures import ADAM_3060, GB, RTX_3060, option, tensor

KINDS = ("plain", "tied", "half", "lora", "frozen start")
TOLERANCE = 2e-5


def random_profile(rng: np.random.Generator, model: str) -> Profile:
    """Return a small model of a kind.

    Kinds are ``plain``, ``tied``, ``half`` (frozen tensors everywhere), ``lora`` (small trainable parts)
    or ``frozen start`` (no backward at first).
    """
    layers = int(rng.integers(2, 7))
    head = layers + 1
    first_trained = {"lora": 1, "frozen start": 1 + layers // 2}.get(model, 0)
    states = int(rng.integers(0, 3))
    tensors = []
    for block in range(head + 1):
        for index in range(int(rng.integers(1, 5))):
            shape = (int(rng.integers(1_000, 20_000)), 4096)
            trainable = block >= first_trained and model != "lora" and (model != "half" or index % 2 == 0)
            tensors.append(tensor(f"{block}.{index}", shape, block, trainable=trainable, states=states))
        if model == "lora" and 1 <= block <= layers:
            tensors.append(tensor(f"{block}.adapter", (int(rng.integers(8, 400)), 4096), block, states=states))
    if model == "tied":
        tensors.append(tensor("table", (30_000, 4096), 0, head, states=states))
        tensors.append(tensor("shared", (9_000, 4096), 1, layers, states=states))
    interface = int(rng.uniform(0.01, 0.05) * GB)
    return Profile(
        model=model,
        dtype="float32",
        batch_size=1,
        sequence_length=1,
        tensors=tuple(tensors),
        blocks=tuple(
            BlockProfile(
                name=str(block),
                kind="layer",
                input_bytes=interface if block else 0,
                output_bytes=interface if block < head else 0,
                launch_s=float(rng.uniform(0, 0.05)),
                options=random_options(rng),
                has_backward=block >= first_trained,
            )
            for block in range(head + 1)
        ),
        optimizer=replace(ADAM_3060, scratch_ratio=float(rng.choice([0.0, 1.0]))),
        hardware=replace(
            RTX_3060,
            h2d_bytes_per_s=rng.uniform(3, 20) * GB,
            context_bytes=int(0.1 * GB),
            device_bytes=int(1000 * GB),  # more than any budget that is tried
        ),
        shared_bytes=int(0.05 * GB),
    )


def random_options(rng: np.random.Generator) -> tuple[OptionProfile, ...]:
    forward, saved = float(rng.uniform(0.01, 0.1)), float(rng.uniform(0.1, 1.0))
    keep = option("keep", forward, 2 * forward, saved, 0, 0.1, 0.2)
    recompute = option("recompute", forward, 3 * forward, 0, 0, 0.2, saved + 0.2)
    offload = option("offload", forward, 2.1 * forward, 0, saved / 2, saved / 2 + 0.1, saved + 0.2)
    return (keep, recompute, replace(offload, keeps_input=bool(rng.integers(2))))[: int(rng.integers(1, 4))]


def chosen_options(profile: Profile, solution: SolvedProgram) -> list[OptionProfile]:
    return [block.option(name) for block, name in zip(profile.blocks, solution.options, strict=True)]


def host_bytes(profile: Profile, solution: SolvedProgram, program: type[LinearProgram] = LinearProgram) -> float:
    """All parameters and states (of the paper those that travel), the host's gradients, offloaded activations."""
    total = 0.0
    gradients: dict[int, float] = defaultdict(float)
    for group, flows in zip(solution.groups, solution.flows, strict=True):
        travelling = flows.state_offload.sum() + flows.host_share if program is PaperProgram else 1.0
        total += group.bytes + group.state_bytes * travelling
        gradients[group.last_backward] += group.trainable_bytes * flows.host_share
    total += sum(gradients.values()) if program is PaperProgram else max(gradients.values())
    for block, decision in zip(profile.blocks, chosen_options(profile, solution), strict=True):
        total += decision.offload_bytes if block.has_backward else 0
    return total


def peak_bytes(
    profile: Profile, config: OffmateConfig, solution: SolvedProgram, program: type[LinearProgram] = LinearProgram
) -> float:
    arena, other = device_bytes(profile, config, solution, program)
    return float((arena + other).max() if program is PaperProgram else arena.max() + other.max())


def violations(
    profile: Profile, config: OffmateConfig, solution: SolvedProgram, program: type[LinearProgram] = LinearProgram
) -> list[str]:
    """Return the broken rules, in words."""
    found: list[str] = []
    for group, flows in zip(solution.groups, solution.flows, strict=True):
        found += [f"group {group.blocks}: {text}" for text in broken_weights(profile, group, flows)]
        found += [f"group {group.blocks}: {text}" for text in broken_updates(group, flows)]
        found += [f"group {group.blocks}: {text}" for text in broken_states(group, flows)]
    peak = peak_bytes(profile, config, solution, program)
    if config.budget_bytes is not None and peak > config.budget_bytes * (1 + TOLERANCE):
        found.append(f"device bytes {peak} of {config.budget_bytes}")
    ram = host_bytes(profile, solution, program)
    if config.host_budget_bytes is not None and ram > config.host_budget_bytes * (1 + TOLERANCE):
        found.append(f"host bytes {ram} of {config.host_budget_bytes}")
    launches = sum(block.launch_s * (1 + block.has_backward) for block in profile.blocks)
    if solution.iteration_s < launches * (1 - 1e-6):
        found.append(f"an iteration of {solution.iteration_s} s cannot launch for {launches} s")
    if abs(sum(solution.step_s) - solution.iteration_s) > 1e-9:
        found.append("the steps are not the iteration")
    least = least_step_s(profile, config, solution, program)
    late = np.asarray(solution.step_s) < least - 1e-4 * least.mean()
    found += [f"step {step} takes {solution.step_s[step]} and needs {least[step]}" for step in np.flatnonzero(late)]
    return found


def broken_weights(profile: Profile, group: Group, flows: SolvedFlows) -> list[str]:
    steps, found = 2 * len(profile.blocks), []
    share = group.trainable_bytes / group.bytes
    valid = 1 - share + share * flows.host_share
    for tau in range(steps):
        step = (group.last_backward + tau) % steps
        block = step if step < len(profile.blocks) else steps - 1 - step
        used = block in group.blocks and (step < len(profile.blocks) or profile.blocks[block].has_backward)
        if used and flows.resident[tau] < 1 - TOLERANCE:
            found.append(f"used in step {step}, resident {flows.resident[tau]}")
        if flows.resident[(tau + 1) % steps] > flows.resident[tau] + flows.prefetch[tau] + TOLERANCE:
            found.append(f"appears after step {step}")
        if group.trainable_bytes and flows.resident[tau] + valid < 1 - TOLERANCE:
            found.append(f"gone without a copy in step {step}")
        valid += flows.write_back[tau]
    if valid > 1 + share * flows.host_share + TOLERANCE:
        found.append("written back more than once")
    return found


def broken_updates(group: Group, flows: SolvedFlows) -> list[str]:
    found = []
    first_use = (group.blocks[0] - group.last_backward) % len(flows.resident)
    share = group.trainable_bytes / group.bytes
    arrived = updated = 0.0
    late = first_use < 3  # the update belongs to the step of the forward, which waits for it
    for tau in range(first_use + late):
        stale = share * (flows.host_share - updated)
        if 0 < tau < first_use and flows.resident[tau] + flows.prefetch[tau] > 1 - stale + TOLERANCE:
            found.append(f"stale on the device at tau {tau}")
        updated += flows.host_update[tau]
        if updated > arrived + TOLERANCE:
            found.append(f"updated before the gradient came at tau {tau}")
        arrived += flows.grad_offload[tau]
    if max(abs(updated - flows.host_share), abs(arrived - flows.host_share)) > TOLERANCE:
        found.append(f"host share {flows.host_share}, arrived {arrived}, updated {updated}")
    if abs(flows.host_update.sum() - updated) + abs(flows.grad_offload.sum() - arrived) > TOLERANCE:
        found.append("updated on the host after the first use")
    return found


def broken_states(group: Group, flows: SolvedFlows) -> list[str]:
    if not group.state_bytes:
        return []
    found, steps, here = [], len(flows.resident), 1 - flows.host_share
    copied = 0.0
    if abs(flows.state_resident[0] - here) > TOLERANCE:
        found.append("states are missing in the update")
    for tau in range(steps):
        before_next = flows.state_resident[tau] + flows.state_prefetch[tau]
        if flows.state_resident[(tau + 1) % steps] > before_next + TOLERANCE:
            found.append(f"states appear after tau {tau}")
        if flows.state_resident[tau] + copied < here - TOLERANCE:
            found.append(f"states are gone without a copy at tau {tau}")
        copied += flows.state_offload[tau]
    return found


def device_bytes(
    profile: Profile, config: OffmateConfig, solution: SolvedProgram, program: type[LinearProgram]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weights and states, and everything else, per step."""
    number = len(profile.blocks)
    steps = 2 * number
    arena = np.zeros(steps)
    other = np.full(steps, float(profile.shared_bytes + profile.hardware.context_bytes))
    for group, flows in zip(solution.groups, solution.flows, strict=True):
        weights = group.bytes * (flows.resident + flows.prefetch)
        arena += np.roll(
            weights + group.state_bytes * (flows.state_resident + flows.state_prefetch), group.last_backward
        )
        if group.trainable_bytes:
            other += gradient_bytes(profile, group, flows, program)
    for block, decision in enumerate(chosen_options(profile, solution)):
        cost, backward = profile.blocks[block], steps - 1 - block
        other[block] += cost.input_bytes + cost.output_bytes + decision.forward_peak_bytes
        if cost.has_backward:
            other[backward] += 2 * cost.input_bytes + cost.output_bytes + decision.backward_peak_bytes
            other[block : backward + 1] += decision.saved_bytes
            other[block + 1 : backward] += cost.input_bytes if decision.keeps_input else 0
            gone = min(block + config.lag, backward - 1)
            back = max(backward - config.lookahead, gone + 1)
            other[block + 1 : gone + 1] += decision.offload_bytes
            other[back:backward] += decision.offload_bytes
    return arena, other


def gradient_bytes(
    profile: Profile, group: Group, flows: SolvedFlows, program: type[LinearProgram]
) -> NDArray[np.float64]:
    steps = 2 * len(profile.blocks)
    total = np.zeros(steps)
    largest = max(profile.tensors[index].bytes for index in group.tensors if profile.tensors[index].trainable)
    peak = group.trainable_bytes if program is PaperProgram else largest
    waiting = group.trainable_bytes - peak
    total[group.last_backward] += peak + waiting * flows.host_share
    total[group.last_backward] += peak * profile.optimizer.scratch_ratio * (1 - flows.host_share)
    left = np.cumsum(flows.grad_offload)
    for tau in range(1, steps):
        total[(group.last_backward + tau) % steps] += group.trainable_bytes * max(0, flows.host_share - left[tau - 1])
    if len(group.blocks) > 1:
        uses = sorted(steps - 1 - block for block in group.blocks)
        total[uses[0] : uses[-1] + 1] += group.trainable_bytes
        for use in uses[1:-1]:
            total[use] += peak
    return total


def least_step_s(
    profile: Profile, config: OffmateConfig, solution: SolvedProgram, program: type[LinearProgram]
) -> NDArray[np.float64]:
    """What every step needs; copies of activations that may run in several steps are left out."""
    number = len(profile.blocks)
    steps = 2 * number
    hardware, optimizer = profile.hardware, profile.optimizer
    compute, h2d, d2h, host = (np.zeros(steps) for _ in range(4))
    for block, decision in enumerate(chosen_options(profile, solution)):
        backward = steps - 1 - block
        compute[block] += decision.forward_s
        launch = profile.blocks[block].launch_s if program is PaperProgram else 0.0
        host[block] += launch
        if profile.blocks[block].has_backward:
            compute[backward] += decision.backward_s
            host[backward] += launch
            d2h[block] += decision.offload_bytes / hardware.d2h_bytes_per_s if config.lag == 0 else 0
            h2d[backward] += decision.offload_bytes / hardware.h2d_bytes_per_s if config.lookahead == 0 else 0
    for group, flows in zip(solution.groups, solution.flows, strict=True):
        fetched = group.bytes * flows.prefetch + group.state_bytes * flows.state_prefetch
        left = group.bytes * flows.write_back + group.state_bytes * flows.state_offload
        left = (left + group.trainable_bytes * flows.grad_offload) / hardware.d2h_bytes_per_s
        h2d += np.roll(fetched, group.last_backward) / hardware.h2d_bytes_per_s
        d2h += np.roll(left, group.last_backward)
        host += np.roll(group.trainable_bytes * flows.host_update, group.last_backward) / optimizer.host_bytes_per_s
        on_device = (1 - flows.host_share) * group.trainable_bytes / optimizer.device_bytes_per_s
        compute[group.last_backward] += on_device + config.phi * left[0]
        if group.blocks[0] == (group.last_backward + 1) % steps:  # the forward waits for its update
            moved = flows.host_share * group.trainable_bytes
            h2d[group.blocks[0]] += moved / hardware.h2d_bytes_per_s
            waiting = moved / hardware.h2d_bytes_per_s + moved / optimizer.host_bytes_per_s
            compute[group.blocks[0]] += config.phi * waiting
    return np.max([compute, h2d, d2h, host], axis=0)
