"""The time of a run by its use: start, steps, validation, samples, checkpoints, and gaps between steps."""

from __future__ import annotations

import time
from array import array
from statistics import median


class RunClock:
    """A clock that divides the time of a run into phases, with a few readings per step.

    The phases are ``start`` (from the settings to the first step), ``steps``, ``between`` (the next batch, logging),
    ``validation``, ``samples`` and ``checkpoints``. Every moment belongs to one of them.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("start", "steps", "between", "validation", "samples", "checkpoints"), 0.0)
        self.steps = array("d")
        """Seconds within each step, of all its micro-batches."""
        self.between = array("d")
        """Seconds before each step since the one before, validation, samples and checkpoints not counted."""
        self.iterations = array("d")
        """Seconds of the engine's iteration within each step, where there is an engine."""
        self.waited = array("d")
        """Seconds of each step, and before it, of waiting for other processes; where there is an engine."""
        self._mark = time.perf_counter()
        self._phase = "start"
        self._step = self._gap = 0.0

    def enter(self, phase: str) -> str:
        """End the present phase, begin ``phase``, and return the one that has ended; ``ended`` counts no more."""
        now = time.perf_counter()
        spent, self._mark = now - self._mark, now
        if self._phase in self.seconds:
            self.seconds[self._phase] += spent
        if self._phase == "steps":
            self._step += spent
        elif self._phase == "between":
            self._gap += spent
        before, self._phase = self._phase, phase
        return before

    def end_step(self) -> None:
        """Note the step that has just ended; micro-batches before the last one of a step are no steps."""
        self.steps.append(self._step)
        self.between.append(self._gap)
        self._step = self._gap = 0.0

    @property
    def training(self) -> float:
        """Seconds so far that count for rates: steps and the gaps between them."""
        running = time.perf_counter() - self._mark if self._phase in ("steps", "between") else 0.0
        return self.seconds["steps"] + self.seconds["between"] + running

    def medians(self) -> dict[str, float]:
        """Return the medians of a step, of its iteration and of the gap between two steps, in seconds."""
        # Before the first step there is no other that it would be between.
        series = {"step_s": self.steps, "between_s": self.between[1:], "iteration_s": self.iterations}
        return {name: median(values) for name, values in series.items() if len(values)}
