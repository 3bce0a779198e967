"""Planning again while a run trains: the first iterations correct the profile, and a better plan takes over.

After a few iterations the measured ones are compared with the plan's own simulation. Where they differ, the measured
durations go into the profile, and the time that is predicted is right from then on. If a plan for that profile is
faster, it takes over between two iterations. Only times change: sizes, budgets and the batch size stay.

Weights that are frozen or unfrozen, and other parameters in the optimizer, change more: the model is measured again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.execute.engine import Engine
from lt_offload.model.parts import extent
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.correct import TOLERANCE, Comparison, compare, correct, timed
from lt_offload.plan.windows import has_windows
from lt_offload.schema.explain import BINDS
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from lt_offload.units import format_seconds, round_up

_WARM_UP = 2
"""Iterations of an engine that do not count: optimizer states are made, and memory is touched for the first time."""
_MEASURED = 3
_PLANS = 2
"""Most times that a run is planned again."""
_CORRECTIONS = 5
"""Most times that the profile is corrected; more than ``_PLANS``, so that the last plan's time is right, too."""
_GAIN = 0.02
"""The least part by which a plan must be faster to take over."""
_SHARE = 0.1
"""The part of the rest of the run that planning may take."""
LEAST_S = 1.0
"""The shortest time limit with which planning is tried, in seconds."""

_log = logging.getLogger(__name__)


class Replanning:
    """The correction of a plan by the first iterations of its run; of its budget nothing changes."""

    def __init__(self, settings: Settings, profile: Profile) -> None:
        self.over = False
        """True if nothing will be corrected any more."""
        self.profile = profile
        """The profile, as it is corrected by now."""
        self._settings = settings
        self._skip = _WARM_UP
        self._seen = 0
        self._traces: list[Trace] = []
        self._lengths: list[int] = []
        """The lengths of the batches that were trained on, in tokens."""
        self._corrections = self._plans = 0

    def saw(self, batch: Any) -> None:
        """Take note of a batch that is trained on."""
        self._lengths.append(extent(batch)[1])

    def _sentence(self, seen: Comparison) -> str:
        """Return the difference and its cause: rows that are shorter than planned explain it better than lanes."""
        longest, planned = max(self._lengths, default=0), self.profile.sequence_length
        if self._corrections or not 0 < longest < (1 - TOLERANCE) * planned:
            return seen.sentence
        enough = round_up(longest, 8)
        return (
            f"an iteration takes {format_seconds(seen.measured_s)}, planned were {format_seconds(seen.planned_s)}: "
            f"rows are {longest} tokens long at most, planned were {planned}; if none is longer, plan for {enough} "
            f"(--data.max_length {enough})"
        )

    def due(self, engine: Engine) -> bool:
        """Take the record of the iteration that has ended; return whether there are enough to compare."""
        done = engine.recorder.iterations
        if self.over or done <= max(self._seen, self._skip):
            return False
        self._seen = done
        self._traces.append(engine.trace())
        return len(self._traces) == _MEASURED

    def correct(self, engine: Engine, steps_left: float, done: int) -> tuple[Plan, bool] | None:
        """Compare the recorded iterations with the plan of ``engine``; return a corrected one, None if there is none.

        And whether it is another plan, or the same one with other times. ``engine`` is between two iterations;
        ``done``: iterations so far, with the recorded ones.
        """
        plan, traces = engine.plan, self._traces
        assert plan is not None
        self._traces = []
        comparison = compare(plan, self.profile, traces)
        sentence = self._sentence(comparison)
        if comparison.agrees or self._corrections == _CORRECTIONS:
            self.over = True
            if not comparison.iteration_agrees:
                _log.warning("offmate: %s", sentence)
            return None
        self._corrections += 1
        seen = range(done - len(traces) + 1, done + 1)
        corrected = correct(self.profile, plan, traces)
        self.profile = replace(corrected, iterations=(*corrected.iterations, *seen))
        plan = _kept(plan, timed(plan, self.profile), sentence)
        if self._corrections == 1:  # of those that follow, only what changes the plan is of interest
            rank_zero_info(f"offmate: {sentence}; the profile is corrected")
        better, plan = self._plan_again(engine, plan, steps_left)
        if better is None:
            return plan, False
        # Another engine takes over, which counts its iterations from the beginning.
        self._skip, self._seen = _WARM_UP, 0
        return _kept(plan, better, sentence), True

    def _plan_again(self, engine: Engine, plan: Plan, steps_left: float) -> tuple[Plan | None, Plan]:
        """Return a plan that is worth taking over, if there is one, and ``plan`` with a better lower bound."""
        now = plan.predicted.iteration_s
        limit = min(self._settings.solver_time_limit, _SHARE * steps_left * now)
        enough = limit >= min(LEAST_S, self._settings.solver_time_limit)
        if self._plans == _PLANS or not enough or not engine.handover.may_be_replaced():
            return None, plan
        self._plans += 1
        rank_zero_info(f"offmate: planning again, {limit:.3g} s at most")
        settings = replace(self._settings, memory=plan.budget_bytes, solver_time_limit=limit)
        try:
            other = make_plan(self.profile, settings)
        except (ConfigError, InfeasibleError, UnsupportedError) as error:  # there is a plan: no other was found in time
            rank_zero_info(f"offmate: the plan stays: {error}")
            return None, plan
        # A lower bound cannot be above the time of a plan that exists.
        bound = min(other.predicted.lower_bound_s, now)
        plan = replace(plan, predicted=replace(plan.predicted, lower_bound_s=bound))
        if other.predicted.iteration_s > (1 - _GAIN) * now or not engine.handover.may_run(other):
            return None, plan
        return other, plan


def follow(settings: Settings, profile: Profile) -> Replanning | None:
    """Return the correction for a run that was planned with ``settings``; None for windows, whose plans stay."""
    return None if has_windows(profile, settings) else Replanning(settings, profile)


def _kept(before: Plan, plan: Plan, why: str) -> Plan:
    """Return ``plan`` with curve and advice of ``before`` and a note of the reason ``why`` it was corrected."""
    notes = [note for note in plan.notes if not note.startswith((_NOTE, BINDS))]
    notes += [note for note in before.notes if note.startswith(BINDS)]
    return replace(plan, batch_curve=before.batch_curve, notes=(*notes, f"{_NOTE} {why}"))


_NOTE = "corrected by measurement:"


def steps_left(trainer: Any) -> float:
    """Return the number of iterations to come, infinity if it is unknown."""
    total = trainer.estimated_stepping_batches
    return math.inf if total < 0 else max(0.0, total - trainer.global_step)


@contextmanager
def planning(callbacks: Sequence[Any]) -> Iterator[None]:
    """Tell ``callbacks`` that keep time, or wait for steps to end, that the run is planned within the context."""
    for callback in callbacks:
        getattr(callback, "on_planning_start", lambda: None)()
    try:
        yield
    finally:
        for callback in callbacks:
            getattr(callback, "on_planning_end", lambda: None)()
