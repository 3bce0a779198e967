"""The problem of weight offloading (2022) in the paper's quantities: a lower bound of its time, and schedules.

The bound is the mixed-integer program of the paper (eqs. 2-8), or its relaxation. Per layer ``i`` and step ``j``, in
units of the largest weight: ``O`` is copied to the host, ``P`` to the device and ``D`` given back between the start of
step ``j`` and the start of the next; ``m`` is on the device when step ``j`` starts, ``c`` has been copied to the host
since the layer's backward. ``g`` and ``f`` are the backward and the forward of the layer.
What is corrected against the print:

- (4) limits ``sum_i m`` over all layers to ``M - M_k``, but ``M_k`` contains the own weight already: the sum is over
  the others. As printed, the program is not a bound of the problem that the text states.
- (5) the first sum runs over ``j = 0 .. 2L - 1`` of steps that are numbered ``1 .. 2L``; all steps are meant.
- (6) the first inequality has the wrong sign: what is fetched is at most what was given back, ``sum P - D <= 0``. Here
  that is the upper bound of ``m``.

Sums over the steps since the backward are the variables ``m`` and ``c``, so that the rows stay short.

The paper's rules of scheduling are a simulation of events. Copies to the device run in the order of need, each at the
earliest time from which the memory holds it besides everything that is scheduled before its use. Copies to the host run
first in, first out; a copy that a forward would have to make is made earlier, after the layer's backward, if the link
is idle long enough. Algorithm 2 of the paper tries every cut of the sequence of copies to close the cycle. Here
iterations follow one another from a start with nothing in flight until their period no longer changes, which gives the
same steady state.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import pulp

from lt_offload.errors import ConfigError
from lt_offload.plan.papers.weights.model import Gap, WeightChain, require_room
from lt_offload.plan.planners.lp import Pair, Problem, require, run

_ITERATIONS = 24
_AVERAGED = 6
_SAME = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayer:
    """One layer as the paper has it; sizes in bytes, times in seconds."""

    weight_bytes: int
    forward_s: float
    backward_s: float
    activation_bytes: int = 0
    """Size of its output, held until the backward of the layer after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperChain(WeightChain):
    """A problem with its durations and its link."""

    seconds: tuple[float, ...]
    """Duration per step."""
    h2d: float
    """Bytes per second to the device."""
    d2h: float
    """Bytes per second to the host."""

    def layer_of(self, step: int) -> int:
        """Return the layer that computes in ``step``."""
        return min(step, self.steps - 1 - step)


def weight_chain(layers: Sequence[WeightLayer], *, memory: int, bandwidth: float) -> PaperChain:
    """Return the problem ``OFF(L, memory, bandwidth)``.

    The working bytes are those of eq. 1 less the layer's own weight: the outputs of all layers up to it, and in the
    backward a gradient as large as the weight.
    """
    held = list(accumulate(layer.activation_bytes for layer in layers))
    backward = [total + layer.weight_bytes for total, layer in zip(held, layers, strict=True)]
    weights = tuple(layer.weight_bytes for layer in layers)
    seconds = (*(layer.forward_s for layer in layers), *(layer.backward_s for layer in reversed(layers)))
    return PaperChain(
        weights=weights,
        seconds=seconds,
        compute_s=sum(seconds),
        changed=weights,
        states=(0,) * len(layers),
        states_return=(True,) * len(layers),
        working=(*held, *reversed(backward)),
        memory=memory,
        h2d=bandwidth,
        d2h=bandwidth,
    )


def l2l_s(chain: PaperChain) -> float:
    """Return the seconds of an L2L iteration in closed form.

    Both fetches of every weight are exposed, and the copies to the host hide behind the next fetch and computation.
    """
    return chain.compute_s + 2 * sum(chain.weights) / chain.h2d


