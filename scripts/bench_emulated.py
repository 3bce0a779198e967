"""What offloading costs on the emulated device, as ratios against plain Lightning in one run.

    python scripts/bench_emulated.py [--tiny] [--steps N] [--rounds N] [--h2d 6GB] [--d2h 6GB]

Cases, each in a process of its own, round after round:

    plain      Lightning's own strategy, no offloading
    resident   everything stays on the emulated device                  goal: 1.10 of plain
    streamed   every weight travels, every update is the host's,        goal: 1.60 of plain
               nothing is recomputed (thread mode)

The engine's own cost is measured on a model of many tiny blocks: (resident - plain) / (2 * blocks).
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import arguments, in_child, read_json, save, serve_child
from planning import stream_all

GOALS = {"resident": 1.10, "streamed": 1.60}
WARM_UP = 2
TINY_LAYERS = 24


def make_plan(model: str, shape: list[int], folder: str) -> dict[str, Any]:
    """Profile ``model`` and save the plan of the streamed case."""
    import torch

    import lt_offload

    torch.manual_seed(0)
    module = _module(model, folder)
    module.configure_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    profile = lt_offload.profile(module.model, _batch(shape), optimizer=optimizer)
    stream_all(profile).save(Path(folder) / "streamed.json")
    return {"model": profile.model, "blocks": len(profile.blocks)}


def train(model: str, shape: list[int], folder: str, case: str, steps: int, links: dict[str, float]) -> dict[str, Any]:
    """Train for ``steps`` timed steps and return what was recorded."""
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader
    from training import Recorder

    from lt_offload import OffmateStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning_utilities").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    strategies = {
        "plain": lambda: "auto",
        "resident": lambda: OffmateStrategy(planner="resident", host_update=False),
        "streamed": lambda: OffmateStrategy(plan=Path(folder) / "streamed.json"),
    }
    with _throttled(links):
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategies[case](),
            max_steps=WARM_UP + steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Recorder(folder, WARM_UP, checkpoint=False)],
        )
        batches = [_batch(shape, seed) for seed in range(WARM_UP + steps)]
        trainer.fit(_module(model, folder), DataLoader(batches, batch_size=None))
    return read_json(Path(folder) / "figures.json")


def _module(model: str, folder: str) -> Any:
    from lt_offload.finetune.load import SMOLLM2
    from lt_offload.finetune.module import FineTune

    if model != "tiny":
        return FineTune(SMOLLM2, lr=1e-4, schedule="constant")
    path = Path(folder) / "tiny.json"
    if not path.exists():
        config = {
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": TINY_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
        }
        path.write_text(json.dumps(config), encoding="utf-8")
    return FineTune("tiny", architecture=str(path), init="random", lr=1e-4, schedule="constant")


def _batch(shape: list[int], seed: int = 0) -> dict[str, Any]:
    import torch

    ids = torch.randint(256, tuple(shape), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


@contextmanager
def _throttled(links: dict[str, float]) -> Iterator[None]:
    """Let emulated devices that are made within the context have links of the given speed."""
    from lt_offload.execute import emulated

    with patch.object(emulated, "EmulatedDevice", partial(emulated.EmulatedDevice, **links)):
        yield


def measure(model: str, shape: list[int], *, steps: int, rounds: int, links: dict[str, float]) -> dict[str, Any]:
    """Return the cases of ``model``: medians over rounds, in which the cases take turns."""
    with tempfile.TemporaryDirectory() as folder:
        planned = in_child(__file__, "make_plan", model=model, shape=shape, folder=folder)
        times: dict[str, list[float]] = {}
        ran: dict[str, dict[str, Any]] = {}
        for _ in range(rounds):
            for case in ("plain", *GOALS):
                job = {"model": model, "shape": shape, "folder": folder, "case": case, "steps": steps, "links": links}
                ran[case] = in_child(__file__, "train", **job)
                times.setdefault(case, []).append(statistics.median(ran[case]["steps_s"]))
    cases = []
    for case, medians in times.items():
        # The ratio of each round first: what slows the machine for a while then slows both sides.
        ratio = statistics.median(s / p for s, p in zip(medians, times["plain"], strict=True))
        cases.append(
            {
                "name": case,
                "step_s": statistics.median(medians),
                "ratio": ratio,
                "goal": GOALS.get(case) if model != "tiny" else None,
                "device_peak_bytes": ran[case]["device_peak_bytes"],
                "plan": ran[case].get("plan"),
            }
        )
    return {**planned, "cases": cases}


def main() -> int:
    """Measure, print and save."""
    from lt_offload.units import format_bytes, format_seconds, parse_bytes

    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="only the tiny model: a smoke test of this script")
    parser.add_argument("--steps", type=int, default=8, help="timed steps per round (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--h2d", metavar="SIZE", help='throttle host to device to this many bytes per second, "6GB"')
    parser.add_argument("--d2h", metavar="SIZE", help="throttle device to host")
    options = parser.parse_args()
    links = {
        f"{name}_bytes_per_s": float(parse_bytes(value, setting=f"--{name}"))
        for name, value in (("h2d", options.h2d), ("d2h", options.d2h))
        if value
    }
    began = time.monotonic()
    run = partial(measure, steps=options.steps, rounds=options.rounds, links=links)
    tiny = run("tiny", [1, 16])
    shape = [options.batch_size, options.sequence_length]
    shown = tiny if options.tiny else run("smollm2", shape)
    plain, resident = (next(c["step_s"] for c in tiny["cases"] if c["name"] == name) for name in ("plain", "resident"))
    cost = {"blocks": tiny["blocks"], "per_block_step_s": (resident - plain) / (2 * tiny["blocks"])}
    for case in shown["cases"]:
        goal = f"   goal {case['goal']:.2f}" if case["goal"] else ""
        peak = format_bytes(case["device_peak_bytes"])
        print(
            f"{case['name']:10s} {format_seconds(case['step_s']):>9s}   {case['ratio']:.2f} of plain   {peak:>8s}{goal}"
        )
    print(f"engine     {format_seconds(cost['per_block_step_s'])} per block and step")
    settings = {
        "model": shown["model"],
        "batch_size": shape[0] if not options.tiny else 1,
        "sequence_length": shape[1] if not options.tiny else 16,
        "steps": options.steps,
        "rounds": options.rounds,
        "links": links,
    }
    figures = {"cases": shown["cases"], "engine_cost": cost, "seconds": time.monotonic() - began}
    name = "bench-emulated" + ("-tiny" if options.tiny else "") + ("-throttled" if links else "")
    print(save(name, "bench-emulated", settings, figures, options.results))
    return 0


if __name__ == "__main__":
    serve_child(make_plan, train)
    raise SystemExit(main())
