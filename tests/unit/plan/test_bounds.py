"""Lower bounds: never above a plan that is carried out, high enough where memory is short, and found after plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lt_offload.errors import InfeasibleError, UnsupportedError
from lt_offload.plan import simulate, solve
from lt_offload.plan.planners.lp import Method, Outcome, run
from lt_offload.plan.planners.offmate import program
from lt_offload.schema.profile import BlockProfile, Profile
from tests.support.profiles.fixtures import ADAM_3060, GB, RTX_3060, llama7b_b4, option, tensor
from tests.support.profiles.golden_plans import clock_stopped
from tests.support.profiles.program_rules import random_profile
from tests.unit.plan.test_planner_bounds import PLANNERS, bound_s

LAYERS = 8
LEAVES = 1.0
"""GB that each block of :func:`offloading` sends to the host."""
LINK = 5.0
"""GB per second."""


def offloading() -> Profile:
    """Blocks that have to send all they save, which takes the link twice as long as their forward takes."""
    options = (option("offload", 0.1, 0.2, 0, LEAVES, LEAVES, LEAVES),)
    block = BlockProfile(name="layer", kind="layer", input_bytes=0, output_bytes=1, launch_s=0.0, options=options)
    inner = [replace(block, name=f"layer {index}") for index in range(LAYERS)]
    first = replace(block, name="first", options=(option("keep", 0.01, 0.01, 0, 0, 0, 0),))
    last = replace(first, name="last", output_bytes=0)
    return Profile(
        model="offloading",
        dtype="float32",
        batch_size=1,
        sequence_length=1,
        tensors=(tensor("weight", (1000, 1000), 0),),
        blocks=(first, *inner, last),
        optimizer=ADAM_3060,
        hardware=replace(RTX_3060, h2d_bytes_per_s=LINK * GB, d2h_bytes_per_s=LINK * GB, context_bytes=0),
    )


@pytest.mark.parametrize("room", [1, 2, 3])
def test_what_waits_for_the_link_takes_room(room: int) -> None:
    """With room for few blocks' activations, a forward waits until others have left: the link sets the pace."""
    profile = offloading()
    plan = solve(profile, memory=int((room + 1.2) * LEAVES * GB), host_memory=int(64 * GB))
    left = LAYERS - room - 1  # at the start of the last block's forward at the latest, and the same on the way back
    assert plan.predicted.lower_bound_s >= 2 * left * LEAVES / LINK
    assert bound_s(profile, plan) == pytest.approx(plan.predicted.lower_bound_s)
    assert simulate(plan, profile).iteration_time >= plan.predicted.lower_bound_s * (1 - 1e-6)
    # With more memory nothing has to wait.
    plenty = solve(profile, memory=int(9.9 * GB), host_memory=int(64 * GB))
    assert plenty.predicted.lower_bound_s < plan.predicted.lower_bound_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_beats_the_bound_where_activations_have_to_leave(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, ("plain", "tied", "lora")[seed % 3])
    more = 1 + 4 * float(rng.random())

    def larger(block: BlockProfile) -> BlockProfile:
        names = ("saved_bytes", "offload_bytes", "forward_peak_bytes", "backward_peak_bytes")
        options = [replace(o, **{n: int(more * getattr(o, n)) for n in names}) for o in block.options]
        return replace(block, options=tuple(options))

    profile = replace(profile, blocks=tuple(map(larger, profile.blocks)))
    try:
        solve(profile, memory=1)
    except InfeasibleError as error:
        floor = error.needed_bytes
    assert floor is not None
    found = 0
    for planner in PLANNERS:
        try:
            with clock_stopped():
                plan = solve(profile, memory=int(1.1 * floor), planner=planner)
        except (InfeasibleError, UnsupportedError):
            continue
        found += 1
        assert simulate(plan, profile).iteration_time >= bound_s(profile, plan) * (1 - 1e-6), planner
    assert found >= 2


def test_a_plan_comes_before_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    methods: list[Method] = []

    def noted(problem: Any, *, method: Method = "interior", **settings: Any) -> Outcome:
        methods.append(method)
        return run(problem, method=method, **settings)

    monkeypatch.setattr(program, "run", noted)
    solve(llama7b_b4(2), memory="5GB", time_limit=60.0)
    assert methods[0] == "interior"
    assert "simplex" in methods
    methods.clear()
    solve(llama7b_b4(2), memory="5GB", accumulate=2, time_limit=60.0)
    assert methods[0] == "interior"
    assert "simplex" in methods