def weights_bound(
    chain: PaperChain,
    *,
    relaxed: bool = True,
    time_limit: float = 60.0,
    gap: float = 1e-4,
) -> float:
    """Return the seconds that no iteration of ``chain`` can beat, whatever is absent when.

    It is not the time of a schedule: memory is only counted at the starts of steps, and parts of weights may travel.

    Args:
        chain: the problem, without optimizer states.
        relaxed: whether a weight may also be absent in parts; else the program is branched on.
        time_limit: seconds.
        gap: relative gap of the waits at which branching stops; it is taken off, so that the value remains a bound.

    Raises:
        InfeasibleError: if the memory is too small.
        ConfigError: if the time limit is too short.
    """
    assert not any(chain.states), "the program knows no optimizer states"
    require_room(chain, chain.gaps())
    program = _Program(chain, whole=not relaxed)
    outcome = run(program.problem, time_limit=time_limit, gap=None if relaxed else gap)
    assert outcome != "infeasible", "every weight may be absent between its uses"
    if outcome == "stopped":
        raise ConfigError(f"time_limit={time_limit:g} is too short for the bound of {chain.layers} layers")
    idle = max(0.0, float(pulp.value(program.problem.objective))) * program.seconds_unit
    return chain.compute_s + idle * (1 if relaxed else 1 - gap)


class _Program:
    def __init__(self, chain: PaperChain, *, whole: bool) -> None:
        self.chain, self.whole = chain, whole
        self.bytes_unit = float(max(chain.weights) or 1)
        self.seconds_unit = chain.compute_s / chain.steps or self.bytes_unit / chain.h2d
        self.problem = Problem("weights")
        steps = range(chain.steps)
        self.idle = [self.problem.add_variable(f"idle_{step:03d}", 0) for step in steps]
        self.h2d: list[list[Pair]] = [[] for _ in steps]
        self.d2h: list[list[Pair]] = [[] for _ in steps]
        self.others: list[list[Pair]] = [[] for _ in steps]
        for layer, nbytes in enumerate(chain.weights):
            if nbytes:
                self._add_layer(layer)
        for step in steps:
            self._limit_step(step)
        self.problem.setObjective(pulp.lpSum(self.idle))

    def _size(self, nbytes: float) -> float:
        return nbytes / self.bytes_unit

    def _binary(self, name: str) -> pulp.LpVariable:
        return self.problem.add_variable(name, 0, 1, cat=pulp.LpBinary if self.whole else pulp.LpContinuous)

    def _add_layer(self, layer: int) -> None:
        chain, problem, steps = self.chain, self.problem, self.chain.steps
        weight, changed = self._size(chain.weights[layer]), self._size(chain.changed[layer])
        backward = steps - 1 - layer
        name = f"w{layer:03d}"
        on_device: pulp.LpVariable | float = weight
        on_host: pulp.LpVariable | float = 0.0
        removed: dict[Literal["forward", "backward"], list[Pair]] = {"forward": [], "backward": []}
        for tau in range(steps):
            step, now, copied = (backward + tau) % steps, on_device, on_host
            out = problem.add_variable(f"{name}_O_{step:03d}", 0, changed)
            fetched = problem.add_variable(f"{name}_P_{step:03d}", 0, weight)
            given = problem.add_variable(f"{name}_D_{step:03d}", 0, weight)
            self.h2d[step].append((1, fetched))
            self.d2h[step].append((1, out))
            if step == backward:
                require(problem, [(1, self.idle[step]), (-self._duration(chain.d2h), out)], ">=")  # (3)
            elif step != layer:
                self.others[step].append((1, now))
            else:
                require(problem, [(1, now)], "==", weight)  # (5), second
            removed["backward" if tau <= 2 * layer else "forward"].append((1, given))
            on_device = weight if tau == steps - 1 else problem.add_variable(f"{name}_m_{step:03d}", 0, weight)  # (6)
            on_host = problem.add_variable(f"{name}_c_{step:03d}", 0, changed)
            require(problem, [(1, on_device), (-1, now), (-1, fetched), (1, given)], "==")  # (5), first
            require(problem, [(1, on_host), (-1, copied), (-1, out)], "==")
            require(problem, [(1, on_host), (1, on_device)], ">=", changed)  # (6), second: less than all is current
        require(problem, [(1, on_host), (-changed, self._binary(f"{name}_O"))], "==")  # (7)
        for phase, given_back in removed.items():
            require(problem, [*given_back, (-weight, self._binary(f"{name}_D_{phase}"))], "==")  # (8)

    def _limit_step(self, step: int) -> None:
        chain = self.chain
        for copies, rate in ((self.h2d[step], chain.h2d), (self.d2h[step], chain.d2h)):
            pairs = [(self._duration(rate) * factor, term) for factor, term in copies]
            own = chain.seconds[step] / self.seconds_unit
            require(
                self.problem, [(1, self.idle[step]), *((-factor, term) for factor, term in pairs)], ">=", -own
            )  # (2)
        left = chain.memory - chain.working[step] - chain.weights[chain.layer_of(step)]
        require(self.problem, self.others[step], "<=", self._size(left))  # (4)

    def _duration(self, rate: float) -> float:
        """Return how long a unit of bytes takes, in units of time."""
        return self.bytes_unit / rate / self.seconds_unit


