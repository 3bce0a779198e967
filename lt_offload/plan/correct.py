"""Comparison of a plan's predictions with measurements, and a profile corrected by the measured durations.

Durations are compared op by op, without waits: a computation counts from when the one before it has ended and all that
it waits for is there, so that what the framework does between two computations belongs to the second. Updates on the
device and gradients that a backward writes to the host have no spans of their own in a measured trace; they are part of
their backward.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lt_offload.plan.iteration.computations import Computation
from lt_offload.plan.iteration.durations import computations_of, least_computing_s, slowed
from lt_offload.plan.iteration.durations import timed as with_durations
from lt_offload.plan.planners.baselines import no_offload_s
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.lanes import LANES, LaneName, shown
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import BlockProfile, Profile, ReadProfile, TensorProfile
from lt_offload.schema.trace import Span, Trace
from lt_offload.units import format_seconds

TOLERANCE = 0.1
"""Relative difference from which on a prediction is corrected."""
_SMALL = 0.1
"""A lane that works for less than this part of an iteration may differ by more."""
_ROUNDS = 6
"""While lanes share memory, the speed of one says something about another: scaling is repeated."""
_EXACT = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneDifference:
    """Seconds that a lane works in an iteration, waits excluded, over the ops that were measured."""

    lane: LaneName
    planned_s: float
    measured_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A plan's iteration as it was simulated and as it was measured."""

    planned_s: float
    measured_s: float
    lanes: tuple[LaneDifference, ...]

    @property
    def iteration_agrees(self) -> bool:
        """True: the iteration takes as long as planned, within the tolerance."""
        return _near(self.planned_s, self.measured_s)

    @property
    def agrees(self) -> bool:
        """True: the iteration, and every lane that matters, take as long as planned."""
        least = _SMALL * max(self.planned_s, self.measured_s)
        return self.iteration_agrees and all(
            _near(lane.planned_s, lane.measured_s)
            for lane in self.lanes
            if max(lane.planned_s, lane.measured_s) >= least
        )

    @property
    def sentence(self) -> str:
        """Measured, planned, and the lane that explains most of the difference."""
        text = f"an iteration takes {format_seconds(self.measured_s)}, planned were {format_seconds(self.planned_s)}"
        off = self.measured_s - self.planned_s
        most = max(self.lanes, key=lambda lane: abs(lane.measured_s - lane.planned_s), default=None)
        # No single lane explains the difference: then it is between them, where they wait for each other.
        if most is None or abs(most.measured_s - most.planned_s) < abs(off) / 2:
            return f"{text}; the lanes work as planned, the rest is waiting"
        title = next(lane.title for lane in LANES if lane.name == most.lane)
        return (
            f"{text}; most of the difference is in the lane {title!r}: {format_seconds(most.measured_s)} of work, "
            f"planned were {format_seconds(most.planned_s)}"
        )


def _near(planned: float, measured: float) -> bool:
    return abs(measured - planned) <= TOLERANCE * planned


def compare(plan: Plan, profile: Profile, measured: Sequence[Trace]) -> Comparison:
    """Return the differences between ``measured``, some iterations of ``plan``, and its simulation by ``profile``."""
    planned = simulate(plan, profile)
    items = list(_items(plan, planned, measured))
    return Comparison(
        planned_s=planned.iteration_time,
        measured_s=statistics.median(trace.iteration_time for trace in measured),
        lanes=tuple(
            LaneDifference(
                lane=lane.name,
                planned_s=sum(item.planned_s for item in items if item.op.lane == lane.name),
                measured_s=sum(item.measured_s for item in items if item.op.lane == lane.name),
            )
            for lane in shown(op.lane for op in plan.ops)
        ),
    )


def correct(profile: Profile, plan: Plan, measured: Sequence[Trace]) -> Profile:
    """Return ``profile`` with the speeds that were ``measured`` in some iterations of ``plan``.

    Blocks are scaled by kind and option, and forwards and backwards apart; an option that did not run is scaled like
    those of its kind that did. Links and updates are scaled as a whole. Figures that were not measured stay as they
    are.
    """
    corrected, distance = profile, math.inf
    for _ in range(_ROUNDS):
        trial = with_durations(plan, corrected)
        scales = _Scales(trial, corrected, _items(trial, simulate(trial, corrected), measured))
        if scales.distance >= distance * (1 - _EXACT):
            break
        best, distance = corrected, scales.distance
        if distance < _EXACT:
            break
        corrected = scales.apply(corrected)
    # Not the last: where lanes share memory, a round of scaling may lead farther away.
    return best


def timed(plan: Plan, profile: Profile) -> Plan:
    """Return ``plan`` with the durations, and the predicted times, of ``profile``.

    The lower bound is that of the computations alone: a better one takes a planner.
    """
    plan = with_durations(plan, profile)
    iteration_s = simulate(plan, profile).iteration_time
    predicted = replace(
        plan.predicted,
        iteration_s=iteration_s,
        lower_bound_s=min(plan.window * least_computing_s(profile), iteration_s),
        no_offload_s=no_offload_s(profile, plan.window),
    )
    return replace(plan, predicted=predicted)


# -- durations --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _MeasuredOp:
    """An op that was measured, with the ops that ran within its span."""

    op: Op
    within: tuple[Op, ...]
    planned_s: float
    measured_s: float


