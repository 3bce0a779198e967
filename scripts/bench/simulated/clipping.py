"""What clipping by norm costs, as simulated: three ways, on models and machines of the recipes. Prints JSON.

    python -m scripts.bench.simulated.clipping [--only NAME] [--time-limit 8] [--windows 1,2,4]

Seconds per update of

    free          no clipping: every update runs as soon as its gradient is there
    delayed       updates wait for the norm (``Plan.delayed``): what lt_offload does
    speculative   for one micro-batch: updates of the host run at once, with old weights and states copied aside, and
                  those of the device wait; where the norm says that gradients are clipped, old values are copied back
                  and the host updates again. By the share of iterations in which that happens: 0, 0.5, 1
    everything    the same with updates of the device run at once, too, at no cost: less than any such way could take
                  where nothing is ever clipped

The last two do not exist outside this program. Speculative plans are delayed ones: the host's part of an update, with
the copy, is where sums are otherwise made, and the settling pass has nothing left to do for the host, or the copy back
and a second update. Candidates are the delayed plan itself, and two that were made for updates of that length; the best
counts for each share. Copies cost what they move, beside an update that does the same. RAM for old values comes on top
of what the plans take; it is printed beside the machine's, and is not held against it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from unittest.mock import patch

from lt_offload import InfeasibleError, profile_config, solve
from lt_offload.plan.assembly.window import windowed, with_sums
from lt_offload.plan.iteration.durations import durations
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import make_plan
from lt_offload.plan.verify import simulate as simulating
from lt_offload.plan.windows import for_one
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile, TensorProfile

STRIKES = (0.0, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine."""

    name: str
    config: str
    hardware: str
    memory: str
    batch_size: int
    sequence_length: int = 512
    dtype: str = "float32"
    lora: int | None = None


CASES = (
    Case(name="llama2-7b fp32", config="llama2-7b", hardware="rtx-3060-12gb", memory="10GB", batch_size=4),
    Case(name="llama2-7b fp32 short", config="llama2-7b", hardware="rtx-3060-12gb", memory="10GB", batch_size=1),
    Case(name="phi2 fp32", config="phi2", hardware="rtx-3070-8gb", memory="8GB", batch_size=4),
    Case(
        name="llama3-8b bf16",
        config="llama3-8b",
        hardware="rtx-4090",
        memory="20GB",
        batch_size=4,
        sequence_length=1024,
        dtype="bfloat16",
    ),
    Case(
        name="phi3-mini bf16",
        config="phi3-mini",
        hardware="rtx-3060-12gb",
        memory="12GB",
        batch_size=2,
        dtype="bfloat16",
    ),
    Case(name="llama2-7b LoRA", config="llama2-7b", hardware="rtx-3060-12gb", memory="8GB", batch_size=4, lora=8),
)


def copied(tensor: TensorProfile) -> float:
    """Return how much of an update, in bytes of parameters, it is to copy a tensor and its states.

    Both are as fast as memory, as in :func:`lt_offload.plan.iteration.durations.added`: the update reads the gradient,
    and reads and writes the parameter and its states; the copy reads and writes the latter two.
    """
    if not tensor.bytes:
        return 0.0
    states = tensor.state_bytes / tensor.bytes
    return tensor.bytes * 2 * (1 + states) / (3 + 2 * states)


@contextmanager
def speculating(*, strikes: bool) -> Iterator[None]:
    """Let simulations of delayed plans for one micro-batch take their host updates for speculative ones.

    Args:
        strikes: whether they are taken back.
    """

    def seconds(plan: Plan, profile: Profile) -> list[float]:
        found = durations(plan, profile)
        for op in plan.ops:
            if op.lane != "host" or not op.uses_gradients:
                continue
            tensors = [profile.tensors[t] for t in plan.tensors(op)]
            update = sum(tensor.bytes for tensor in tensors) / profile.optimizer.host_bytes_per_s
            copy = sum(map(copied, tensors)) / profile.optimizer.host_bytes_per_s
            if op.kind == "update":
                found[op.id] = update + copy if strikes else 0.0
            else:
                found[op.id] = update + copy
        return found

    with patch.object(simulating, "durations", seconds):
        yield