# -- schedules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One copy. Memory for it is held from the start of a fetch, or until the end of a copy to the host."""

    layer: int
    at: int
    """The step that needs it, or after which it leaves at the latest; steps are counted through all iterations."""
    to: Literal["device", "host"]
    bytes: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A weight, and the states that leave with it, gives its memory back."""

    layer: int
    at: int
    """The step after which it leaves, counted through all iterations."""
    bytes: int
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Several iterations; the last one is the steady state."""

    period_s: float
    computations: tuple[tuple[float, float], ...]
    """Start and end of every step of every iteration."""
    copies: tuple[Copy, ...]
    releases: tuple[Release, ...]


def schedule(chain: PaperChain, gaps: Iterable[Gap], *, ahead: bool = True, discount: bool = True) -> Schedule:
    """Return the steady state of ``chain`` with its weights absent in ``gaps``.

    Args:
        chain: the problem.
        gaps: from :func:`~lt_offload.plan.papers.weights.model.select_gaps`, or all of ``chain.gaps()``.
        ahead: False: a weight is fetched when its step is due and nothing else computes, as L2L does.
        discount: False: a weight is copied to the host in every gap, though its host copy may be current.

    Raises:
        InfeasibleError: if the absences in ``gaps`` do not free enough.
    """
    chosen = frozenset(gaps)
    require_room(chain, chosen)
    run = _Run(chain, chosen, ahead, discount)
    periods: list[float] = []
    finished = run.iterate(0)
    for iteration in range(1, _ITERATIONS):
        before, finished = finished, run.iterate(iteration)
        periods.append(finished - before)
        if len(periods) >= 3 and abs(periods[-1] - periods[-3]) + abs(periods[-1] - periods[-2]) <= _SAME * finished:
            break
    else:
        periods.append(sum(periods[-_AVERAGED:]) / _AVERAGED)
    return Schedule(
        period_s=periods[-1],
        computations=tuple(run.computations),
        copies=tuple(run.copies),
        releases=tuple(run.releases),
    )


class _Level:
    """Bytes on the device over time."""

    def __init__(self, nbytes: int) -> None:
        self.changes: list[tuple[float, int]] = []
        self.last = nbytes

    def add(self, time: float, nbytes: int) -> None:
        insort(self.changes, (time, nbytes))
        self.last += nbytes

    def fits_from(self, time: float, limit: int) -> float:
        """Return the earliest moment, not before ``time``, after which the level never passes ``limit``."""
        level, at = self.last, len(self.changes)
        assert level <= limit
        while at and self.changes[at - 1][0] > time:
            # Changes of one moment are one change.
            moment = self.changes[at - 1][0]
            while at and self.changes[at - 1][0] == moment:
                at -= 1
                level -= self.changes[at][1]
            if level > limit:
                return moment
        return time


