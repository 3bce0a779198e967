"""Solves for a plan: asks every planner, simulates what they propose and keeps the fastest that fits."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from lt_offload.arguments import checked
from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.plan.assembly.ops import ONE_BATCH, TiedTable
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.beside import has_choice, plan_processes
from lt_offload.plan.bounds import GOOD_GAP, MANY_BLOCKS, Bounds
from lt_offload.plan.infeasible import explain_infeasible, smallest_ram
from lt_offload.plan.papers.memferry.propose import propose_memferry
from lt_offload.plan.papers.pofo.propose import propose_pofo
from lt_offload.plan.papers.weights.propose import propose_greedy, propose_l2l
from lt_offload.plan.planners.baselines import (
    fits,
    no_offload_s,
    option_sets,
    resident_decisions,
    smallest_for,
    streaming_decisions,
)
from lt_offload.plan.planners.candidates import Candidates
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.model import LinearProgram
from lt_offload.plan.planners.offmate.passes import PassProgram, kept_in_ram
from lt_offload.plan.planners.offmate.program import MakeProgram, lower_bound
from lt_offload.plan.planners.offmate.search import search_programs
from lt_offload.plan.planners.priced import fastest, priced
from lt_offload.plan.planners.request import NotApplicable, Proposal, Request, allowed_options
from lt_offload.plan.planners.tables import lookups, read_tables
from lt_offload.plan.rows import as_head, in_two_parts, room_of_rows, table_of
from lt_offload.plan.settings import Settings
from lt_offload.plan.windows import (
    adds_up,
    for_one,
    has_windows,
    plan_forwards,
    plan_windows,
    with_sums,
    without_gradients,
)
from lt_offload.schema.explain import OTHER_BITS
from lt_offload.schema.plan import ADDING, Pass, Plan, PlannerName, Prediction
from lt_offload.schema.profile import OptionProfile, Profile
from lt_offload.units import format_bytes, format_seconds

_ASKED_BY_AUTO: dict[PlannerName, Callable[[Request], list[Proposal]]] = {
    "greedy": propose_greedy,
    "l2l": propose_l2l,
}
"""Methods of papers that win where memory is shortest."""
_BY_NAME: dict[PlannerName, Callable[[Request], list[Proposal]]] = {
    "memferry": propose_memferry,
    "pofo": propose_pofo,
}
"""Methods of papers that are asked by name; ``auto`` asks ``memferry`` where nothing else fits."""
_LEAST_S = 1.0
"""Seconds for a second attempt, at least."""
_REACH = 3
"""Steps around a use in which copies run in programs that only compare: fewer than for a plan, as many are solved."""


@checked
def solve(
    profile: Profile,
    *,
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    planner: PlannerName = "auto",
    host_update: bool = True,
    activation_offload: bool = True,
    recompute: bool = True,
    chunked_loss: bool = False,
    gradient_reserve: float | None = None,
    accumulate: int = 1,
    delayed: bool = False,
    solver_time_limit: float = 30.0,
) -> Plan:
    """Return the fastest plan found for ``profile`` within the budgets, checked and simulated.

    Args:
        profile: what model and machine cost.
        memory: device budget, context included, e.g. ``"10GB"``; None: all the device has.
        host_memory: RAM budget; None: all that the profile says may be taken.
        planner: ``auto``: the best of all but ``pofo``, and ``memferry`` only where no other has a plan;
            ``offmate``: the linear program of OFFMATE (2024);
            ``greedy``: some weights travel, after "Weight Offloading Strategies for Training Large DNN Models" (2022);
            ``l2l``: all weights travel, one layer at a time (Pudipeddi et al., 2020);
            ``memferry``: weights are copied, or read in host memory by the device (MemFerry, 2024);
            ``pofo``: weights stay, activations are offloaded or computed again (POFO, NeurIPS 2021);
            ``stream``: all weights and states travel, as in runtimes that do not plan; ``resident``: nothing travels.
        host_update: whether the host may update parameters.
        activation_offload: whether activations may be copied to the host.
        recompute: whether activations may be computed again.
        chunked_loss: whether the output projection and the loss take a few tokens at a time wherever they can, with the
            sums of :func:`lt_offload.chunked_loss_reference`, and not only where nothing else fits.
        gradient_reserve: for ``memferry``: the part of all gradient bytes that the device may hold at a time, between
            0 and 1; the others are written to host memory by the backward itself. None: as much as fits.
        accumulate: micro-batches whose gradients are added up for one update.
        delayed: whether updates wait until all gradients are there, as clipping by their norm needs.
        solver_time_limit: seconds that planning may take, about; the best plan until then is returned, and says what
            was left out.

    Raises:
        InfeasibleError: if no plan fits; says what would.
        UnsupportedError: if there is no such ``planner``, or it does not apply to this model and budget.
        ConfigError: if a size cannot be read, ``memory`` is more than the card has, switches leave a block without
            options, or ``solver_time_limit`` is too short.
    """
    settings = Settings(
        memory=memory,
        host_memory=host_memory,
        planner=planner,
        host_update=host_update,
        activation_offload=activation_offload,
        recompute=recompute,
        chunked_loss=chunked_loss,
        gradient_reserve=gradient_reserve,
        accumulate=accumulate,
        delayed=delayed,
        solver_time_limit=solver_time_limit,
    )
    settings.check_card(profile.hardware)
    return make_plan(profile, settings)


def make_plan(
    profile: Profile,
    settings: Settings,
    *,
    exact: bool = False,
    bounded: bool = True,
    chosen: bool = False,
    table: TiedTable | None = None,
) -> Plan:
    """Return the fastest plan found for ``profile``; the same as :func:`solve`, which lists the errors.

    Args:
        profile: what model and machine cost.
        settings: budgets and switches.
        exact: no plan rather than one that sums in another order than plain PyTorch.
        bounded: False if nobody asks for the plan's lower bound, which may then be that of the computations alone.
        chosen: ``settings`` say whether updates of several processes wait; else the faster plan is returned.
        table: one that the plan has to update in two parts: ``profile`` is one of a head.
    """
    if not chosen and has_choice(profile, settings):
        return plan_processes(profile, settings, partial(make_plan, exact=exact, bounded=bounded, chosen=True))
    # This comes first: each of its forwards becomes a pass, and the plan of passes is made by the rules below.
    if profile.deferred_forwards:
        return plan_forwards(profile, settings, partial(make_plan, exact=exact, chosen=True))
    if has_windows(profile, settings):
        # A plan for windows has a bound of its own.
        one = partial(make_plan, exact=exact, bounded=False, chosen=True)
        return plan_windows(profile, settings, one, partial(least_s, profile, settings))
    if settings.chunked_loss:
        return _as_asked(profile, settings, bounded=bounded, table=table)
    began = time.monotonic()
    # Plain PyTorch's numbers come first: only if nothing else fits may sums be in another order.
    first = with_planned_head(profile, settings)
    try:
        plan = _plan(first, settings, bounded=bounded, table=table)
        return _chunked(plan, profile, "the run began so") if plan.chunk_tokens else plan
    except InfeasibleError as error:
        chunked = _with_chunks_only(profile)
        request = _request(first, settings)
        if exact or chunked is None or not settings.recompute:
            raise
        # Where the RAM is what is missing, chunks do not help.
        if smallest_for(request) is None or fits(request):
            raise
        left = max(settings.solver_time_limit - (time.monotonic() - began), _LEAST_S)
        try:
            plan = _plan(chunked, replace(settings, solver_time_limit=left), bounded=bounded, table=table)
        except InfeasibleError as other:
            # Where neither fits, the error that asks for less memory helps more.
            if (other.needed_bytes or math.inf) < (error.needed_bytes or math.inf):
                raise other from None
            raise error from None
    return _chunked(plan, profile, "nothing else fits")


def _as_asked(profile: Profile, settings: Settings, *, bounded: bool, table: TiedTable | None) -> Plan:
    """Return the plan whose last block is ``chunked``, as ``chunked_loss`` asks; if it cannot be, a note says so."""
    plan = _plan(with_planned_head(profile, settings), settings, bounded=bounded, table=table)
    if plan.chunk_tokens:
        return _chunked(plan, profile, "chunked_loss=True")
    note = (
        "chunked_loss=True has no effect: it needs a step that calls the model once, without autocast, and uses the "
        "logits for the model's own loss alone, weights of float32 or bfloat16, and more tokens than a chunk has"
    )
    return replace(plan, notes=(*plan.notes, note))


def _chunked(plan: Plan, profile: Profile, why: str) -> Plan:
    predicted = replace(plan.predicted, no_offload_s=no_offload_s(profile))
    note = (
        f"{why}: {profile.blocks[-1].name} and the loss take {plan.chunk_tokens} tokens at a time. Its gradient is "
        f"summed chunk by chunk, so that its {OTHER_BITS}; lt_offload.chunked_loss_reference defines them"
    )
    return replace(plan, predicted=predicted, notes=(*plan.notes, note))


def least_s(profile: Profile, settings: Settings) -> float:
    """Return the seconds that no plan for ``profile`` can beat. Costs one linear program.

    Infinity if none fits, 0 if there was no time to find out.
    For a window it is the bound of its mean pass, :class:`lt_offload.plan.planners.offmate.passes.PassProgram`.
    """
    passes = settings.accumulate * profile.forwards
    if settings.chunked_loss:
        profile = with_planned_head(profile, settings)
    program: MakeProgram = LinearProgram
    if profile.forwards > 1 or has_windows(profile, settings):
        program = partial(PassProgram, whole=profile, window=passes)
        ram = settings.host_budget(profile.hardware) - kept_in_ram(profile, passes)
        profile, settings = without_gradients(profile), replace(for_one(settings), host_memory=max(ram, 1))
    return passes * _Selection(profile, settings, program).least_s


def relaxed_s(profile: Profile, settings: Settings, *, exact: bool = False) -> float:
    """Return the seconds of an update in the relaxed program, which plans come near to; infinity if nothing fits.

    Where nothing else fits, the logits may be in chunks, unless it is to be ``exact``.
    """
    seconds = _relaxed_s(with_planned_head(profile, settings), settings)
    return seconds if exact or seconds < math.inf else _relaxed_s(profile, settings)


def _relaxed_s(profile: Profile, settings: Settings) -> float:
    batches = settings.accumulate
    if has_windows(profile, settings):
        profile, settings = with_sums(profile, batches), for_one(settings)
    program = offmate_config(profile, settings, reach=_REACH)
    # Copies that need a step of their own may find no room where memory is tight; then they are hidden altogether.
    for lag in (1, 0):
        try:
            return batches * lower_bound(profile, replace(program, lag=lag, lookahead=lag))
        except (InfeasibleError, ConfigError):
            continue
    return math.inf


def with_planned_head(profile: Profile, settings: Settings) -> Profile:
    """Return ``profile`` with the options of its last block that are planned with first.

    They give plain PyTorch's numbers: all but ``chunked``. With ``chunked_loss`` that one alone, if it is offered; it
    is also in a run that goes on with it, as no other is offered.
    """
    exact = tuple(option for option in profile.blocks[-1].options if option.name != "chunked")
    chunked = _with_chunks_only(profile) if settings.chunked_loss or not exact else None
    return chunked or _with_head(profile, exact)


def _with_chunks_only(profile: Profile) -> Profile | None:
    options = tuple(option for option in profile.blocks[-1].options if option.name == "chunked")
    return _with_head(profile, options) if options else None


def _with_head(profile: Profile, options: tuple[OptionProfile, ...]) -> Profile:
    return replace(profile, blocks=(*profile.blocks[:-1], replace(profile.blocks[-1], options=options)))


def _plan(profile: Profile, settings: Settings, *, bounded: bool, table: TiedTable | None = None) -> Plan:
    """Return the best plan, also of those that update a table of tied embeddings in two parts."""
    if table is not None:
        return _of_tensors(profile, settings, bounded=bounded, table=table)
    index = table_of(profile, settings)
    if index is None:
        return _of_tensors(profile, settings, bounded=bounded)
    # Two plans share the user's time.
    half = replace(settings, solver_time_limit=settings.solver_time_limit / 2)

    def plan_whole() -> Plan | InfeasibleError:
        try:
            return _of_tensors(profile, half, bounded=bounded)
        except InfeasibleError as error:
            return error

    whole = plan_whole() if _all_fits(profile, settings) else None
    if isinstance(whole, Plan) and whole.predicted.gap <= GOOD_GAP:
        return whole
    parted = _parted(profile, half, index, bounded=bounded)
    if whole is None and parted is not None:
        # Where no plan with a whole table can be faster by much, none is looked for.
        bounds, predicted = _Selection(profile, half).bounds, parted.predicted
        least = bounds.below(predicted.iteration_s)
        if not bounds.cut and predicted.iteration_s <= least * (1 + GOOD_GAP):
            return replace(parted, predicted=replace(predicted, lower_bound_s=min(least, predicted.lower_bound_s)))
    with suppress(*(() if parted is None else (ConfigError, UnsupportedError))):  # there is a plan: no other in time
        whole = whole or plan_whole()
    if parted is None and isinstance(whole, InfeasibleError):
        raise whole
    plans = [plan for plan in (whole, parted) if isinstance(plan, Plan)]
    return fastest(plans, proved=whole is not None)


def _all_fits(profile: Profile, settings: Settings) -> bool:
    """Return whether weights and optimizer states may stay on the device, as far as their sizes tell."""
    sizes = (tensor.bytes + tensor.state_bytes for tensor in profile.tensors)
    return sum(sizes) <= settings.device_budget(profile.hardware)


def _parted(profile: Profile, settings: Settings, index: int, *, bounded: bool) -> Plan | None:
    less = replace(settings, host_memory=settings.host.less(room_of_rows(profile, index)))
    try:
        table = TiedTable(index=index, profile=profile)
        plan = _of_tensors(as_head(profile, index), less, bounded=bounded, table=table)
    except (ConfigError, InfeasibleError, UnsupportedError):
        return None
    return priced(replace(plan, host_budget_bytes=settings.host_budget(profile.hardware)), profile)


def _of_tensors(profile: Profile, settings: Settings, *, bounded: bool, table: TiedTable | None = None) -> Plan:
    """Return the best plan whose updates are of whole tensors; ``table``: one that it updates in two parts."""
    selection = _Selection(profile, settings)
    plan = selection.run(bounded=bounded)
    passes: tuple[Pass, ...] = (*ADDING, "settling" if settings.delayed else "updating")
    passes = passes if adds_up(profile) else ONE_BATCH
    if table is None and passes == ONE_BATCH:
        return plan
    best = selection.candidates.best()
    written = best.written(profile, passes) if table is None else in_two_parts(best, profile, table, passes)
    more = plan.notes[len(best.plan.notes) :]
    return replace(written, predicted=plan.predicted, notes=(*written.notes, *more), alternatives=plan.alternatives)


def _request(profile: Profile, settings: Settings) -> Request:
    return Request(
        profile=profile,
        budget_bytes=settings.device_budget(profile.hardware),
        host_budget_bytes=settings.host_budget(profile.hardware),
        allowed=tuple(allowed_options(block, settings) for block in profile.blocks),
        settings=settings,
        deadline=time.monotonic() + settings.solver_time_limit,
    )


def offmate_config(profile: Profile, settings: Settings, *, reach: int) -> OffmateConfig:
    """Return the linear program's configuration; ``reach``: the steps around a use in which its transfers may run."""
    return OffmateConfig(
        budget_bytes=settings.device_budget(profile.hardware),
        host_budget_bytes=settings.host_budget(profile.hardware),
        host_update=settings.host_update,
        activation_offload=settings.activation_offload,
        recompute=settings.recompute,
        time_limit=settings.solver_time_limit,
        reach=reach,
    )


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Make no search for unreachable cycles meanwhile; as it was before, afterwards.

    Planning makes hundreds of thousands of objects, few of which are in cycles, and each thorough search goes through
    everything that torch has loaded as well: a tenth of the time of planning. Objects without cycles are freed as ever.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Selection:
    """One search for the best plan: cheap methods first, and better ones while there is time."""

    def __init__(self, profile: Profile, settings: Settings, program: MakeProgram = LinearProgram) -> None:
        self.request, self.planner = _request(profile, settings), settings.planner
        # Steps around a use in which its transfers may run: fewer where the program is large.
        self.config = offmate_config(profile, settings, reach=6 if len(profile.blocks) <= MANY_BLOCKS else 4)
        self.candidates = Candidates(self.request)
        self.bounds = Bounds(self.request, self.config, self.candidates, program)

    @property
    def profile(self) -> Profile:
        return self.request.profile

    @_collection_paused()
    def run(self, *, bounded: bool = True) -> Plan:
        if not self._ram_suffices():
            raise explain_infeasible(self.request)
        if self.planner in ("auto", "resident"):
            self._add_resident()
        if self.planner in ("auto", "stream"):
            self._add_streaming()
        if not self.candidates.fitting and not self._may_fit():
            raise explain_infeasible(self.request)
        self._improve()
        if not self.candidates.fitting and self.planner in ("auto", "stream"):
            self._add_smallest()
        # More time helps only where there is a plan to find; else it is memory that was to be named.
        if not self.candidates.fitting and self.candidates.out_of_time is not None and fits(self.request):
            raise self.candidates.out_of_time
        if not self.candidates.fitting:
            raise explain_infeasible(self.request)
        return self._best(bounded=bounded)

    @property
    def least_s(self) -> float:
        """Seconds that no plan can beat; infinity if none fits, 0 if there was no time to find out."""
        if not self._ram_suffices():
            return math.inf
        bound = self.bounds.of_program(any_time=True)
        if bound is None and self.bounds.infeasible:
            return self.bounds.computing_s if fits(self.request) else math.inf
        return bound or 0.0

    def _may_fit(self) -> bool:
        # The bound is of a relaxation of every plan, but it counts memory in its own way: what streams with the least
        # memory has the last word on whether anything fits.
        if fits(self.request):
            return True
        self.bounds.of_program(any_time=not self.bounds.copies_are_short)
        return not self.bounds.infeasible

    @property
    def _left(self) -> float:
        return self.request.deadline - time.monotonic()

    # -- candidates --------------------------------------------------------------------------------------------------

    def _improve(self) -> None:
        planner = self.planner
        # A plan comes before its bound, which takes as long to find. What only streams is compared with the bound that
        # costs nothing.
        resident = any(candidate.proposal.name == "resident" for candidate in self.candidates.fitting)
        best, least = self.candidates.fastest_s, self.bounds.computing_s
        near = self.bounds.are_near(best) if resident else best <= least * (1 + GOOD_GAP)
        if planner in ("auto", "offmate") and not near:
            self._add_programs()
        if planner == "auto":
            for name, propose in _ASKED_BY_AUTO.items():
                self._ask(name, propose)
            if not self.candidates.fitting:
                # What the device reads in host memory takes no room: without this, models with large embeddings would
                # be refused that fit.
                self._ask("memferry", propose_memferry)
        elif (method := (_ASKED_BY_AUTO | _BY_NAME).get(planner)) is not None:
            self._ask(planner, method)

    def _ask(self, name: PlannerName, propose: Callable[[Request], list[Proposal]]) -> None:
        """Add the proposals of one planner; only the first if the best plan is near its bound already.

        A planner that was asked for by name does its best, whatever others can do.
        """
        named = self.planner == name
        enough = not named and self.bounds.are_near(self.candidates.fastest_s)
        if not named and self.candidates.fitting and self._left <= 0:
            self.candidates.cut.append(name)
            return
        try:
            proposals = propose(self.request if named else replace(self.request, beat_s=self.candidates.fastest_s))
        except NotApplicable as reason:
            if named:
                raise self._does_not_apply(name, str(reason)) from None
            self.candidates.fail(name, str(reason))
            return
        for proposal in proposals[:1] if enough else proposals:
            self.candidates.add(proposal)

    def _does_not_apply(self, name: PlannerName, reason: str) -> UnsupportedError:
        """Return the error that says why, and what does apply."""
        best = _Selection(self.profile, replace(self.request.settings, planner="auto")).run(bounded=False)
        seconds = format_seconds(best.predicted.iteration_s)
        return UnsupportedError(
            f"planner={name!r} does not apply: {reason}; planner='auto' plans this model in {seconds} per iteration "
            f"({best.planner})"
        )

    def _add_resident(self) -> None:
        for decisions, needed in resident_decisions(self.profile, self.request.allowed):
            if needed <= self.request.budget_bytes:
                self.candidates.add(Proposal(name="resident", sets=Sets(decisions, self.profile)))
                return
        self.candidates.fail("resident", "weights and optimizer states do not fit on the device")

    def _add_streaming(self) -> None:
        """Stream everything, as other runtimes do: to compare with, and so that there soon is a plan."""
        for host_update in (True, False) if self.config.host_update else (False,):
            options = option_sets(self.profile, self.request.allowed)[0]
            sets = Sets(streaming_decisions(self.profile, options, host_update=host_update), self.profile)
            name = f"stream, update on the {'host' if host_update else 'device'}"
            self.candidates.add(Proposal(name=name, sets=sets), careful=self.planner == "stream")

    def _ram_suffices(self) -> bool:
        return smallest_ram(self.profile, self.request.allowed) <= self.request.host_budget_bytes

    def _add_smallest(self) -> None:
        least = smallest_for(self.request)
        if least is not None:
            name = "stream, least memory" if self.planner == "stream" else "least memory"
            self.candidates.add(Proposal(name=name, sets=least))

    def _add_programs(self) -> None:
        self._search_programs(lookups=False)
        # Large embeddings may be what is in the way: they need no room on the device where they are only looked up.
        far = not self.candidates.fitting or self.bounds.are_far(self.candidates.fastest_s)
        if far and lookups(self.profile):
            self._search_programs(lookups=True)
        self._add_read_tables()

    def _search_programs(self, *, lookups: bool) -> None:
        limited = replace(self.config, time_limit=self._left, lookups=lookups)
        search_programs(self.candidates, limited, enough=self.bounds.are_near, far=self.bounds.are_far)

    def _add_read_tables(self) -> None:
        """Let the best plan so far read its embeddings, or all its tables, in host memory instead of copying them."""
        for best in self.candidates.ranked()[:1]:
            for tables, decisions in read_tables(best.proposal.decisions, self.request):
                name = f"{best.proposal.name}, {tables} read directly"
                self.candidates.add(Proposal(name=name, sets=Sets(decisions, self.profile)))

    # -- choice ------------------------------------------------------------------------------------------------------

    def _best(self, *, bounded: bool) -> Plan:
        best = self.candidates.best()
        bound = self.bounds.below(best.seconds) if bounded else self.bounds.computing_s
        prediction = Prediction(
            iteration_s=best.seconds,
            lower_bound_s=min(bound, best.seconds),
            no_offload_s=no_offload_s(self.profile),
            device_peak_bytes=best.trace.device_peak,
            host_peak_bytes=best.trace.host_peak,
            proved=not (bounded and self.bounds.cut),
        )
        notes = list(best.plan.notes)
        if self.candidates.cut:
            limit = f"solver_time_limit={self.request.settings.solver_time_limit:g} s"
            notes.append(f"{limit} ended planning before: {', '.join(dict.fromkeys(self.candidates.cut))}")
        if self.profile.processes > 1:
            notes.append(_for_several(self.profile, best.trace.host_peak))
        hardware = self.profile.hardware
        pinnable, needed = hardware.pinnable_bytes, best.trace.host_peak - hardware.process_bytes
        # Without a limit of its own it is all that was measured as free, of which a host_memory by hand may be more.
        if hardware.host_bytes - hardware.process_bytes > pinnable and needed > pinnable:
            notes.append(
                f"only {format_bytes(pinnable)} of RAM may be pinned of the {format_bytes(needed)} that are needed: "
                f"copies of the other {format_bytes(needed - pinnable)} are slower than predicted"
            )
        return replace(best.plan, predicted=prediction, notes=tuple(notes), alternatives=self.candidates.runners_up())


def _for_several(profile: Profile, ram: int) -> str:
    what = "frozen weights" + (", those that the host updates and their states" if profile.common_updates else "")
    return (
        f"RAM is that of one of {profile.processes} processes, {format_bytes(profile.processes * ram)} for all: of "
        f"what they have in common ({what}) each counts its part"
    )
