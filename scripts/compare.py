"""Trains one recipe with Lightning's own strategy and with offmate, and compares every number.

    python -m scripts.compare quickstart --steps 20 [--key value ...]

Prints both trajectories and the largest difference in loss, weights and optimizer state; exits with 1 unless all are 0.
Further settings go to both runs (those of trainer.strategy to offmate's only). Each run is a process of its own.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lt_offload.units import format_bytes, format_seconds
from scripts.common import arguments, read_json, run, save

STRATEGY = "--trainer.strategy"


def train(recipe: str, folder: Path, steps: int, settings: Sequence[str]) -> dict[str, Any]:
    """Train ``recipe`` by the command line, without validation, and return what ``scripts.training`` has recorded.

    Its checkpoint is left in ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recorder = {"class_path": "scripts.training.Recorder", "init_args": {"folder": str(folder)}}
    changed = {
        "max_steps": steps,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": "false",
        "enable_model_summary": "false",
        "default_root_dir": folder,
        "callbacks": "null",  # the recorder alone, not beside the recipe's
    }
    flags = [word for name, value in changed.items() for word in (f"--trainer.{name}", str(value))]
    flags += ["--data.sample_prompt", "null", "--trainer.callbacks", json.dumps([recorder])]
    code = run([sys.executable, "-m", "lt_offload.cli.main", recipe, *flags, *settings])
    if code:
        raise SystemExit(f"the run failed with exit code {code}; its output is above")
    return read_json(folder / "figures.json")


def without_strategy(settings: Sequence[str]) -> list[str]:
    """Return ``settings`` without those of the strategy: ``--key value`` and ``--key=value``."""
    kept: list[str] = []
    skip = False
    for setting in settings:
        if setting.startswith("--"):
            skip = setting.partition("=")[0] == STRATEGY or setting.startswith(STRATEGY + ".")
        if not skip:
            kept.append(setting)
    return kept


def differences(stock: dict[str, Any], offmate: dict[str, Any], folder: Path) -> dict[str, float | None]:
    """Return the largest difference in loss, weights and optimizer state; None where there is no comparing."""
    import torch

    left, right = (
        torch.load(folder / name / "end.ckpt", map_location="cpu", mmap=True, weights_only=False)
        for name in ("stock", "offmate")
    )
    return {
        "loss": largest_difference(stock["losses"], offmate["losses"]),
        "weights": largest_difference(left["state_dict"], right["state_dict"]),
        "optimizer": largest_difference(left["optimizer_states"], right["optimizer_states"]),
    }


def largest_difference(left: Any, right: Any) -> float | None:
    """Return the largest difference of numbers and tensors; None if it is not finite or anything else differs."""
    a, b = dict(_leaves(left)), dict(_leaves(right))
    if a.keys() != b.keys():
        return None
    found = [_difference(value, b[key]) for key, value in a.items()]
    return max((d for d in found if d is not None), default=0.0) if all(d is not None for d in found) else None


def _difference(x: Any, y: Any) -> float | None:
    import torch

    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        if x.shape != y.shape or x.dtype != y.dtype:
            return None
        value = 0.0 if torch.equal(x, y) else float((x.double() - y.double()).abs().max())
    elif isinstance(x, (int, float)) and isinstance(y, (int, float)):
        value = 0.0 if x == y else abs(x - y)
    else:
        value = 0.0 if x == y else math.inf
    return value if math.isfinite(value) else None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _leaves(member, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            yield from _leaves(member, f"{path}.{index}")
    else:
        yield path, value


def show(stock: dict[str, Any], offmate: dict[str, Any], figures: dict[str, Any]) -> None:
    """Print both trajectories and the summary."""
    print(f"{'step':>5}  {'plain':>14}  {'offmate':>14}  difference")
    for step, (x, y) in enumerate(zip(stock["losses"], offmate["losses"], strict=True), start=1):
        print(f"{step:5d}  {x:14.9f}  {y:14.9f}  {y - x:.3g}")
    for name, value in figures["difference"].items():
        print(f"largest difference in {name}: {'not comparable' if value is None else f'{value:g}'}")
    for name, each in (("plain", stock), ("offmate", offmate)):
        peak, rss = format_bytes(each["device_peak_bytes"]), format_bytes(each["rss_peak_bytes"])
        print(f"{name:8s} step {format_seconds(each['step_s'])}, device peak {peak}, process peak {rss}")
    print(f"time ratio {figures['time_ratio']:.3f}")


def main() -> int:
    """Compare, print and save; return the exit code."""
    parser = arguments(__doc__)
    parser.add_argument("recipe", help="a recipe's name or file")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps, at least 3 (default 10)")
    options, settings = parser.parse_known_args()
    if options.steps < 3:
        parser.error("--steps must be at least 3: the first two are not timed")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plain = [*without_strategy(settings), STRATEGY, "auto", "--trainer.devices", "1"]
        stock = train(options.recipe, folder / "stock", options.steps, plain)
        offmate = train(options.recipe, folder / "offmate", options.steps, settings)
        difference = differences(stock, offmate, folder)
    for each in (stock, offmate):
        each["step_s"] = statistics.median(each["steps_s"])
    ratio = offmate["step_s"] / stock["step_s"]
    figures = {"difference": difference, "time_ratio": ratio, "stock": stock, "offmate": offmate}
    show(stock, offmate, figures)
    name = Path(options.recipe).stem
    what = {"recipe": name, "steps": options.steps, "overrides": settings}
    print(save(f"compare-{name}", "compare", what, figures, options.results))
    return 0 if all(value == 0 for value in difference.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
