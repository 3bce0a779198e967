"""Fine-tunes SmolLM2-135M on whole files, by Lightning's own strategy and by offmate in a small budget.

    python -m scripts.data.quality alpaca=FILE.json toolcalls=FILE.json [--methods full lora] [--keep FOLDER] [...]

Says whether all that a user sees is the same: the losses of every step, the losses on held-out rows, the answers that
both write to the prompts at each validation, and weights and optimizer states at the end, bit by bit. Exits with 1
unless all are equal. Further settings (``--key value``) go to all runs. Each run is a process of its own, the run
of a user: ``lt-finetune``. The two runs of a pair go side by side, with one thread each, if ``--together`` is given.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_offload.report.runs import RunFolder, read_run
from scripts.common import arguments, environment, save
from scripts.compare import largest_difference

RECIPE = "quickstart"
BUDGET = "430MB"
METHODS: Mapping[str, Sequence[str]] = {"full": (), "lora": ("--model.lora.r", "8", "--model.lr", "2e-4")}
PROMPTS = (
    "Give three tips for staying healthy.",
    "What is the capital of France?",
    "Write a short poem about the sea.",
)
POINTS = 60
"""Of a curve in the result file."""


def flags(path: str, folder: Path, others: Sequence[str]) -> list[str]:
    """Return the settings of both runs."""
    prompts = "[" + ", ".join(f'"{prompt}"' for prompt in PROMPTS) + "]"
    return [
        *("--data.path", path),
        *("--data.columns", "null"),
        *("--data.format", "auto"),
        *("--data.max_length", "512"),
        *("--data.batch_size", "1"),
        *("--data.sample_prompt", prompts),
        *("--trainer.max_epochs", "1"),
        *("--trainer.max_steps", "-1"),
        *("--trainer.check_val_every_n_epoch", "1"),
        *("--trainer.val_check_interval", "0.25"),
        *("--trainer.limit_val_batches", "1.0"),
        *("--trainer.default_root_dir", str(folder)),
        *others,
    ]


def train(runs: Sequence[Sequence[str]], *, together: bool) -> None:
    """Run ``lt-finetune`` with each of the lists of settings, at once if ``together``."""
    command = [sys.executable, "-m", "lt_offload.cli.main", RECIPE]
    variables = environment() | ({"OMP_NUM_THREADS": "1"} if together else {})
    running: list[subprocess.Popen[bytes]] = []
    for settings in runs:
        running.append(subprocess.Popen([*command, *settings], stdout=sys.stderr, env=variables))
        if not together:
            running[-1].wait()
    if any(process.wait() for process in running):
        raise SystemExit("a run failed; its output is above")


def compared(stock: Path, offmate: Path) -> dict[str, Any]:
    """Return what is equal in two run folders, and the figures of both."""
    import torch

    runs = {"stock": read_run(stock), "offmate": read_run(offmate)}
    left, right = (torch.load(checkpoint(folder), map_location="cpu", mmap=True) for folder in (stock, offmate))
    losses = {name: {key: list(run.curve(key)) for key in ("train_loss", "val_loss")} for name, run in runs.items()}
    answers = {name: [(s.step, s.prompt, s.text) for s in run.samples] for name, run in runs.items()}
    return {
        "equal": {
            "training losses": losses["stock"]["train_loss"] == losses["offmate"]["train_loss"],
            "held-out losses": losses["stock"]["val_loss"] == losses["offmate"]["val_loss"],
            "answers": bool(answers["stock"]) and answers["stock"] == answers["offmate"],
            "weights": largest_difference(left["state_dict"], right["state_dict"]) == 0,
            "optimizer states": largest_difference(left["optimizer_states"], right["optimizer_states"]) == 0,
        },
        **{name: figures(run) for name, run in runs.items()},
    }


def figures(run: RunFolder) -> dict[str, Any]:
    """Return curves, answers and costs of a run."""
    losses = list(run.curve("train_loss"))
    every = max(1, len(losses) // POINTS)
    chunks = [losses[at : at + every] for at in range(0, len(losses), every)]
    before = [(0, part.loss_before) for part in run.parts[:1] if part.loss_before is not None]
    held_out = [point for point in run.curve("val_loss") if point[0] > 0]
    last = max((sample.step for sample in run.samples), default=0)
    return {
        "steps": len(losses),
        "train_loss": [(chunk[-1][0], sum(loss for _, loss in chunk) / len(chunk)) for chunk in chunks],
        "val_loss": [*before, *held_out],
        "answers_before": {sample.prompt: sample.text for sample in run.samples if sample.step == 0},
        "answers": {sample.prompt: sample.text for sample in run.samples if sample.step == last},
        "step_s": run.median("wall_step_s"),
        "device_peak_bytes": run.largest("device_peak_bytes"),
        "process_peak_bytes": run.largest("process_peak_bytes"),
    }


def checkpoint(folder: Path) -> Path:
    """Return the last checkpoint of the end of an epoch."""
    return max((folder / "checkpoints").glob("step*.ckpt"), key=lambda path: path.stat().st_mtime)


def show(title: str, result: dict[str, Any]) -> None:
    """Print what came out of one pair of runs."""
    run = result["offmate"]
    held_out = " -> ".join(f"{loss:.4f}" for _, loss in (run["val_loss"][0], run["val_loss"][-1]))
    print(f"{title}: {run['steps']} steps, held-out loss {held_out}")
    for what, same in result["equal"].items():
        print(f"  {what}: {'equal' if same else 'NOT EQUAL'}")


def named(parser: argparse.ArgumentParser, data: Sequence[str]) -> dict[str, str]:
    """Return the files by the names that ``NAME=FILE`` gives them."""
    found = {}
    for one in data:
        name, _, path = one.partition("=")
        if not name or not Path(path).is_file():
            parser.error(f"{one}: give NAME=FILE with a file that is there")
        found[name] = path
    return found


def main() -> int:
    """Train, compare, print and save; return the exit code."""
    parser = arguments(__doc__)
    parser.add_argument("data", nargs="+", metavar="NAME=FILE", help="what to train on, and what to call it")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders there")
    parser.add_argument("--together", action="store_true", help="train by both strategies at once, with a thread each")
    options, others = parser.parse_known_args()
    equal = True
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        for name, path in named(parser, options.data).items():
            for method in options.methods:
                stock, offmate = (place / f"{name}-{method}-{strategy}" for strategy in ("stock", "offmate"))
                asked = [*METHODS[method], *others]
                runs = (
                    [*flags(path, stock, asked), "--trainer.strategy", "auto"],
                    [*flags(path, offmate, asked), "--trainer.strategy.memory", BUDGET],
                )
                train(runs, together=options.together)
                result = compared(stock, offmate)
                show(f"{name}, {method}", result)
                what = {"recipe": RECIPE, "data": Path(path).name, "method": method, "memory": BUDGET}
                what |= {"overrides": others, "together": options.together}
                print(save(f"quality-{name}-{method}", "quality", what, result, options.results))
                equal = equal and all(result["equal"].values())
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
