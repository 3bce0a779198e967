"""What several cards of one machine buy, simulated: plans for one of them while the others do the same.

    python -m scripts.cards MACHINE [--output results]

A model is planned for 1 to 8 cards with as many tokens per update in all, each time with the size of micro-batches that
is fastest. Both ways to keep weights in host memory are planned: a copy for each process, and one copy for all. A plan
that was found for one way is simulated for the other, too, as the search ends by the clock.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_offload import InfeasibleError, Plan, Profile, profile_config
from lt_offload.errors import ConfigError
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.several import gain, one_of
from lt_offload.plan.windows import priced
from scripts.common import RESULTS, save

CARDS = (1, 2, 4, 8)
TOKENS = 1 << 16
"""Per update, of all cards."""
LENGTH = 2048
MICRO = (4, 8)
"""Samples of a micro-batch."""


def best(
    profiles: Sequence[Profile], cards: int, *, one_host_copy: bool, seconds: float, known: Sequence[Plan] = ()
) -> tuple[Plan, Profile] | None:
    """Return the fastest plan, and what it was made for; None if none fits. ``known`` are others for so many cards."""
    found: list[tuple[float, Plan, Profile]] = []
    for whole in profiles:
        profile = one_of(whole, cards, one_host_copy=one_host_copy)
        window = TOKENS // (cards * whole.batch_size * whole.sequence_length)
        if window < 1:
            continue
        try:
            plan = make_plan(profile, Settings(accumulate=window, delayed=cards > 1, time_limit=seconds))
        except (InfeasibleError, ConfigError):
            continue
        found.append((plan.predicted.iteration_s, plan, profile))
        for other in known:
            if other.batch_size == profile.batch_size:
                again = priced(replace(other, host_budget_bytes=profile.hardware.host_bytes), profile)
                found.append((again.predicted.iteration_s, again, profile))
    return min(found, key=lambda item: item[0])[1:] if found else None


def table(machine: str, model: str, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of a machine."""
    profiles = [
        profile_config(model, batch_size=size, sequence_length=LENGTH, dtype="bfloat16", hardware=machine)
        for size in MICRO
    ]
    rows: list[dict[str, Any]] = []
    alone: Plan | None = None
    for cards in CARDS:
        known: list[Plan] = []
        for shared in (False, True)[: 1 + (cards > 1)]:
            chosen = best(profiles, cards, one_host_copy=shared, seconds=seconds, known=known)
            known += [] if chosen is None else [chosen[0]]
            row: dict[str, Any] = {"machine": machine, "cards": cards, "one_host_copy": shared}
            if chosen is not None:
                plan, profile = chosen
                alone = alone or plan
                bought = gain(plan, profile, alone)
                row |= {
                    "iteration_s": bought.iteration_s,
                    "tokens_per_s": bought.tokens_per_s,
                    "times_one": bought.times_one,
                    "busy_s": bought.busy_s,
                    "limit": bought.limit,
                    "micro_batch": plan.batch_size,
                    "window": plan.accumulate,
                    "gap": plan.predicted.gap,
                }
            print(row, flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Plan all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", help="as of plan --hardware; with RAM for as many copies as there are cards")
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of each plan")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = table(args.machine, args.model, args.seconds)
    settings = {
        "machine": args.machine,
        "seconds": args.seconds,
        "model": args.model,
        "tokens": TOKENS,
        "length": LENGTH,
        "micro_batches": MICRO,
    }
    print(save(f"bench-cards-{args.machine.partition(',')[0]}", "bench-cards", settings, {"rows": rows}, args.output))


if __name__ == "__main__":
    main()
