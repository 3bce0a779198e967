"""Laws of the planner, on a grid of small models and machines: more of something is never slower.

python -m scripts.bench.laws [--cases 16] [--seed 0] [--processes 1]

Each case is a random model of a few layers on a shipped machine, planned from estimates, no time limit. In turn it has
more device memory, more RAM, a faster link and a faster card; and budgets beyond what its plan uses, which have to
change nothing: not its time, not one of its ops. A case has 18 points. The worst and the mean violation of each law are
printed and saved, with how far plans are from their bounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import lt_offload
from lt_offload.plan.iteration.durations import with_faster_link
from lt_offload.schema.profile import Contention, Profile
from lt_offload.units import format_bytes
from scripts.common import arguments, save
from scripts.planning import NO_LIMIT_S, gap

TOLERANCE = 0.005
"""The part by which a plan with more of something may be slower."""
CARDS = ("rtx-3060-12gb", "rtx-4060ti-16gb", "rtx-4090", "a100-80gb", "h200")
AMPLE = 10**13
"""Bytes that no plan uses."""
BUDGETS = 5
"""Device budgets of a case."""
FACTORS = (1.1, 1.5)
"""Times as fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model on a machine with as much memory as anyone asks for."""

    name: str
    profile: Profile
    budgets: tuple[int, ...]
    """Of device memory, in bytes, ascending."""


def case(seed: int) -> Case:
    """Return the case that belongs to ``seed``."""
    from transformers import LlamaConfig

    rng = np.random.default_rng(seed)
    hidden, layers = int(rng.choice([512, 1024, 2048, 3072])), int(rng.integers(6, 13))
    heads, vocabulary = hidden // 128, int(rng.choice([8_000, 32_000, 128_000]))
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=int(rng.choice([2, 3, 4])) * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=vocabulary,
        tie_word_embeddings=bool(rng.random() < 0.2),
    )
    card, dtype = str(rng.choice(CARDS)), str(rng.choice(["bfloat16", "float32"]))
    tokens = int(rng.choice([512, 1024]))
    batch = int(rng.choice([1, 2, 4, 8]))
    profile = lt_offload.profile_config(
        config, dtype=dtype, hardware=card, batch_size=batch, sequence_length=tokens, padding=False
    )
    roomy = replace(profile.hardware, device_bytes=AMPLE, host_bytes=AMPLE, pinnable_bytes=AMPLE)
    profile = replace(profile, hardware=roomy)
    least, most = _least(profile), _solved(profile).predicted.device_peak_bytes
    shares = (np.arange(BUDGETS) + rng.random()) / (BUDGETS + 1)
    budgets = tuple(int(least * 1.02 * (max(most, 1.1 * least) / (least * 1.02)) ** share) for share in shares)
    words = f"{layers} x {hidden}, {vocabulary} words, {dtype}, {batch} x {tokens}, {card}"
    return Case(name=f"{seed}: {words}", profile=profile, budgets=budgets)


def _least(profile: Profile) -> int:
    needed: int | None = None
    try:
        lt_offload.solve(profile, memory=1, solver_time_limit=NO_LIMIT_S)
    except lt_offload.InfeasibleError as error:
        needed = error.needed_bytes
    assert needed is not None
    return needed


def _solved(profile: Profile, memory: int = AMPLE, ram: int = AMPLE) -> lt_offload.Plan:
    return lt_offload.solve(profile, memory=memory, host_memory=ram, solver_time_limit=NO_LIMIT_S)


def with_faster_copies(profile: Profile, factor: float) -> Profile:
    """Return ``profile`` with a link ``factor`` times as fast, which takes as much more of the RAM's bandwidth."""
    shares = profile.contention
    h2d, d2h = (min(1.0, factor * share) for share in (shares.h2d, shares.d2h))
    more = Contention(compute=shares.compute, h2d=h2d, d2h=d2h, host=shares.host)
    return replace(with_faster_link(profile, factor), contention=more)


def with_faster_card(profile: Profile, factor: float) -> Profile:
    """Return ``profile`` with computations and updates on the device ``factor`` times as fast."""
    blocks = tuple(
        replace(
            block,
            options=tuple(
                replace(o, forward_s=o.forward_s / factor, backward_s=o.backward_s / factor) for o in block.options
            ),
        )
        for block in profile.blocks
    )
    updates = profile.optimizer
    rates = {name: factor * getattr(updates, name) for name in ("device_bytes_per_s", "fused_bytes_per_s")}
    return replace(profile, blocks=blocks, optimizer=replace(updates, **rates))


def slower(seconds: Sequence[float]) -> list[float]:
    """Return by which part each of ``seconds``, but the first, is longer than the shortest before it; 0 if it is not.

    Infinity stands for no plan; a plan with less of something is none of these.
    """
    parts = []
    for at, later in enumerate(seconds[1:], 1):
        before = min(seconds[:at])
        parts.append(0.0 if math.isinf(before) else max(0.0, later / before - 1))
    return parts