class _Run:
    def __init__(self, chain: PaperChain, gaps: frozenset[Gap], ahead: bool, discount: bool) -> None:
        self.chain, self.ahead, self.discount = chain, ahead, discount
        self.gone = {phase: {gap.layer for gap in gaps if gap.after == phase} for phase in ("forward", "backward")}
        self.paged = {gap.layer for gap in gaps}
        self.computations: list[tuple[float, float]] = []
        self.copies: list[Copy] = []
        self.releases: list[Release] = []
        self.h2d = self.d2h = 0.0
        self.out = [0.0] * chain.layers
        """Per layer: when it was last given back, with a current host copy."""
        once = sorted(self.gone["forward"] - self.gone["backward"])
        self.waiting = {layer: 0.0 for layer in once if chain.changed[layer]}
        """Layers whose next copy to the host is only due after their forward, with the end of their backward."""
        present = sum(w for layer, w in enumerate(chain.weights) if layer not in self.gone["backward"])
        present += sum(s for layer, s in enumerate(chain.states) if layer not in self.paged)
        self.level = _Level(present + self._idle(0))

    def iterate(self, iteration: int) -> float:
        """Run all steps once; return when the last one ends."""
        for step in range(self.chain.steps):
            self._fetch(iteration, step)
            self._compute(step)
            self._leave(iteration, step)
        return self.computations[-1][1]

    def _idle(self, step: int) -> int:
        """Bytes held besides weights while nothing runs before ``step``."""
        return min(self.chain.working[step - 1], self.chain.working[step])

    def _states(self, layer: int) -> int:
        return self.chain.states[layer] if layer in self.paged and self.chain.states_return[layer] else 0

    def _now(self) -> float:
        return self.computations[-1][1] if self.computations else 0.0

    def _fetch(self, iteration: int, step: int) -> None:
        chain, layer = self.chain, self.chain.layer_of(step)
        forward = step < chain.layers
        nbytes = chain.weights[layer] if layer in self.gone["backward" if forward else "forward"] else 0
        nbytes += 0 if forward else self._states(layer)
        if not nbytes:
            return
        earliest = max(self.h2d, self.out[layer], 0.0 if self.ahead else self._now())
        start = self.level.fits_from(earliest, chain.memory - nbytes)
        self.h2d = start + nbytes / chain.h2d
        self.level.add(start, nbytes)
        at = iteration * chain.steps + step
        self.copies.append(Copy(layer=layer, at=at, to="device", bytes=nbytes, start=start, end=self.h2d))

    def _compute(self, step: int) -> None:
        chain = self.chain
        fetched = self.copies and self.copies[-1].to == "device" and self.copies[-1].at == len(self.computations)
        ready = max(self._now(), self.copies[-1].end if fetched else 0.0)
        working, before = chain.working[step], self._idle(step)
        after = self._idle((step + 1) % chain.steps)
        start = self.level.fits_from(ready, chain.memory - (working - before))
        end = start + chain.seconds[step]
        self.level.add(start, working - before)
        self.level.add(end, after - working)
        self.computations.append((start, end))

    def _leave(self, iteration: int, step: int) -> None:
        chain, layer, now = self.chain, self.chain.layer_of(step), self._now()
        at = iteration * chain.steps + step
        if step >= chain.layers:
            if layer in self.gone["backward"]:
                self._upload_early(now)
                copied, freed = chain.changed[layer], chain.weights[layer]
                self._out(layer, at, now, copied + self._states(layer), freed + self._states(layer))
                return
            if layer in self.gone["forward"] and chain.changed[layer]:
                self.waiting[layer] = now
            if self._states(layer):
                self._upload_early(now)
                self._out(layer, at, now, self._states(layer), self._states(layer))
        elif layer in self.gone["forward"]:
            self._upload_early(now)
            stale = layer in self.waiting or (layer in self.gone["backward"] and not self.discount)
            self.waiting.pop(layer, None)
            self._out(layer, at, now, chain.changed[layer] if stale else 0, chain.weights[layer])

    def _out(self, layer: int, at: int, ready: float, copied: int, freed: int) -> None:
        """Copy to the host what is not current there, and give the device memory back."""
        time = ready
        if copied:
            self._upload(layer, at, ready, copied)
            time = self.d2h
        self.out[layer] = max(self.out[layer], time)
        self.level.add(time, -freed)
        self.releases.append(Release(layer=layer, at=at, bytes=freed, time=time))

    def _upload_early(self, now: float) -> None:
        """Use the idle time of the link up to ``now``, the smallest first."""
        while fitting := [
            (self.chain.changed[layer], layer)
            for layer, ready in self.waiting.items()
            if max(self.d2h, ready) + self.chain.changed[layer] / self.chain.d2h <= now
        ]:
            copied, layer = min(fitting)
            last = len(self.computations) - 1
            due = last + (layer - last) % self.chain.steps
            self._upload(layer, due, self.waiting.pop(layer), copied)

    def _upload(self, layer: int, at: int, ready: float, nbytes: int) -> None:
        start = max(self.d2h, ready)
        self.d2h = start + nbytes / self.chain.d2h
        self.copies.append(Copy(layer=layer, at=at, to="host", bytes=nbytes, start=start, end=self.d2h))
