"""Tokens per second against tokens per update: Llama-3-8B in 12 GB of an H200, and the update that auto picks.

python -m scripts.docs.updates [--seconds 60]

Everything is simulated, with rates that were measured on that H200: its link and its update of bf16 weights on the host
while it trained, and the bandwidth of its RAM (results/bench-update-h200.json). Computations are those of the card's
description.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import lt_offload
from lt_offload.plan import Choices, Settings, choose_batch, make_plan
from lt_offload.plan.orders import compared
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.explain import BINDS
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from scripts.common import arguments, save
from scripts.planning import Stopwatch, gap

MODEL, CARD, MEMORY, RAM, LENGTH = "llama3-8b", "h200", "12GB", "120GB", 512
RATES: dict[str, Any] = {"h2d_bytes_per_s": 51.6e9, "d2h_bytes_per_s": 49.9e9, "host_memory_bytes_per_s": 145.3e9}
UPDATE, TRAFFIC = 11.17e9, 7
"""Bytes of bf16 weights that the host updates per second, and bytes that each of them reads and writes in its RAM."""
SMALL = 4
"""Samples of the update that was measured on the card: 2,201 tokens per second."""
LARGE = (8, 16, 24, 32)
"""Samples of other updates that are planned."""


@cache
def profile_at(size: int, parts: int = 1) -> Profile:
    """Return the profile of a batch of ``size`` samples."""
    machine = replace(load_hardware(CARD), **RATES)
    profile = lt_offload.profile_config(
        MODEL,
        batch_size=size,
        sequence_length=LENGTH,
        dtype="bfloat16",
        hardware=machine,
        padding=False,
        micro_batches=parts,
    )
    optimizer = replace(profile.optimizer, host_bytes_per_s=UPDATE, host_speeds={}, host_threads=0)
    share = TRAFFIC * UPDATE / machine.host_memory_bytes_per_s
    return replace(profile, optimizer=optimizer, contention=replace(profile.contention, host=share))


def row(plan: Plan, profile: Profile, settings: Settings) -> dict[str, Any]:
    """Return the figures of a plan, and what it says about larger updates."""
    settings = replace(settings, accumulate=plan.accumulate)
    (said,) = (note for note in compared(plan, profile, settings).notes if note.startswith(BINDS))
    return {
        "batch_size": plan.batch_size,
        "micro_batches": plan.parts,
        "accumulate": plan.accumulate,
        "tokens_per_update": plan.batch_size * plan.accumulate * LENGTH,
        "tokens_per_s": plan.tokens_per_s,
        "iteration_s": plan.predicted.iteration_s,
        "no_offload_s": plan.predicted.no_offload_s,
        "gap": gap(plan),
        "said": said,
    }


def main() -> None:
    """Plan single sizes, and let auto choose with plain PyTorch's sums and with parts; write a result file."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each plan")
    options = parser.parse_args()
    settings = Settings(memory=MEMORY, host_memory=RAM, time_limit=options.seconds)
    sizes = [row(make_plan(profile_at(n), settings), profile_at(n), settings) for n in (SMALL, *LARGE)]
    chosen: dict[str, Any] = {}
    for name, choices in (("plain sums", Choices()), ("parts", Choices(parts="auto"))):
        watch = Stopwatch()
        choice = choose_batch(profile_at, settings, choices, on_progress=partial(print, flush=True))
        curve = [
            {
                "batch_size": point.batch_size,
                "micro_batches": point.parts,
                "accumulate": point.accumulate,
                "tokens_per_s": None if point.samples_per_s is None else point.samples_per_s * LENGTH,
                "relaxed_tokens_per_s": point.relaxed_samples_per_s and point.relaxed_samples_per_s * LENGTH,
                "reason": point.reason,
            }
            for point in choice.curve
        ]
        picked = row(choice.plan, choice.profile, settings) | watch.figures()
        chosen[name] = picked | {"why": choice.why, "curve": curve}
    about = {"model": MODEL, "card": CARD, "memory": MEMORY, "host_memory": RAM, "dtype": "bfloat16", "length": LENGTH}
    about |= {"simulated": True, "rates": RATES | {"host_update": UPDATE}, "seconds": options.seconds}
    print(save(f"updates-{MODEL}", "updates", about, {"sizes": sizes, "auto": chosen}, options.results))


if __name__ == "__main__":
    main()
