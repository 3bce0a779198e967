"""Lanes that share the host's memory: the simulator against a slow one that follows the definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.verify.lanes import COMPUTE, D2H, H2D, HOST, READ, WRITE, rates
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Contention, Profile
from tests.support.profiles.by_hand import built
from tests.support.profiles.random_decisions import random_decisions
from tests.support.profiles.small import chained, small_profile, with_zero_copy
from tests.unit.verify.slow_simulation import iteration_s


def streamed(profile: Profile) -> Plan:
    options = ("offload",) * len(profile.blocks)
    return built(streaming_decisions(profile, options, host_update=True), profile, lead=1, lag=1)


def mask(*lanes: int) -> int:
    return sum(1 << lane for lane in lanes)


def test_who_asks_for_little_gets_it_and_the_others_share_the_rest() -> None:
    shared = Contention(h2d=0.25, d2h=0.2, host=0.9)
    assert rates(shared, mask(COMPUTE, H2D, HOST)) == (1, 1, 0, pytest.approx(0.75 / 0.9), 0, 0, 0)
    assert rates(shared, mask(H2D, D2H, HOST)) == (0, 1, 1, pytest.approx(0.55 / 0.9), 0, 0, 0)
    both = Contention(compute=0.5, h2d=0.9, host=0.9)
    third = pytest.approx(1 / 3 / 0.9)
    assert rates(both, mask(COMPUTE, H2D, HOST)) == (pytest.approx(2 / 3), third, 0, third, 0, 0, 0)


def test_what_computations_read_and_write_shares_the_links() -> None:
    assert rates(Contention(), mask(COMPUTE, H2D, D2H, READ, WRITE)) == (1, 0.5, 0.5, 0, 0, 0.5, 0.5)
    assert rates(Contention(h2d=0.8), mask(H2D, READ)) == (0, 0.5, 0, 0, 0, 0.5, 0)


@pytest.mark.parametrize("seed", range(24))
def test_equals_the_slow_simulation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = small_profile(int(rng.integers(2, 6)), launch_s=float(rng.choice([0.0, 3.0])), tied=bool(seed % 3 == 0))
    profile = chained(with_zero_copy(profile))
    shares = [float(rng.choice([0.0, rng.uniform(0.1, 1)])) for _ in range(4)]
    contention = Contention(compute=shares[0], h2d=shares[1], d2h=shares[2], host=shares[3])
    speeds = {name: float(rng.uniform(20, 400)) for name in ("h2d_bytes_per_s", "d2h_bytes_per_s")}
    profile = replace(
        profile,
        contention=contention,
        hardware=replace(profile.hardware, **speeds),
        optimizer=replace(profile.optimizer, host_bytes_per_s=float(rng.uniform(20, 400))),
    )
    plan = built(random_decisions(rng, profile), profile, lead=int(rng.integers(3)), lag=int(rng.integers(3)))
    assert simulate(plan, profile).iteration_time == pytest.approx(iteration_s(plan, profile), rel=1e-9)


def test_a_plan_takes_as_long_as_the_machine_of_the_profile_needs() -> None:
    slow, fast = small_profile(5), small_profile(5, speed=1e6)
    plan = streamed(slow)
    assert simulate(plan, fast).iteration_time == simulate(streamed(fast), fast).iteration_time
    assert simulate(plan, fast).iteration_time < simulate(plan, slow).iteration_time
