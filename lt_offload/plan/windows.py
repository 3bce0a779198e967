"""Plans for windows, several micro-batches per update: planned by their mean pass, and priced by the window.

While it is planned, the sum of a tensor's gradients counts as one more of its optimizer states (:func:`with_sums`). A
timetable for such a profile then has room for the sums wherever they are needed, at any time, and no planner has to
know of them. The ops of its passes are written by :mod:`lt_offload.plan.assembly.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.plan.assembly.ops import TiedTable
from lt_offload.plan.iteration.durations import accumulated, added, gathered, least_computing_s, slowed
from lt_offload.plan.iteration.memory import STATE_PADDING, aligned, state_room
from lt_offload.plan.planners.priced import priced
from lt_offload.plan.rows import as_head, room_of_rows, table_of
from lt_offload.plan.settings import Settings
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.explain import OTHER_BITS
from lt_offload.schema.plan import ADDING, Plan
from lt_offload.schema.profile import Profile, TensorProfile
from lt_offload.units import format_seconds

_WAITING = 2.0
"""Factor on the time of updates on the host that wait in windows of one, where two plans are compared.

By trial: of 1, 2 and 3 it gave the fastest plan for Llama-2-7B in fp32 on a card of 12 GB; for Phi-3-mini 3 was 3 %
better still.
"""
UNCOUNTED = 1 << 16
"""Bytes of RAM that are kept: where a tensor has no states, its sum as a state takes a few bytes less than it does."""
_GOOD_GAP = 0.01
"""A plan that is this close to the bound is not compared with a second one."""


def with_sums(profile: Profile, window: int, *, mean: bool = True) -> Profile:
    """Return ``profile`` with sums of gradients as states.

    ``mean``: with updates as fast as in the mean pass of a window; else as those of its last one.
    """
    trained = [tensor for tensor in profile.tensors if tensor.trainable]
    updated = sum(tensor.bytes for tensor in trained)
    # A window updates once and adds up in every pass; on the host in all but the first.
    once = 1 / window if mean else 1.0
    share = once + (sum(map(added, trained)) / updated if updated else 0.0)
    on_host = once
    if updated:
        adding = (1 - once if mean else 1.0) * sum(accumulated(tensor, profile) for tensor in trained)
        on_host += (once * sum(gathered(tensor, profile) for tensor in trained) + adding) / updated
    return replace(
        slowed(profile, host=on_host, device=share),
        hardware=replace(profile.hardware, host_bytes=max(1, profile.hardware.host_bytes - UNCOUNTED)),
        tensors=tuple(_with_sum(tensor) if tensor.trainable else tensor for tensor in profile.tensors),
    )


def without_gradients(profile: Profile) -> Profile:
    """Return ``profile`` with every tensor frozen: the least work of each pass of a window."""
    frozen = tuple(replace(tensor, trainable=False, state_bytes=0) for tensor in profile.tensors)
    return replace(profile, tensors=frozen, forwards=1, deferred_forwards=0)


def _with_sum(tensor: TensorProfile) -> TensorProfile:
    """Return ``tensor`` with states that take as much of the arena as its states and a sum side by side."""
    # state_room() adds the padding again, and comes to the sum of both rooms.
    both = state_room(tensor.state_bytes) + aligned(tensor.bytes) - STATE_PADDING
    return replace(tensor, state_bytes=both, sum_bytes=both - tensor.state_bytes)


def for_one(settings: Settings) -> Settings:
    """Return the settings of plans for profiles :func:`with_sums`, which become plans for windows."""
    return replace(settings, accumulate=1, host_memory=settings.host.less(UNCOUNTED))


def adds_up(profile: Profile) -> bool:
    """Return whether ``profile`` is one :func:`with_sums`."""
    return any(tensor.sum_bytes for tensor in profile.tensors)


def has_windows(profile: Profile, settings: Settings) -> bool:
    """Return whether plans have to add gradients up, of which ``profile`` does not know yet."""
    return (settings.accumulate > 1 or settings.delayed) and not adds_up(profile)


def plan_windows(
    profile: Profile, settings: Settings, plan_one: Callable[..., Plan], least: Callable[[], float]
) -> Plan:
    """Return the plan for windows of ``settings.accumulate`` micro-batches.

    The plan that is fastest for the mean pass of a window need not be so for its passes one after the other. A second
    plan is compared, unless the first is as good as optimal: one for the update alone, or, where updates wait, one
    whose updates on the device last as long as their copies.

    Args:
        profile: what model and machine cost.
        settings: budgets and switches.
        plan_one: plans for one micro-batch per update; its errors are passed on.
        least: returns the seconds that no plan for windows can beat; asked when there is one.
    """
    if not any(tensor.trainable for tensor in profile.tensors):
        # Nothing is added up: every pass is like the only one of a plan for one batch.
        plan = plan_one(profile, replace(settings, accumulate=1, delayed=False))
        return _bounded(for_windows(plan, profile, settings), least())
    # Two plans share the user's time, or three.
    # Of one gradient, which is the sum, too little is gained where the update waits for the backward anyway.
    table = table_of(profile, settings) if settings.accumulate > 1 else None
    window = settings.accumulate
    half = replace(for_one(settings), solver_time_limit=settings.solver_time_limit / (2 if table is None else 3))
    mean = for_windows(plan_one(with_sums(profile, window), half), profile, settings)
    least_s = least()
    if mean.predicted.iteration_s <= (1 + _GOOD_GAP) * max(least_s, mean.predicted.lower_bound_s):
        return _bounded(mean, least_s)
    other = (
        _settling(with_sums(profile, window), window) if settings.delayed else with_sums(profile, window, mean=False)
    )
    plans = [mean]
    with suppress(ConfigError, InfeasibleError, UnsupportedError):  # there is a plan: no other was found in time
        plans.append(for_windows(plan_one(other, half), profile, settings))
    if table is not None:
        plans += _by_rows(profile, table, replace(settings, solver_time_limit=half.solver_time_limit), plan_one)
    return _bounded(min(plans, key=lambda plan: plan.predicted.iteration_s), least_s)


def _by_rows(profile: Profile, table: int, settings: Settings, plan_one: Callable[..., Plan]) -> Iterator[Plan]:
    less = for_one(settings)
    less = replace(less, host_memory=less.host.less(room_of_rows(profile, table, sums=True)))
    head = as_head(with_sums(profile, settings.accumulate), table)
    with suppress(ConfigError, InfeasibleError, UnsupportedError):
        plan = plan_one(head, less, table=TiedTable(index=table, profile=profile))
        yield for_windows(plan, profile, settings)


def _bounded(plan: Plan, least_s: float) -> Plan:
    predicted = plan.predicted
    bound = min(max(predicted.lower_bound_s, least_s), predicted.iteration_s)
    # Computations alone are all that is known of a bound that was cut.
    proved = predicted.proved and (least_s > 0 or predicted.iteration_s <= (1 + _GOOD_GAP) * bound)
    return replace(plan, predicted=replace(predicted, lower_bound_s=bound, proved=proved))


def _settling(profile: Profile, window: int) -> Profile:
    """Return ``profile``, with sums, with updates that last as long as a settling pass makes them.

    It brings weights, states and sums to the device for the update alone, beside no computation. Those on the host have
    the next forward only to be hidden behind.
    """
    trained = [tensor for tensor in profile.tensors if tensor.trainable]
    updated = sum(tensor.bytes for tensor in trained)
    if not updated:
        return profile
    copied = sum(tensor.bytes + tensor.state_bytes for tensor in trained)
    seconds = 1 / profile.optimizer.device_bytes_per_s + copied / updated / profile.hardware.h2d_bytes_per_s / window
    profile = replace(profile, optimizer=replace(profile.optimizer, device_bytes_per_s=1 / seconds))
    return slowed(profile, host=_WAITING if window == 1 else 1.0)


def plan_forwards(profile: Profile, settings: Settings, plan_passes: Callable[[Profile, Settings], Plan]) -> Plan:
    """Return the plan for micro-batches of several forwards, each of which is a pass.

    Forwards that wait for others before their backward run once more, streamed: that time is added.

    Args:
        profile: what model and machine cost.
        settings: budgets and switches.
        plan_passes: plans for one forward per micro-batch; its errors are passed on.
    """
    forwards, deferred = profile.forwards, profile.deferred_forwards
    passes = replace(settings, accumulate=settings.accumulate * forwards)
    # A forward that runs twice looks rows up twice, so none are updated by themselves.
    tensors = tuple(replace(tensor, lookup_bytes=0) for tensor in profile.tensors)
    plan = plan_passes(replace(profile, forwards=1, deferred_forwards=0, tensors=tensors), passes)
    seconds = deferred * settings.accumulate * _streamed_s(profile)
    once = plan.predicted
    predicted = replace(
        once, iteration_s=once.iteration_s + seconds, lower_bound_s=min(once.lower_bound_s, once.iteration_s)
    )
    note = (
        f"{deferred} of {forwards} forwards must wait for others before their backward and run twice, which takes "
        f"{format_seconds(seconds)} more"
    )
    notes = [*plan.notes, note]
    shared = any(len(tensor.blocks) > 1 and tensor.trainable for tensor in profile.tensors)
    if forwards > 1 and (shared or settings.accumulate > 1):
        what = "micro-batches" if settings.accumulate > 1 else "weights that several blocks share"
        notes.append(
            f"gradients of {what} are summed forward by forward, the last one first, not use by use, so that their "
            f"{OTHER_BITS}"
        )
    return replace(plan, forwards=forwards, deferred_forwards=deferred, predicted=predicted, notes=tuple(notes))


def _streamed_s(profile: Profile) -> float:
    computing = sum(block.options[0].forward_s for block in profile.blocks)
    copying = sum(tensor.bytes for tensor in profile.tensors) / profile.hardware.h2d_bytes_per_s
    return max(computing, copying)


def for_windows(plan: Plan, profile: Profile, settings: Settings) -> Plan:
    """Return ``plan``, made for ``profile`` with sums, checked and with the times of a window of ``settings``.

    Alternatives keep the times of the mean pass that they were compared by. The lower bound is that of the
    computations alone.
    """
    ram, window = settings.host_budget(profile.hardware), settings.accumulate
    predicted = replace(plan.predicted, lower_bound_s=window * least_computing_s(profile))
    if not any(tensor.trainable for tensor in profile.tensors):
        passes = ADDING if settings.delayed else (*ADDING, "updating")
        plan = replace(plan, delayed=settings.delayed, ops=tuple(replace(op, passes=passes) for op in plan.ops))
    plan = priced(replace(plan, window=window, host_budget_bytes=ram, predicted=predicted), profile)
    notes = list(plan.notes)
    if window > 1:
        notes.append(
            f"a window of {window} micro-batches takes {format_seconds(plan.predicted.iteration_s)}; each that only "
            f"adds gradients up takes about {format_seconds(_alone_s(plan, profile))}"
        )
    if plan.delayed:
        notes.append("updates wait until all gradients are there, so that they can be clipped by their norm")
    return replace(plan, notes=tuple(notes))


def _alone_s(plan: Plan, profile: Profile) -> float:
    # The difference between four passes and five is one in the middle, without what the first and the last do.
    long, longer = (simulate(replace(plan, window=window), profile).iteration_time for window in (4, 5))
    return longer - long
