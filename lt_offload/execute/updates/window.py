"""The micro-batches of one update, each of one pass or several: which comes next, and what has been added up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lt_offload.errors import PlanError
from lt_offload.schema.plan import Pass


@dataclass(frozen=True, kw_only=True, slots=True)
class CarriedWindow:
    """Results of the micro-batches of a window so far, on the host."""

    added: int
    """Number of these micro-batches."""
    cleared: bool
    """The gradients of the last backward have been cleared."""
    sums: dict[nn.Parameter, Tensor]
    """Sums of the gradients of weights; if there were none, what the last updates have used, where it is kept."""
    rest: dict[nn.Parameter, Tensor]
    """Gradients of parameters outside the blocks."""


class Window:
    """Counts the passes of a window.

    ``largest``: micro-batches that the plan was made for; with more than 1 it serves any number. ``delayed``: updates
    wait until all gradients are there: every pass adds up.
    """

    def __init__(self, largest: int = 1, *, adds_up: bool = False, delayed: bool = False) -> None:
        self.delayed = delayed
        self.which: Pass = "beginning" if adds_up else "updating"
        """The use that the present pass, or the next one, makes of its gradients."""
        self.last = True
        """True if the present micro-batch is the last one of its window."""
        self.added = 0
        """Passes of the present window whose gradients have been added up."""
        self.complete = 0
        """Complete micro-batches of the present window; counted in a loop of one's own only."""
        self._largest = self.size = largest
        """Micro-batches that the plan serves, and of the next window in a loop of one's own; elsewhere each is told."""

    def resize(self, size: int) -> None:
        """Let windows have ``size`` micro-batches from now on; raises ``PlanError`` if the plan is one for 1."""
        if size > 1:
            self.require()
        self.size = size

    def require(self) -> None:
        """Raise ``PlanError`` if the plan is one for windows of 1."""
        if self._largest == 1 and not self.delayed:
            raise PlanError(
                "the plan is one for 1 micro-batch per update, which has no room for sums of gradients; plan again "
                "with accumulate=2 or more"
            )

    def begin(self, *, last: bool | None = None) -> None:
        """The next micro-batch begins; ``last``: whether it is the last, None: as many as were said are to come."""
        self.last = self.complete + 1 >= self.size if last is None else last
        self.begin_pass(0)

    def begin_pass(self, waiting: int) -> None:
        """The next pass begins, and so many more of the same micro-batch follow."""
        # After an update the weights are others, so no pass of the same window may follow it.
        adding: Pass = "accumulating" if self.added else "beginning"
        self.which = "updating" if self.last and not self.delayed and not waiting else adding

    def end(self) -> None:
        """The window is over."""
        self.added = self.complete = 0
