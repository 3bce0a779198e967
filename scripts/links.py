"""Two processes with a slow link each beside one with such a link, on the emulated device, in turn in one run.

    python -m scripts.links [--link 50MB] [--steps N] [--rounds N] [--results FOLDER]

The plans are for a part of the memory, so that most weights and all of the gradients for the host travel and an
iteration takes as long as its copies: links are throttled by sleeping, which leaves the processor's cores to whoever
computes. Each process trains batches of its own, and two of them have one host copy of the weights. Tokens per second
are those of both together; the goal is 1.6 times those of one. Besides: how long the bytes of a plan take on its link.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lt_offload
from lt_offload.distributed.ranks import Ranks
from lt_offload.execute.engine import Engine
from lt_offload.plan import solve
from lt_offload.plan.several import one_of
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Contention, Profile
from lt_offload.units import parse_bytes
from scripts.common import arguments, save
from tests.parity.several.training import fork, store_at
from tests.support import models
from tests.support.hostile.device import HostileDevice

GOAL = 1.6
"""Tokens per second of two processes, by those of one."""
MODEL = {"layers": 8, "hidden_size": 512, "intermediate_size": 1376}
"""A Llama of 23 million parameters."""
SHAPE = (2, 32)
"""Samples and tokens of a process's batch."""
MEMORY = "65MB"
WARM_UP = 2


def main() -> None:
    """Measure, and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--link", default="50MB", help="bytes per second, each way")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    args = parser.parse_args()
    link = parse_bytes(args.link, setting="link")
    profile = measured(link)
    plans = {count: planned(profile, count) for count in (1, 2)}
    turns: dict[int, list[float]] = {count: [] for count in plans}
    for _ in range(args.rounds):
        for count, plan in plans.items():
            turns[count] += trained(plan, count, link, args.steps)
    figures = compared(plans, turns, link)
    print(json.dumps(figures, indent=1))
    settings = {"link_bytes_per_s": link, "steps": args.steps, "rounds": args.rounds, "model": MODEL, "shape": SHAPE}
    print(save("bench-links", "bench-links", settings, figures, args.results))


def measured(link: int) -> Profile:
    """Return the profile of the model with links of that speed."""
    model = models.build(**MODEL)  # type: ignore[arg-type]
    batch = models.batch(model, batch_size=SHAPE[0], sequence_length=SHAPE[1], seed=99)
    profile = lt_offload.profile(model, batch, optimizer=_optimizer(model))
    machine = replace(profile.hardware, h2d_bytes_per_s=float(link), d2h_bytes_per_s=float(link))
    # What copies at the speed of RAM take from each other and from computations, they do not while they sleep.
    return replace(profile, hardware=machine, contention=Contention())


def planned(profile: Profile, count: int) -> Plan:
    """Return the plan of one of ``count`` processes."""
    return solve(one_of(profile, count), memory=MEMORY, planner="offmate")


def trained(plan: Plan, count: int, link: int, steps: int) -> list[float]:
    """Return the seconds of every step after the first ones, with so many processes: of the last to end each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fork(count, lambda rank: _train(folder, plan, rank, count, link, steps))
        ends = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    last = [max(of_all) for of_all in zip(*ends, strict=True)]
    return [after - before for before, after in zip(last[WARM_UP - 1 :], last[WARM_UP:], strict=False)]


def _train(folder: Path, plan: Plan, rank: int, count: int, link: int, steps: int) -> None:
    torch.set_num_threads(1)
    ranks = None
    if count > 1:
        store = store_at(folder / "store", rank)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        ranks = Ranks()
    model = models.build(**MODEL)  # type: ignore[arg-type]
    optimizer = _optimizer(model)
    device = HostileDevice(plan.budget_bytes, h2d_bytes_per_s=link, d2h_bytes_per_s=link)
    engine = Engine(model, optimizer, plan, device, others=ranks)
    ends = []
    try:
        engine.install()
        engine.follow(optimizer)
        for step in range(WARM_UP + steps):
            batch = models.batch(model, batch_size=SHAPE[0], sequence_length=SHAPE[1], seed=10 * step + rank)
            (model(**batch).loss / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())  # one clock for all processes of a machine
        engine.drain()
        (folder / f"{rank}.json").write_text(json.dumps(ends))
        if ranks is not None:
            ranks.barrier()
    finally:
        engine.remove()
        device.close()
    gc.collect()
    if ranks is not None:
        ranks.close()


def compared(plans: dict[int, Plan], turns: dict[int, list[float]], link: int) -> dict[str, Any]:
    """Return the figures of one and of two processes, and how many times one two are."""
    rows = []
    for count, plan in plans.items():
        seconds = statistics.median(turns[count])
        moved = {
            lane: sum(op.bytes * times for op, times in zip(plan.ops, plan.counts, strict=True) if op.lane == lane)
            for lane in ("h2d", "d2h")
        }
        rows.append(
            {
                "processes": count,
                "step_s": seconds,
                "shortest_s": min(turns[count]),
                "longest_s": max(turns[count]),
                "tokens_per_s": count * SHAPE[0] * SHAPE[1] / seconds,
                "h2d_s": moved["h2d"] / link,
                "d2h_s": moved["d2h"] / link,
            }
        )
    times = rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    return {"rows": rows, "times_one": times, "goal": GOAL}


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


if __name__ == "__main__":
    main()