def speculative(plans: Sequence[Plan], profile: Profile) -> dict[str, float]:
    """Return the seconds of the best of ``plans`` by the share of iterations whose updates are taken back."""
    times = []
    for plan in plans:
        pair = []
        for strikes in (False, True):
            with speculating(strikes=strikes):
                pair.append(simulating.simulate(plan, profile).iteration_time)
        times.append(pair)
    return {f"{share:g}": min(kept * (1 - share) + redone * share for kept, redone in times) for share in STRIKES}


def slower_on_host(profile: Profile, factor: float) -> Profile:
    """Return ``profile`` with host updates that take ``factor`` times as long."""
    optimizer = profile.optimizer
    speeds = {threads: speed / factor for threads, speed in optimizer.host_speeds.items()}
    slow = replace(optimizer, host_bytes_per_s=optimizer.host_bytes_per_s / factor, host_speeds=speeds)
    return replace(profile, optimizer=slow)


def copies(profile: Profile) -> float:
    """Return how long it takes to copy everything that is trained, by the time of its updates."""
    trained = [tensor for tensor in profile.tensors if tensor.trainable]
    return sum(map(copied, trained)) / sum(tensor.bytes for tensor in trained)


def made_for_speculation(profile: Profile, settings: Settings) -> list[Plan]:
    """Return delayed plans that were made for host updates with copies, that are never taken back, or always."""
    found, one = [], for_one(settings)
    for factor in (1 + copies(profile), 2 + 2 * copies(profile)):
        try:
            plan = make_plan(with_sums(slower_on_host(profile, factor), 1), one)
        except InfeasibleError:
            continue
        found.append(windowed(plan, profile, 1, delayed=True))
    return found


def measure(case: Case, windows: Sequence[int], limit: float) -> list[dict[str, object]]:
    """Return a row per number of micro-batches."""
    profile = profile_config(
        case.config,
        batch_size=case.batch_size,
        sequence_length=case.sequence_length,
        dtype=case.dtype,
        hardware=case.hardware,
        lora=None if case.lora is None else {"r": case.lora, "target_modules": "all-linear"},
    )
    rows: list[dict[str, object]] = []
    for window in windows:
        free = solve(profile, memory=case.memory, accumulate=window, time_limit=limit)
        delayed = solve(profile, memory=case.memory, accumulate=window, delayed=True, time_limit=limit)
        row: dict[str, object] = {
            "case": asdict(case),
            "window": window,
            "free_s": free.predicted.iteration_s,
            "delayed_s": delayed.predicted.iteration_s,
            "delayed": delayed.predicted.iteration_s / free.predicted.iteration_s,
            "on_host": _host_share(delayed, profile),
            "host_peak_bytes": delayed.predicted.host_peak_bytes,
        }
        if window == 1:
            settings = Settings(memory=case.memory, time_limit=limit)
            times = speculative([delayed, *made_for_speculation(profile, settings)], profile)
            everything = make_plan(slower_on_host(profile, 1 + copies(profile)), settings).predicted
            trained = sum(tensor.bytes + tensor.state_bytes for tensor in profile.tensors if tensor.trainable)
            row |= {
                "speculative_s": times,
                "gain": {share: 1 - seconds / delayed.predicted.iteration_s for share, seconds in times.items()},
                "everything_s": everything.iteration_s,
                "everything_ram_bytes": everything.host_peak_bytes + trained,
                "ram_bytes": profile.hardware.host_bytes,
            }
        rows.append(row)
    return rows


def _host_share(plan: Plan, profile: Profile) -> float:
    pairs = [(t.bytes, place) for t, place in zip(profile.tensors, plan.update_places, strict=True) if t.trainable]
    return sum(size for size, place in pairs if place == "host") / sum(size for size, _ in pairs)


def main() -> int:
    """Simulate and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--time-limit", type=float, default=8.0, help="seconds per plan")
    parser.add_argument("--windows", default="1,2,4", help="micro-batches per update")
    options = parser.parse_args()
    windows = [int(window) for window in options.windows.split(",")]
    rows = [row for case in CASES if options.only in case.name for row in measure(case, windows, options.time_limit)]
    print(json.dumps({"kind": "bench-clipping-simulated", "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
