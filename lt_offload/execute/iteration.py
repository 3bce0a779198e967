"""The state of an iteration, which everything that comes to the engine passes through.

A method per thing that comes: ``check_...`` raises where it is refused, the others say what has happened. The engine
keeps no flags of this but asks here: whether a backward has run, whether weights are of two steps
(:attr:`Iteration.halfway`), whether gradients wait in sums. How many micro-batches there were is the window's to count
(``updates/window.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from lt_offload import limits
from lt_offload.errors import ConfigError
from lt_offload.execute.updates.window import Window


class State(Enum):
    """The stages of an iteration since the last update."""

    IDLE = "nothing"
    FORWARD = "a forward with gradients has begun, and its backward has not; or such forwards wait for others"
    BACKWARD = "a backward has begun, whose gradients are used by updates or not in a sum yet"
    ADDED = "gradients of micro-batches have been added up, and nothing else is going on"
    SETTLING = "updates are being carried out whose gradients are all in sums"
    FAILED = (
        "an iteration failed: some weights are updated and some are not, or sums of gradients are lost, until the next "
        "one is complete"
    )


HALFWAY = (
    "the iteration was interrupted when some weights were updated and others were not; resume from the last complete "
    "checkpoint"
)


class Iteration:
    """The stage of an iteration, and the changes from one to the next.

    ``open`` tells whether a backward is still to come, ``waiting`` how many forwards wait for others before theirs.
    """

    window: Window
    open: Callable[[], bool]
    waiting: Callable[[], int]
    enclosed: bool = False
    """True within ``Engine.iteration``, up to its end."""
    manual: bool = False
    """A loop is followed that is not ours: nothing encloses its steps."""

    def __init__(self, window: Window, open: Callable[[], bool], waiting: Callable[[], int]) -> None:
        self.window, self.open, self.waiting = window, open, waiting
        self.state = State.IDLE
        self._left: str | None = None
        """The unfinished part of an iteration that broke off, as :meth:`unfinished` says it."""

    @property
    def ran_backward(self) -> bool:
        """True if a backward has begun whose gradients are in no sum."""
        return self.state is State.BACKWARD

    @property
    def begun(self) -> int:
        """Micro-batches of the present window whose backward has begun."""
        return self.window.added + self.ran_backward

    @property
    def halfway(self) -> bool:
        """True if some weights of this iteration may be updated and others not."""
        updating = self.state is State.BACKWARD and self.window.which == "updating"
        return updating or self.state is State.SETTLING

    def unfinished(self) -> str | None:
        """Return why a checkpoint of now would not be complete, as a clause for people; None if it would be."""
        if self.halfway:
            return HALFWAY
        if self.window.added:
            return f"the gradients of {self.window.added} micro-batches since the last update are in no checkpoint"
        return self._left

    # -- forwards and backwards --------------------------------------------------------------------------------------

    def check_forward(self) -> None:
        """Refuse a forward with gradients between a backward and the step (``ONE_BACKWARD``)."""
        if self.state is State.BACKWARD:
            raise limits.ONE_BACKWARD.error("the model was called a second time after a backward and before the step")
        self._check_not_settling()

    def begin_forward(self) -> None:
        """Begin a forward with gradients: `FORWARD`."""
        self.check_forward()
        self.state = State.FORWARD

    def check_validation(self) -> None:
        """Refuse a forward without gradients between the last forward and its backward (``FORWARDS``)."""
        # Only the last one counts: forwards that wait for it let others pass.
        if self.state in (State.FORWARD, State.BACKWARD) and self.open():
            raise limits.FORWARDS.error("the model was called without gradients between a forward and its backward")
        self._check_not_settling()

    def check_backward(self) -> None:
        """Refuse a backward of a forward given up (``FORWARDS``), and one outside the step (``BACKWARD_OUTSIDE``)."""
        # Only the first block of a backward comes here: for the others the engine finds `ran_backward`.
        if self.state is not State.FORWARD:
            raise limits.FORWARDS.error("a backward ran through a forward that had been given up")
        if not (self.enclosed or self.manual):
            raise limits.BACKWARD_OUTSIDE.error("a backward ran through the model outside the training step")

    def begin_backward(self) -> None:
        """Begin a backward, at the first of its blocks: `BACKWARD`."""
        self.check_backward()
        self.state = State.BACKWARD

    def add(self) -> None:
        """End a backward that adds its gradients to sums: `ADDED`, or `FORWARD` while others wait."""
        assert self.state is State.BACKWARD, self.state
        self.window.added += 1
        self._rest()

    def forget(self) -> None:
        """Give a forward up, as another begins or a step without a backward ends: what is left."""
        assert self.state not in (State.BACKWARD, State.SETTLING), self.state
        self._rest()

    # -- updates -----------------------------------------------------------------------------------------------------

    def check_step(self) -> None:
        """Refuse ``optimizer.step()`` while forwards wait for their backward (``FORWARDS``)."""
        waiting = self.waiting()
        if self.state in (State.FORWARD, State.BACKWARD) and waiting and not self.window.delayed:
            raise limits.FORWARDS.error(f"{waiting} forwards with gradients had no backward before optimizer.step()")
        self._check_not_settling()

    def settle(self) -> None:
        """Begin the updates that wait: `SETTLING`."""
        assert self.state in (State.FORWARD, State.ADDED), self.state
        self.state = State.SETTLING

    def end(self) -> None:
        """End the iteration, as every update is done or queued: `IDLE`."""
        assert self.state in (State.BACKWARD, State.SETTLING), self.state
        self.window.end()
        self._left = None
        self.state = State.IDLE

    def clear(self) -> None:
        """Clear sums (`zero_grad()`): what is left."""
        self.window.end()
        if self.state is State.ADDED:
            self._rest()

    def fail(self) -> None:
        """Break the step off (`abort`): `FAILED`, or `IDLE` if nothing is lost."""
        # Asked before the window forgets what it has added.
        self._left = self.unfinished()
        self.window.end()
        self.state = State.IDLE if self._left is None else State.FAILED

    # -- what others do between --------------------------------------------------------------------------------------

    def check_read(self, use: str) -> None:
        """Refuse to read weights or states while they are updated (``HALFWAY``)."""
        if self.halfway:
            raise limits.HALFWAY.error(use)

    def check_write(self, use: str) -> None:
        """Refuse to write weights or states from a forward to its update (``DURING_FORWARD``)."""
        # A backward computes with the weights of its forward again, and updates within it have changed some of them
        # only.
        to_come = self.state in (State.FORWARD, State.BACKWARD) and self._to_come
        if to_come or self.halfway:
            raise limits.DURING_FORWARD.error(use)

    @property
    def under_way(self) -> bool:
        """True if a forward's backward, or updates, may be to come: no other engine may go on."""
        return self.state in (State.BACKWARD, State.SETTLING) or (self.state is State.FORWARD and self._to_come)

    def check_leave(self, use: str) -> None:
        """Refuse that another engine goes on, from a forward to its update (``FORWARDS``, ``HALFWAY``)."""
        if self.under_way:
            forward = self.state is State.FORWARD
            raise (
                limits.FORWARDS.error(f"{use} between a forward and its backward")
                if forward
                else (limits.HALFWAY.error(use))
            )

    def carry(self) -> None:
        """Take a window over from another engine: `ADDED` if it has sums."""
        assert self.state is State.IDLE, self.state
        self._rest()

    def resize(self, size: int) -> None:
        """Let windows have ``size`` micro-batches from now on; refused within one.

        Raises ``ConfigError`` if ``size`` is not a number of micro-batches, or in the middle of a window, and
        ``PlanError`` if the plan is one for windows of 1.
        """
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"accumulate={size!r} must be at least 1: micro-batches per optimizer.step()")
        if self.begun:
            raise ConfigError(
                f"accumulate={size} was set after {self.begun} of {self.window.size} micro-batches; set it before the "
                "first one, or after optimizer.step()"
            )
        self.window.resize(size)

    @property
    def _to_come(self) -> bool:
        return self.open() or self.waiting() > 0

    def _check_not_settling(self) -> None:
        # Settling ends before anybody else is called, so whoever finds the machine there comes after an error.
        if self.state is State.SETTLING:
            raise limits.HALFWAY.error("updates broke off, and the model was called")

    def _rest(self) -> None:
        """Go on to what is left: forwards that wait, sums, or an iteration that failed."""
        if self.waiting():
            self.state = State.FORWARD
        elif self.window.added:
            self.state = State.ADDED
        else:
            self.state = State.IDLE if self._left is None else State.FAILED
