"""What it costs that users' code sees complete weights between steps, on the thread that launches.

    python -m scripts.bench.guard [--layers N] [--rounds N] [--results FOLDER]

Every figure is the median of rounds in which the engine and a plain model take turns. Reported, in microseconds: an
operation outside the blocks, an operation on a weight that is complete, entering and leaving a block, what begins and
ends an iteration, stand-ins put in the place of all gradients and dropped again; and the whole iteration with the modes
as a multiple of the same iteration without them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from scripts.bench.launch import tiny_llama
from scripts.common import arguments, save

REPEATS = 2000


def _microseconds(act: Callable[[], Any], repeats: int = REPEATS) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        act()
    return (time.perf_counter() - began) / repeats * 1e6


def measure(layers: int, rounds: int) -> dict[str, Any]:
    """Return the figures."""
    import torch

    import lt_offload
    from lt_offload.execute.device.emulated import EmulatedDevice
    from lt_offload.execute.engine import Engine

    model = tiny_llama(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(256, (2, 32))
    batch = {"input_ids": ids, "labels": ids}
    profile = lt_offload.profile(model, batch, optimizer=optimizer)
    plan = lt_offload.solve(profile, memory="1GB", planner="resident")
    device = EmulatedDevice(plan.budget_bytes)
    engine = Engine(model, optimizer, plan, device)
    engine.install()
    guard, free = engine._guard, torch.zeros(8)
    weight = next(model.parameters())

    def iterate() -> None:
        with engine.iteration():
            model(**batch).loss.backward()
            optimizer.step()

    def seconds(*, guarded: bool) -> float:
        with nullcontext() if guarded else guard.suspended:
            began = time.perf_counter()
            iterate()
            return time.perf_counter() - began

    def suspend() -> None:
        with guard.suspended:
            pass

    def borders() -> None:
        with guard.suspended:
            engine._fixed.check()
            guard.begin()
            guard.end()

    def stand_ins() -> None:
        engine._gradient_view.put_stand_ins()
        engine._gradient_view.drop_stand_ins()

    for _ in range(3):
        iterate()
    engine.drain()
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for _ in range(rounds):
        with guard.suspended:
            note("operation_plain_us", _microseconds(lambda: free + 1))
            note("weight_plain_us", _microseconds(weight.detach))
        note("operation_us", _microseconds(lambda: free + 1))
        note("weight_us", _microseconds(weight.detach))
        note("block_us", _microseconds(suspend))
        note("borders_us", _microseconds(borders, 50))
        note("gradients_us", _microseconds(stand_ins, 50))
        without, guarded = seconds(guarded=False), seconds(guarded=True)
        note("iteration_ms", guarded * 1e3)
        note("iteration_ratio", guarded / without)
    engine.remove()
    device.close()
    figures = {name: statistics.median(values) for name, values in found.items()}
    worst = {f"{name}_worst": max(values) for name, values in found.items()}
    return figures | worst | {"weights": len(profile.tensors), "blocks": len(profile.blocks)}


def main() -> None:
    """Measure and save."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    figures = measure(options.layers, options.rounds)
    for name, value in figures.items():
        print(f"{name:26} {value:10.2f}")
    settings = {"layers": options.layers, "rounds": options.rounds}
    print(save("bench-guard", "guard", settings, figures, Path(options.results)))


if __name__ == "__main__":
    main()
