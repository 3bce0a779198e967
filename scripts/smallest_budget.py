"""Finds the smallest device budget in which a recipe plans and runs, and compares it with the planner's own floor.

    python -m scripts.smallest_budget quickstart [--steps N] [--tolerance 0.01] [--key value ...]

The floor is the budget that the planner names when it is given too little; it is honest if the recipe runs in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from lt_offload.schema.profile import Profile
from lt_offload.units import format_bytes
from scripts.common import arguments, read_json, run_recipe, save
from scripts.planning import floor_bytes, model_bytes

MEMORY = "--trainer.strategy.memory"


def peak(recipe: str, folder: Path, steps: int, memory: int | None, settings: Sequence[str]) -> int | None:
    """Train ``recipe`` in ``memory`` bytes (None: all there is) and return the device peak; None if it does not run."""
    size = "null" if memory is None else str(memory)
    where = ("--trainer.strategy.report_dir", str(folder))
    code = run_recipe(recipe, folder, steps, [*settings, MEMORY, size, *where], checkpoint=False)
    found = None if code else int(read_json(folder / "figures.json")["device_peak_bytes"])
    what = f"fails with exit code {code}" if found is None else f"runs, device peak {format_bytes(found)}"
    print(f"{'no limit' if memory is None else format_bytes(memory):>8s}  {what}", flush=True)
    return found


def main() -> int:
    """Bisect, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("recipe", help="a recipe's name or file")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps that a budget must survive (default 2)")
    parser.add_argument("--tolerance", type=float, default=0.01, help="relative, of both budgets (default 0.01)")
    options, settings = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)

        def attempt(memory: int | None) -> int | None:
            return peak(options.recipe, folder, options.steps, memory, settings)

        # The first run, with all the room there is, measures the profile from which the floor is found.
        if attempt(None) is None:
            raise SystemExit(f"{options.recipe} does not run at all; its output is above")
        profile = Profile.load(folder / "profile.json")
        floor = floor_bytes(profile)
        low, high, measured = None, floor, attempt(floor)
        while measured is None:
            low, high = high, round(high * 1.05)
            measured = attempt(high)
        while low is None or high - low > options.tolerance * high:
            middle = round(0.95 * high) if low is None else (low + high) // 2
            found = attempt(middle)
            if found is None:
                low = middle
            else:
                high, measured = middle, found
    figures = {
        "runs_bytes": high,
        "measured_peak_bytes": measured,
        "floor_bytes": floor,
        "model_bytes": model_bytes(profile),
    }
    runs, said, whole = (format_bytes(n) for n in (high, floor, model_bytes(profile)))
    print(f"smallest budget that runs {runs}, the planner's floor {said};")
    print(f"weights, gradients and optimizer states take {whole}, so it is {high / model_bytes(profile):.0%} of that")
    what = {"recipe": Path(options.recipe).stem, "steps": options.steps, "overrides": settings}
    print(save(f"smallest-budget-{what['recipe']}", "smallest-budget", what, figures, options.results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
