"""The state of an iteration: one state machine, which everything that comes to the engine passes through.

:data:`TABLE` says what each transition leads to in each state: which state follows, or why it is refused. Docs show it
(``docs/architecture.md``, made by ``python -m scripts.tables``), and :class:`Iteration` is ruled by it. The engine
keeps no flags of this but asks the machine: whether a backward has run, whether weights are of two steps
(:attr:`Iteration.halfway`), whether gradients wait in sums. How many micro-batches there were is the window's to count
(``updates/window.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lt_offload import limits
from lt_offload.errors import ConfigError
from lt_offload.execute.updates.window import Window
from lt_offload.schema.plan import Plan


class State(Enum):
    """What has happened since the last update."""

    IDLE = "nothing"
    FORWARD = "a forward with gradients has begun, and its backward has not; or such forwards wait for others"
    BACKWARD = "a backward has begun, whose gradients are used by updates or not in a sum yet"
    ADDED = "gradients of micro-batches have been added up, and nothing else is going on"
    SETTLING = "updates are being carried out whose gradients are all in sums"
    FAILED = "an iteration broke off: weights are of two steps, or sums are gone, until the next one is complete"


class Transition(Enum):
    """What comes to the engine from outside, or what follows from that, in the order of an iteration."""

    FORWARD = "the model is called with gradients"
    VALIDATION = "the model is called without gradients"
    BACKWARD = "a backward comes to the first of its blocks"
    ADD = "a backward has ended that adds its gradients to sums"
    FORGET = "a forward is given up: another begins, or a step without a backward ends"
    CLEAR = "sums are cleared (`zero_grad()`)"
    CARRY = "a window is taken over from another engine"
    STEP = "`optimizer.step()` begins"
    SETTLE = "the updates that wait begin"
    UPDATED = "every update is done or queued"
    READ = "weights or states are read"
    WRITE = "weights or states are written"
    RESIZE = "`accumulate` is set"
    LEAVE = "another engine is to go on (another plan)"
    FAIL = "an error comes out of the step (`abort`)"


class Next(Enum):
    """A state that is not the same for all."""

    SAME = "stays"
    REST = "what is left"
    """Forward while forwards wait, added while there are sums, failed until something complete has followed, idle."""
    BROKEN = "failed, or idle if nothing is lost"


@dataclass(frozen=True, slots=True)
class Condition:
    """When a refusal applies."""

    words: str
    holds: Callable[[Iteration], bool]


@dataclass(frozen=True, slots=True)
class Refused:
    """An error in the user's words."""

    name: str
    """Of the row in ``limits``, or of the error's class."""
    use: str
    """What was done; formatted with what :meth:`Iteration._facts` knows, ``{use}`` is what the caller says."""
    when: Condition | None = None
    """None: always."""

    def error(self, facts: Mapping[str, Any]) -> Exception:
        """Return what is raised."""
        use = self.use.format(**facts)
        return ConfigError(use) if self.name == "ConfigError" else getattr(limits, self.name).error(use)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a transition leads to in one state."""

    then: State | Next | None
    """None: it is always refused, or cannot be."""
    refusals: tuple[Refused, ...] = ()


def _row(default: Outcome | State | Next | None, **others: Outcome | State | Next | None) -> dict[State, Outcome]:
    """Return the cells of a transition: ``default`` in all states but ``others``, by name."""
    cells = {state: others.get(state.name.lower(), default) for state in State}
    return {state: cell if isinstance(cell, Outcome) else Outcome(cell) for state, cell in cells.items()}


def _never(name: str, use: str) -> Outcome:
    return Outcome(None, (Refused(name, use),))


OPEN = Condition("while its backward may come", lambda iteration: iteration.open() or iteration.waiting() > 0)
PASSING = Condition("while its backward may come", lambda iteration: iteration.open())
"""Of the last one: those that wait for it let others pass."""
UPDATING = Condition("if it updates", lambda iteration: iteration.window.which == "updating")
OPEN_OR_UPDATING = Condition(
    "while more of it is to come, or if it updates", lambda i: OPEN.holds(i) or UPDATING.holds(i)
)
OUTSIDE = Condition("outside the step", lambda iteration: not (iteration.enclosed or iteration.manual))
WAITING = Condition("while forwards wait", lambda i: not i.window.delayed and i.waiting() > 0)
BEGUN = Condition("within a window", lambda iteration: iteration.begun > 0)

_FORWARDS_WAIT = Refused(
    "FORWARDS", "{waiting} forwards with gradients had no backward before optimizer.step()", WAITING
)
_BETWEEN = Refused("FORWARDS", "the model was called without gradients between a forward and its backward", PASSING)
_SET = "{use} after {begun} of {size} micro-batches; set it before the first one, or after optimizer.step()"
# Settling ends before anybody else is called, so whoever finds the machine there comes after an error.
_BROKEN_OFF = _never("HALFWAY", "updates broke off, and {use}")

TABLE: dict[Transition, dict[State, Outcome]] = {
    Transition.FORWARD: _row(
        State.FORWARD,
        backward=_never("ONE_BACKWARD", "the model was called a second time after a backward and before the step"),
        settling=_BROKEN_OFF,
    ),
    Transition.VALIDATION: _row(
        Next.SAME,
        forward=Outcome(Next.SAME, (_BETWEEN,)),
        backward=Outcome(Next.SAME, (_BETWEEN,)),
        settling=_BROKEN_OFF,
    ),
    # Only the first block of a backward comes here: for the others the engine finds `ran_backward`.
    Transition.BACKWARD: _row(
        _never("FORWARDS", "a backward ran through a forward that had been given up"),
        forward=Outcome(
            State.BACKWARD,
            (Refused("BACKWARD_OUTSIDE", "a backward ran through the model outside the training step", OUTSIDE),),
        ),
    ),
    Transition.ADD: _row(None, backward=Next.REST),
    Transition.FORGET: _row(Next.REST, backward=None, settling=None),
    Transition.CLEAR: _row(Next.SAME, added=Next.REST),
    Transition.CARRY: _row(None, idle=Next.REST),
    Transition.STEP: _row(
        Next.SAME,
        forward=Outcome(Next.SAME, (_FORWARDS_WAIT,)),
        backward=Outcome(Next.SAME, (_FORWARDS_WAIT,)),
        settling=_BROKEN_OFF,
    ),
    Transition.SETTLE: _row(None, forward=State.SETTLING, added=State.SETTLING),
    Transition.UPDATED: _row(None, backward=State.IDLE, settling=State.IDLE),
    Transition.READ: _row(
        Next.SAME,
        backward=Outcome(Next.SAME, (Refused("HALFWAY", "{use}", UPDATING),)),
        settling=_never("HALFWAY", "{use}"),
    ),
    # A backward computes with the weights of its forward again, and updates within it have changed some of them only.
    Transition.WRITE: _row(
        Next.SAME,
        forward=Outcome(Next.SAME, (Refused("DURING_FORWARD", "{use}", OPEN),)),
        backward=Outcome(Next.SAME, (Refused("DURING_FORWARD", "{use}", OPEN_OR_UPDATING),)),
        settling=_never("DURING_FORWARD", "{use}"),
    ),
    Transition.RESIZE: _row(
        Next.SAME,
        forward=Outcome(Next.SAME, (Refused("ConfigError", _SET, BEGUN),)),
        backward=_never("ConfigError", _SET),
        added=_never("ConfigError", _SET),
        settling=_never("ConfigError", _SET),
    ),
    Transition.LEAVE: _row(
        Next.SAME,
        forward=Outcome(Next.SAME, (Refused("FORWARDS", "{use} between a forward and its backward", OPEN),)),
        backward=_never("HALFWAY", "{use}"),
        settling=_never("HALFWAY", "{use}"),
    ),
    Transition.FAIL: _row(Next.BROKEN),
}

HALFWAY = (
    "the iteration was interrupted when some weights were updated and others were not; resume from the last complete "
    "checkpoint"
)


class Iteration:
    """Where an iteration is.

    Args:
        plan: None without training.
        open: tells whether a backward is still to come.
        waiting: tells how many forwards wait for others before their backward.
    """

    window: Window
    open: Callable[[], bool]
    waiting: Callable[[], int]
    enclosed: bool = False
    """Within ``Engine.iteration``, and not at its end yet."""
    manual: bool = False
    """A loop is followed that is not ours: nothing encloses its steps."""

    def __init__(self, plan: Plan | None, open: Callable[[], bool], waiting: Callable[[], int]) -> None:
        self.window = Window(plan)
        self.open, self.waiting = open, waiting
        self._state = State.IDLE
        self._left: str | None = None
        """What was unfinished in an iteration that broke off, as :meth:`unfinished` says it."""

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    @property
    def ran_backward(self) -> bool:
        """Whether a backward has begun whose gradients are in no sum."""
        return self._state is State.BACKWARD

    @property
    def begun(self) -> int:
        """How many micro-batches of the present window have begun their backward."""
        return self.window.added + self.ran_backward

    @property
    def halfway(self) -> bool:
        """Whether some weights of this iteration may be updated and others not."""
        if self._state is State.BACKWARD:
            return self.window.which == "updating"
        return self._state is State.SETTLING

    def unfinished(self) -> str | None:
        """Return why a checkpoint of now would not be complete, as a clause for people; None if it would be."""
        if self.halfway:
            return HALFWAY
        if self.window.added:
            return f"the gradients of {self.window.added} micro-batches since the last update are in no checkpoint"
        return self._left

    def resize(self, size: int) -> None:
        """Let windows have ``size`` micro-batches from now on.

        Raises:
            ConfigError: if ``size`` is not a number of micro-batches, or in the middle of a window.
            PlanError: if the plan is one for windows of 1.
        """
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"accumulate={size!r} must be at least 1: micro-batches per optimizer.step()")
        self.enter(Transition.RESIZE, f"accumulate={size} was set")
        self.window.resize(size)

    def check(self, transition: Transition, use: str = "") -> Outcome:
        """Return what ``transition`` does now.

        Args:
            transition: what comes.
            use: what was done, for errors that say so.

        Raises:
            UnsupportedError, ConfigError: if it is refused.
        """
        cell = TABLE[transition][self._state]
        # In the order of the table: the first that holds names the error.
        for refused in cell.refusals:
            if refused.when is None or refused.when.holds(self):
                raise refused.error(self._facts(use))
        assert cell.then is not None, f"{transition} in {self._state}"
        return cell

    def allows(self, transition: Transition) -> bool:
        """Return whether ``transition`` is not refused now."""
        return not any(r.when is None or r.when.holds(self) for r in TABLE[transition][self._state].refusals)

    def enter(self, transition: Transition, use: str = "") -> None:
        """Go on to the state that follows ``transition``; raises as :meth:`check` does."""
        then = self.check(transition, use).then
        # The counts change before the state, which depends on them (`_rest`).
        if transition is Transition.ADD:
            self.window.added += 1
        elif transition is Transition.UPDATED and then is State.IDLE:
            self.window.end()
            self._left = None
        elif transition is Transition.CLEAR:
            self.window.end()
        elif transition is Transition.FAIL:
            # Asked before the window forgets what it has added.
            self._left = self.unfinished()
            self.window.end()
        if isinstance(then, State):
            self._state = then
        elif then is Next.REST:
            self._state = self._rest
        elif then is Next.BROKEN:
            self._state = State.IDLE if self._left is None else State.FAILED

    @property
    def _rest(self) -> State:
        if self.waiting():
            return State.FORWARD
        if self.window.added:
            return State.ADDED
        return State.IDLE if self._left is None else State.FAILED

    def _facts(self, use: str) -> dict[str, Any]:
        window = self.window
        return {
            "use": use or "the model was called",
            "added": window.added,
            "begun": self.begun,
            "size": window.size,
            "waiting": self.waiting(),
        }
