"""A run folder as a run leaves it behind, made by hand."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_offload.report.runs import RunPart, write_part
from tests.support.samples import make_plan, make_profile, make_trace

PROFILE = make_profile(layers=8, tensors_per_layer=3)
PLAN = make_plan(PROFILE)
COLUMNS = (
    "step", "train_loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "trained_tokens_per_s", "samples_per_s",
    "wall_step_s", "step_s", "device_peak_gb", "host_peak_gb",
)  # fmt: skip
ENDED = RunPart(
    first_step=0,
    last_step=40,
    ended="finished",
    seconds={"start": 9.0, "steps": 74.0, "between": 2.0, "validation": 10.0, "samples": 4.0, "checkpoints": 1.0},
    device_peak_bytes=423_000_000,
    host_peak_bytes=2_290_000_000,
    process_peak_bytes=3_000_000_000,
    tokens=40960,
    trained_tokens=30000,
    loss_before=3.5,
)


def rows(first: int, last: int, *, offset: float = 0.0, planned: bool = True) -> list[dict[str, Any]]:
    """What is logged from step ``first`` on, up to and without ``last``, counted from 0."""
    found: list[dict[str, Any]] = []
    for step in range(first, last):
        row = {
            "step": step,
            "train_loss": 3 / (1 + 0.05 * step) + offset + 0.1 * (step % 3),
            "lr": 1e-4 * (1 - step / 100),
            "tokens_per_s": 550.0 + step,
            "trained_tokens_per_s": 400.0 + step,
            "samples_per_s": 2.0,
            "wall_step_s": 1.9 + 0.01 * (step % 5),
        }
        if planned:
            row |= {"step_s": 1.83, "device_peak_gb": 0.42, "host_peak_gb": 2.29, "grad_norm": 1.0 + 0.3 * (step % 4)}
        found.append(row)
        if step % 10 == 9:
            found.append({"step": step, "val_loss": 3.1 / (1 + 0.04 * step) + offset})
    return found


def write_metrics(path: Path, found: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(found)


def make_run(
    folder: Path, *, planned: bool = True, steps: int = 40, offset: float = 0.0, lr: float = 1e-4, part: RunPart = ENDED
) -> Path:
    """Write a run folder and return it."""
    folder.mkdir(parents=True)
    strategy = "{class_path: lt_offload.OffmateStrategy, init_args: {memory: 440MB, plan: null}}" if planned else "auto"
    (folder / "config.yaml").write_text(
        f"seed_everything: 1\ntrainer:\n  strategy: {strategy}\n  max_steps: {steps}\n"
        "  callbacks: [{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {}}]\n"
        f"model: {{name: smollm2-135m-instruct, lr: {lr}, lora: null}}\ndata: {{path: pydoc_topics}}\n"
    )
    write_metrics(folder / "metrics.csv", rows(0, steps, offset=offset, planned=planned))
    samples = [
        {"step": step, "val_loss": 3.1, "prompt": "def f(x):", "text": f" return <x + {step}>\n" * 3}
        for step in (0, 10, 20, 30, 40)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "ram_bytes": 64 * 10**9}))
    if planned:
        PROFILE.save(folder / "profile.json")
        PLAN.save(folder / "plan.json")
        make_trace(PLAN, source="measured", noise=0.1).save(folder / "trace.json")
    else:
        part = replace(part, device_peak_bytes=None, host_peak_bytes=None)
    write_part(folder, replace(part, last_step=min(part.last_step, steps)))
    return folder
