"""Lower bounds of the time of an iteration, each solved when a plan is so near to the one before that it matters."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.planners.candidates import Candidates
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.model import LinearProgram
from lt_offload.plan.planners.offmate.program import MakeProgram, lower_bound
from lt_offload.plan.planners.offmate.solution import groups
from lt_offload.plan.planners.request import Request

GOOD_GAP = 0.01
"""No better plan is looked for than one that is within this part of the bound."""
FAR_GAP = 0.035
"""Above it, programs with slower links are solved, too."""
MANY_BLOCKS = 50
"""With more blocks, the program may copy in fewer steps around a use, so that it is solved in time."""
_SHARE = 1 / 3
"""Bounds may take this part of the time limit."""
_ROUNDING = 1e-6
"""Relative rounding error of a program's solution."""


class Bounds:
    """The times that no plan for a request can beat.

    There are three bounds, each costing more than the one before: that of the computations alone; the linear program's
    with copies that overlap with everything that they need not wait for; and the same with copies at any time. Copies
    near the uses of their tensors are enough where each of them is done within the steps that are near, and the program
    is several times as small: 1 of 96 random profiles has another bound then (0.4 %, a host four times as slow). It is
    too high where some tensors are much larger than others (2 % for Gemma-2-2B), or steps are empty (4 %), so that it
    proves nothing there.
    """

    def __init__(
        self, request: Request, config: OffmateConfig, candidates: Candidates, program: MakeProgram = LinearProgram
    ) -> None:
        """``candidates``: are told of bounds that were cut short; ``program``: the program to solve."""
        self._program = program
        self._request, self._config, self._candidates = request, config, candidates
        self._left_s = _SHARE * config.time_limit
        self._solutions: dict[bool, float | None] = {}
        """Seconds that the program needs; key True: with copies at any time."""
        self.infeasible = False
        """True: a program has no solution."""
        self.cut = False
        """True: the last bound is that of the computations alone, because time was up."""
        self.computing_s = sum(
            min(o.forward_s + block.has_backward * o.backward_s for o in options)
            for block, options in zip(request.profile.blocks, request.allowed, strict=True)
        )
        self.copies_are_short = self._copies_are_short()
        """True: the program with copies near uses proves a bound."""

    def are_near(self, seconds: float) -> bool:
        """Return whether a plan that takes ``seconds`` is so good that no better one is worth a search."""
        if seconds <= self.computing_s * (1 + GOOD_GAP):
            return True
        if math.isinf(seconds):
            return False
        near = self.of_program(any_time=False)
        if near is None or seconds > near * (1 + GOOD_GAP):
            return False
        return seconds <= self.below(seconds) * (1 + GOOD_GAP)

    def are_far(self, seconds: float) -> bool:
        """Return whether a plan that takes ``seconds`` is so far away that more programs are worth their time."""
        if seconds <= self.computing_s * (1 + FAR_GAP) or math.isinf(seconds):
            return False
        near = self.of_program(any_time=False)
        return near is not None and seconds > near * (1 + FAR_GAP)

    def below(self, seconds: float) -> float:
        """Return the bound, given that there is a plan that takes ``seconds``."""
        near = self.of_program(any_time=False) if self.copies_are_short else None
        # A plan that beats it has shown that copies near their uses were too strict a model.
        if near is not None and seconds >= near * (1 - _ROUNDING):
            return near
        bound = self.of_program(any_time=True)
        self.cut = bound is None and not self.infeasible and seconds > self.computing_s * (1 + GOOD_GAP)
        return self.computing_s if bound is None else bound

    def of_program(self, *, any_time: bool) -> float | None:
        """Return the seconds that the program needs, None if it has no solution or was not solved in time."""
        if any_time not in self._solutions:
            began = time.monotonic()
            self._solutions[any_time] = self._solved(any_time)
            self._left_s -= time.monotonic() - began
        return self._solutions[any_time]

    def _solved(self, any_time: bool) -> float | None:
        optimistic = replace(
            self._config,
            phi=0.0,
            lag=0,
            lookahead=0,
            optimistic=True,
            reach=2 * len(self._request.profile.blocks) if any_time else self._config.reach,
            update_reach=None if any_time else self._config.reach,
            # Without a share of their own, bounds would take the time in which plans are searched.
            time_limit=min(self._request.deadline - time.monotonic(), self._left_s),
        )
        try:
            if optimistic.time_limit > 0:
                return lower_bound(self._request.profile, optimistic, self._program)
        except InfeasibleError:
            self.infeasible = True
            return None
        except ConfigError:  # the time is over
            pass
        self._candidates.cut.append("the lower bound, which is that of the computations alone")
        return None

    def _copies_are_short(self) -> bool:
        """Return whether the copies of each group take half of the computations that are near its uses, at most.

        Blocks without a backward leave steps without computations.
        """
        profile = self._request.profile
        if not any(tensor.trainable for tensor in profile.tensors):
            return False
        if len(profile.blocks) > MANY_BLOCKS:
            return True  # to count all copies takes longer than to plan
        hardware, near_s = profile.hardware, self._config.reach * self.computing_s / (2 * len(profile.blocks))
        link = min(hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s)
        filled = all(block.has_backward for block in profile.blocks)
        return filled and all(group.bytes + group.state_bytes <= link * near_s / 2 for group in groups(profile))