def _items(plan: Plan, planned: Trace, measured: Sequence[Trace]) -> Iterator[_MeasuredOp]:
    promised = _durations(planned, plan)
    known: defaultdict[int, list[float]] = defaultdict(list)
    for trace in measured:
        for number, duration in _durations(trace, plan).items():
            known[number].append(duration)
    within: defaultdict[int, list[Op]] = defaultdict(list)
    """By step: ops of the compute lane without spans of their own."""
    for op in plan.ops:
        # What runs inside a backward (updates on the device, gradients written to the host) is in its span.
        if op.lane == "compute" and not op.computes and op.id not in known:
            within[op.step].append(op)
    for op in plan.ops:
        if op.id not in known:
            continue
        inner = tuple(within[op.step]) if op.kind == "backward" else ()
        seconds = promised[op.id] + sum(promised[other.id] for other in inner)
        if seconds > 0:
            yield _MeasuredOp(op=op, within=inner, planned_s=seconds, measured_s=statistics.median(known[op.id]))


def _durations(trace: Trace, plan: Plan) -> dict[int, float]:
    """Return the seconds of work by op; none of ops whose spans are cut at an end of the iteration."""
    work: dict[int, float] = {}
    by_op: defaultdict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        if 0 <= span.op < len(plan.ops) and plan.ops[span.op].lane == span.lane:
            by_op[span.op].append(span)
    complete = trace.source == "simulated"  # spans that belong to one iteration, as a whole
    for number, spans in by_op.items():
        lane = plan.ops[number].lane
        if lane == "compute":
            continue
        if not complete and any(span.start <= 0 or span.end >= trace.iteration_time for span in spans):
            continue
        seconds = [span.end - span.start for span in spans]
        # An update on the host is one task, and may end in the next iteration: then there are two iterations' here.
        work[number] = statistics.mean(seconds) if lane == "host" else sum(seconds)
    computing = sorted((span for span in trace.spans if span.lane == "compute"), key=lambda span: span.start)
    before = 0.0
    for span in computing:
        free, end = span.start, span.end
        if not complete:
            # What it waits for of the iteration before is here only if that was measured, and then it has ended by now.
            awaited = [other.end for number in plan.ops[span.op].after for other in by_op.get(number, ())]
            free = max([before, *(arrival for arrival in awaited if arrival <= end)])
            end = end if span is not computing[-1] else trace.iteration_time
        work[span.op] = work.get(span.op, 0.0) + end - free
        before = max(before, span.end)
    return work


# -- scaling ----------------------------------------------------------------------------------------------------------


class _Scales:
    """Factors by which the durations of a profile have to be multiplied."""

    def __init__(self, plan: Plan, profile: Profile, items: Iterator[_MeasuredOp]) -> None:
        sums: defaultdict[Hashable, list[float]] = defaultdict(lambda: [0.0, 0.0])
        run = computations_of(plan, profile)
        for item in items:
            for key in _keys(item, plan, profile, run):
                sums[key][0] += item.planned_s
                sums[key][1] += item.measured_s
        self._ratios = {key: own / said if said > 0 and own > 0 else 1.0 for key, (said, own) in sums.items()}
        """Measured by planned seconds, over several ops; 1 where nothing was measured."""

    @property
    def distance(self) -> float:
        return max((abs(math.log(ratio)) for ratio in self._ratios.values()), default=0.0)

    def apply(self, profile: Profile) -> Profile:
        h2d, d2h, host, device = map(self._of, ("h2d", "d2h", "host", "update"))
        return replace(
            slowed(profile, h2d=h2d, d2h=d2h, host=host, device=device),
            blocks=tuple(map(self._block, profile.blocks)),
            tensors=tuple(self._tensor(index, tensor) for index, tensor in enumerate(profile.tensors)),
        )

    def _of(self, *keys: Hashable) -> float:
        """Return the ratio of the first of ``keys`` that was measured."""
        return next((self._ratios[key] for key in keys if key in self._ratios), 1.0)

    def _block(self, block: BlockProfile) -> BlockProfile:
        def scaled(option: str, seconds: float, what: str) -> float:
            return seconds * self._of((what, block.kind, option, seconds), (what, block.kind))

        return replace(
            block,
            options=tuple(
                replace(
                    option,
                    forward_s=scaled(option.name, option.forward_s, "forward"),
                    backward_s=scaled(option.name, option.backward_s, "backward"),
                )
                for option in block.options
            ),
        )

    def _tensor(self, index: int, tensor: TensorProfile) -> TensorProfile:
        costs = tensor.zero_copy
        if costs is None:
            return tensor
        reads = tuple(self._read(index, block, read) for block, read in zip(tensor.blocks, costs.reads, strict=True))
        written = self._of(("written", index))
        return replace(tensor, zero_copy=replace(costs, reads=reads, grad_s=costs.grad_s * written))

    def _read(self, tensor: int, block: int, read: ReadProfile) -> ReadProfile:
        return replace(
            read,
            forward_s=read.forward_s * self._of(("read forward", tensor, block)),
            backward_s=read.backward_s * self._of(("read backward", tensor, block)),
        )


def _keys(item: _MeasuredOp, plan: Plan, profile: Profile, run: Mapping[int, Computation]) -> Iterator[Hashable]:
    """Yield the keys of the figures in a profile that the duration of ``item`` depends on."""
    op = item.op
    if op.id in run:
        what = run[op.id]
        kind = profile.blocks[op.block].kind
        option = what.option
        seconds = option.forward_s if op.kind == "forward" else option.backward_s
        yield op.kind, kind, option.name, seconds
        # It counts under a coarser key, too, by which options that did not run are
        # scaled like those of their kind that did.
        yield op.kind, kind
        yield from ((f"read {op.kind}", tensor, op.block) for tensor in plan.zero_copy(op))
    elif op.lane not in ("compute", "network", "none"):  # what crosses the network waits for other machines, too
        yield op.lane
    for other in (op, *item.within):
        if other.lane == "compute" and other.updates:
            yield "update"
        elif other.writes_gradients:
            yield from (("written", tensor) for tensor in plan.tensors(other))
