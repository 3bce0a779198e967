"""How long a checkpoint keeps training waiting: written now, and while training goes on.

    python -m scripts.bench.checkpoints [--rounds N] [--steps N]

One run of the small model of ``scripts.bench.emulated`` in half of the memory that it would take. In every round, in
turn: some steps without a save, a save for which training waits and as many steps, a save beside which training goes
on and as many steps. What both kinds wait for first, that updates and copies reach the host, is the *flush* and counts
for itself. Beyond it a save keeps training waiting for the *call*, and for what the steps after it take longer than
those without. Compute, updates and the writer share the processor's cores here, so that writing costs time wherever it
happens; beside a GPU it does not. The goal is that of the call and the next steps together: 0.05 of a step.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from scripts.bench.emulated import _batch, _module
from scripts.common import arguments, in_child, save, serve_child

GOAL = 0.05
WARM_UP = 12
"""Steps until the plan follows no more."""
SHAPE = [4, 128]
KINDS = ("none", "now", "later")


def run(rounds: int, steps: int, memory: int, folder: str) -> dict[str, Any]:
    """Train, save, and return what was measured, by kind of save."""
    import torch
    from lightning.pytorch import Callback, Trainer
    from torch.utils.data import DataLoader

    from lt_offload import OffmateStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning_utilities").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    target = Path(folder) / "a.ckpt"

    class Saves(Callback):
        def __init__(self) -> None:
            self.figures: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
            self.begun = 0.0

        def note(self, kind: str, name: str, value: float) -> None:
            self.figures[kind].setdefault(name, []).append(value)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            at = trainer.global_step - WARM_UP
            if at < 0 or at % steps:
                return
            now = time.perf_counter()
            strategy = trainer.strategy
            if at:
                self.note(KINDS[(at // steps - 1) % 3], "step_s", (now - self.begun) / steps)
                strategy._files()[0].wait()
            kind = KINDS[(at // steps) % 3]
            strategy.async_checkpoint = kind == "later"
            began = time.perf_counter()
            strategy._complete()
            flushed = time.perf_counter()
            if kind != "none":
                trainer.save_checkpoint(target)
            self.begun = time.perf_counter()
            self.note(kind, "flush_s", flushed - began)
            self.note(kind, "call_s", self.begun - flushed)

    saves = Saves()
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=OffmateStrategy(memory=memory),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saves],
    )
    batches = [_batch(SHAPE, seed) for seed in range(WARM_UP + 3 * steps * rounds)]
    trainer.fit(_module("small", folder), DataLoader(batches, batch_size=None))
    return {"kinds": saves.figures, "bytes": target.stat().st_size}


def figures(found: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the medians over all rounds, and what a save costs of a step."""
    kinds = found["kinds"]
    step = statistics.median(kinds["none"]["step_s"])
    rows = []
    for kind in KINDS[1:]:
        calls = kinds[kind]["call_s"]
        # each with the steps of its own round
        slower = [steps * (s - n) for s, n in zip(kinds[kind]["step_s"], kinds["none"]["step_s"], strict=False)]
        rows.append(
            {
                "name": kind,
                "flush_s": statistics.median(kinds[kind]["flush_s"]),
                "call_s": statistics.median(calls),
                "next_steps_s": statistics.median(slower),
                "call_of_a_step": statistics.median(calls) / step,
                "of_a_step": statistics.median(c + s for c, s in zip(calls, slower, strict=False)) / step,
                "goal": GOAL if kind == "later" else None,
            }
        )
    spread = kinds["none"]["step_s"]
    return {"step_s": step, "step_worst_s": max(spread), "bytes": found["bytes"], "cases": rows}


def main() -> int:
    """Measure, print and save."""
    from lt_offload.units import format_bytes, format_seconds

    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="after each save")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        memory = in_child("scripts.bench.emulated", "half", model="small", shape=SHAPE, folder=folder)
        given = {"rounds": options.rounds, "steps": options.steps, "memory": memory}
        found = figures(in_child("scripts.bench.checkpoints", "run", **given, folder=folder), options.steps)
    print(f"{format_bytes(found['bytes'])}; a step without a save: {format_seconds(found['step_s'])}")
    for case in found["cases"]:
        print(
            f"{case['name']:6s} flush {format_seconds(case['flush_s'])}, call {format_seconds(case['call_s'])} "
            f"({case['call_of_a_step']:.2f} of a step), with the next steps {case['of_a_step']:+.2f} of a step"
            + (f"; goal {case['goal']:.2f}" if case["goal"] else "")
        )
    print(save("bench-checkpoints", "bench-checkpoints", given, found, options.results))
    return 0


if __name__ == "__main__":
    serve_child(run)
    raise SystemExit(main())
