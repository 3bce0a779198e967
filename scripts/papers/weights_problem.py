"""The problem of weight offloading (2022) in the paper's quantities, and schedules by the paper's rules.

The rules are a simulation of events. Copies to the device run in the order of need, each at the
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

from lt_offload.plan.papers.weights.model import Gap, WeightChain, require_room

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


def weight_chain(layers: Sequence[WeightLayer], *, memory: int, bandwidth: float) -> WeightChain:
    """Return the problem ``OFF(L, memory, bandwidth)``.

    The working bytes are those of eq. 1 less the layer's own weight: the outputs of all layers up to it, and in the
    backward a gradient as large as the weight.
    """
    held = list(accumulate(layer.activation_bytes for layer in layers))
    backward = [total + layer.weight_bytes for total, layer in zip(held, layers, strict=True)]
    return WeightChain(
        weights=tuple(layer.weight_bytes for layer in layers),
        seconds=(*(layer.forward_s for layer in layers), *(layer.backward_s for layer in reversed(layers))),
        working=(*held, *reversed(backward)),
        memory=memory,
        h2d=bandwidth,
        d2h=bandwidth,
    )


def l2l_s(chain: WeightChain) -> float:
    """Return the seconds of an L2L iteration in closed form.

    Both fetches of every weight are exposed, and the copies to the host hide behind the next fetch and computation.
    """
    return chain.compute_s + 2 * sum(chain.weights) / chain.h2d


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


def schedule(chain: WeightChain, gaps: Iterable[Gap], *, ahead: bool = True, discount: bool = True) -> Schedule:
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
    def __init__(self, chain: WeightChain, gaps: frozenset[Gap], ahead: bool, discount: bool) -> None:
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
