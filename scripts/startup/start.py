"""From a recipe's start to the end of its first step, beside the same recipe without the strategy.

    python -m scripts.startup.start [RECIPE] [--rounds 3]

The first step is where model and machine are measured and planned for. Processes take turns, and the shortest of each
kind counts; the goal is 1.8 times the time without.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.common import arguments, in_child, save, serve_child

PROGRAM = "scripts.startup.start"
GOAL = 1.8
PLAIN = ["--trainer.strategy", "auto"]


def started(settings: list[str]) -> dict[str, Any]:
    """Run ``lt-finetune`` with ``settings``; return the seconds until the first step ends, and what comes before."""
    begun = time.perf_counter()
    from lt_offload.cli.main import main

    code = main(settings)
    if code:
        raise SystemExit(f"{settings[0]} ended with exit code {code}")
    from scripts.startup.marks import MARKS

    return {name: mark - begun for name, mark in MARKS.items()}


def main() -> None:
    """Measure in turns and write the result."""
    serve_child(started)
    parser = arguments(__doc__)
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("--rounds", type=int, default=3)
    options, others = parser.parse_known_args()
    plain: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        flags = [
            *("--trainer.max_steps", "1"),
            *("--trainer.limit_val_batches", "0"),
            *("--trainer.num_sanity_val_steps", "0"),
            *("--trainer.enable_checkpointing", "false"),
            *("--trainer.callbacks", "null"),
            *("--trainer.callbacks", '[{"class_path": "scripts.startup.marks.Marks"}]'),
            *("--data.sample_prompt", "null"),
        ]
        for number in range(options.rounds):
            for name, kind, strategy in (("plain", plain, PLAIN), ("planned", runs, [])):
                folder = str(Path(scratch) / f"{name}-{number}")
                settings = [options.recipe, *flags, "--trainer.default_root_dir", folder, *others, *strategy]
                kind.append(in_child(PROGRAM, "started", settings=settings))
    base, first = (min(one["after_first_step_s"] for one in kind) for kind in (plain, runs))
    figures = {
        "plain": plain,
        "runs": runs,
        "plain_s": base,
        "first_step_s": first,
        "ratio": first / base,
        "goal": GOAL,
    }
    print(f"the first step ends after {first:.1f} s, {first / base:.2f} times the {base:.1f} s without the strategy")
    settings_of_run = {"recipe": options.recipe, "rounds": options.rounds}
    print(save(f"bench-start-{Path(options.recipe).stem}", "bench-start", settings_of_run, figures, options.results))


if __name__ == "__main__":
    main()
