"""Plans as files, made with a clock that stands still: every search ends by its own criterion."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

from lt_offload.errors import InfeasibleError, UnsupportedError
from lt_offload.schema.plan import Plan, PlannerName
from scripts.recipes.headers import plan_of
from tests.support.profiles.golden_plans import SEEDS, clock_stopped, planned
from tests.unit.plan.test_planner_bounds import PLANNERS

GOLDEN: list[tuple[int, PlannerName]] = [(seed, planner) for seed in SEEDS for planner in PLANNERS]
LONG_S = 1e6
"""The solver of linear programs has a clock of its own, which does not stand still."""


def text(plan: Plan) -> str:
    """Return ``plan`` as its file, byte for byte."""
    with tempfile.TemporaryDirectory() as folder:
        return Path(plan.save(Path(folder) / "plan.json")).read_text(encoding="utf-8")


def golden(seed: int, planner: PlannerName) -> str:
    """Return the plan of golden profile ``seed``, or why there is none."""
    try:
        return text(planned(seed, planner, solver_time_limit=LONG_S))
    except (InfeasibleError, UnsupportedError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"}, indent=1) + "\n"


def recipe(name: str) -> str:
    """Return the plan that ``lt-finetune plan`` saves for a shipped recipe, on the machine that its header names."""
    with clock_stopped(), contextlib.redirect_stdout(io.StringIO()):
        plan = plan_of(name, LONG_S)
    if plan is None:
        raise SystemExit(f"lt-finetune plan {name} failed; its output is above")
    return text(plan)