def judged(number: int) -> dict[str, Any]:
    """Return the violations of each law in a case, as parts of a time, and what it took to find them."""
    began = time.process_time()
    example = case(number)
    plans: list[lt_offload.Plan] = []
    laws: dict[str, list[float]] = {}
    profile, budgets = example.profile, example.budgets
    times: list[float] = []

    def solved(model: Profile, memory: int, ram: int = AMPLE) -> lt_offload.Plan | None:
        started = time.process_time()
        try:
            plans.append(_solved(model, memory, ram))
        except lt_offload.InfeasibleError:
            return None
        finally:
            times.append(time.process_time() - started)
        return plans[-1]

    def seconds(plan: lt_offload.Plan | None) -> float:
        return math.inf if plan is None else plan.predicted.iteration_s

    def change(plan: lt_offload.Plan, others: Iterator[lt_offload.Plan | None]) -> list[float]:
        return [_change(plan, other) for other in others]

    by_memory = [solved(profile, memory) for memory in budgets]
    everything = solved(profile, AMPLE)
    laws["more device memory"] = slower([seconds(plan) for plan in (*by_memory, everything)])
    middle = budgets[BUDGETS // 2]
    base = by_memory[BUDGETS // 2]
    assert base is not None
    assert everything is not None
    used = base.predicted.host_peak_bytes
    less = [solved(profile, middle, int(part * used)) for part in (0.8, 0.9, 0.97)]
    laws["more RAM"] = slower([*map(seconds, less), seconds(base)])
    laws["unused RAM"] = change(base, (solved(profile, middle, int(part * used)) for part in (1, 1.07, 3)))
    used = everything.predicted.device_peak_bytes
    laws["unused device memory"] = change(everything, (solved(profile, int(part * used)) for part in (1, 1.2, 2)))
    for law, faster in (("faster link", with_faster_copies), ("faster card", with_faster_card)):
        laws[law] = slower([seconds(base), *(seconds(solved(faster(profile, factor), middle)) for factor in FACTORS)])
    return {
        "case": example.name,
        "budgets": list(budgets),
        "seconds": [seconds(plan) for plan in (*by_memory, everything)],
        "ram": [seconds(plan) if plan else None for plan in less],
        "laws": laws,
        "gaps": [gap(plan) for plan in plans],
        "planners": [plan.planner for plan in plans],
        "plan_cpu_s": times,
        "cpu_s": time.process_time() - began,
    }


def _change(plan: lt_offload.Plan, other: lt_offload.Plan | None) -> float:
    """Return by which part the time of ``other`` differs from that of ``plan``; a little if only ops do."""
    if other is None:
        return math.inf
    part = abs(other.predicted.iteration_s / plan.predicted.iteration_s - 1)
    return part or (0.0 if other.ops == plan.ops else 1e-9)


def summary(cases: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, per law, the worst and the mean violation, how many there are, and of how many trials."""
    rows: dict[str, dict[str, float]] = {}
    for law in cases[0]["laws"]:
        parts = [part for each in cases for part in each["laws"][law]]
        limit = 0.0 if law.startswith("unused") else TOLERANCE
        rows[law] = _row(parts) | {"violations": sum(part > limit for part in parts)}
    gaps = [gap for each in cases for gap in each["gaps"] if gap is not None]
    rows["gap to the bound"] = _row(gaps) | {"violations": 0}
    return rows


def _row(parts: Sequence[float]) -> dict[str, float]:
    finite = [part for part in parts if not math.isinf(part)]
    return {"worst": max(finite, default=0.0), "mean": sum(finite) / max(len(finite), 1), "of": len(parts)}


def main() -> int:
    """Plan, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next ones follow")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    cases = []
    numbers = range(options.seed, options.seed + options.cases)
    with ProcessPoolExecutor(options.processes) as pool:
        for result in pool.map(judged, numbers):
            cases.append(result)
            worst = {law: max(parts) for law, parts in result["laws"].items()}
            broken = ", ".join(f"{law} {part:.2%}" for law, part in worst.items() if part > 0)
            gaps = [part for part in result["gaps"] if part is not None]
            took = result["plan_cpu_s"]
            print(
                f"{result['case']}: {broken or 'holds'}; gap {max(gaps):.1%}, {sum(took) / len(took):.2f} s a plan, "
                f"from {format_bytes(result['budgets'][0])} on",
                flush=True,
            )
    rows = summary(cases)
    print("| law | worst | mean | violations | trials |\n|---|---:|---:|---:|---:|")
    for law, row in rows.items():
        print(f"| {law} | {row['worst']:.2%} | {row['mean']:.2%} | {row['violations']} | {row['of']} |")
    points = sum(len(each["plan_cpu_s"]) for each in cases)
    cpu = sum(sum(each["plan_cpu_s"]) for each in cases)
    print(f"{points} plans, {cpu / points:.2f} s of the processor each")
    what = {"seed": options.seed, "cases": options.cases}
    print(save("bench-laws", "bench-laws", what, {"laws": rows, "points": points, "cases": cases}, options.results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
