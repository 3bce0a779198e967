"""The plan of one iteration, made by planning and carried out by execution. Frozen data, JSON both ways.

**Timeline.** A plan lists the *steps* of its iteration: the forward or the backward of one block. It is cyclic: what is
resident at the start of the first step is resident again after the last.

**Tensor groups.** Weights, optimizer states or gradients that are in the same ops through the whole iteration are one
:class:`TensorGroup`: they lie side by side in the arena, in the order of the group, and on the host; one copy moves
them. Ops name groups.

**Ops** stand in *issue order*; their id is their position. Within a step the order is

1. ``prefetch`` ops: device memory is taken, then the copies are queued in this order;
2. (backward) forwards that run again, ascending; then the step's one ``forward`` or ``backward`` op;
3. (backward) ``offload`` of gradients and ``update`` or ``accumulate`` on the device, carried out tensor by tensor as
   each gradient is complete, and the ops of the host and the network that become possible with this step's gradients;
4. other ``offload`` ops (saved activations, updated weights, states), then ``drop`` ops.

``Op.after`` are ids of ops that must have ended before this one starts; an id that is not smaller than the op's own
means the previous iteration. Because every op depends only on ops issued before it, a plan that passes
:func:`lt_offload.plan.check` cannot deadlock.

Each lane works through its ops in the order of issue, except ``host``: of the updates whose gradients have arrived it
takes the one that is needed first (:func:`deadlines`). Gradients arrive in the order opposite to that in which the next
forward needs the weights; in order of arrival, the first blocks would wait for all updates.

Groups of gradients share host memory (``TensorGroup.host_offset``): each has a place of its own from its copy to the
update that reads it, and the next copy to any of those addresses is ordered ``after`` that update.

A forward that runs again (``Op.save`` is not None) takes its block's saved input, or the output of the forward of the
block before if that is the op right before it, and draws the random numbers of the first run again. What it saves
replaces what the block had saved. A block of option ``discard`` has saved nothing until a forward of it runs again.

A computation may read some weights directly in host memory (``Op.zero_copy``): they need no device copy for it, and
what it reads crosses the link to the device while it runs. An ``offload`` of gradients on the ``compute`` lane is the
same the other way: the backward itself writes them to host memory, tensor by tensor, and nothing is held afterwards.

A table of rows that the first block looks up and the last one multiplies with (tied embeddings) may be updated in two
parts (``Op.rows``). The gradient of the last block's backward is sent at once and complete for all rows that the batch
does not look up (``others``): they are updated then. Rows that it does (``looked up``) get the sum of both gradients:
that of the first block, one row per token, is sent at the end, added on the host, and the update of these few rows
follows. The first block reads the table directly. In windows each pass adds up both; updates that wait are whole.

**Windows.** A plan of ``window`` above 1 serves any number of micro-batches per update. Each is one *pass* through the
timeline: the first is *beginning*, those behind it are *accumulating*, the last one is *updating*, and all begin and
end with the same groups at the same places, so that they may follow each other in any order. ``Op.passes`` says
which kinds of passes carry an op out. Gradients are added up in groups of payload ``sum``:
they are where the states of their tensors are, so that whoever updates finds them. In a beginning pass gradients for
the host are copied to where their sums are (:meth:`Plan.begins_sums`): the first gradient is the sum so far. An
``accumulate`` adds the gradients of a later pass to them; on the device it begins with those of the first, too. An
``update`` adds the last ones and uses the sums up. ``Op.after`` means the latest
issue of the other op, in whichever pass that was.

Where updates wait until all gradients are there (``Plan.delayed``), because their norm decides about them, every
micro-batch is a beginning or an accumulating pass, and a *settling* pass follows: updates, and copies of what they
need, without computations and gradients. Its updates use the sums as they are, and wait for all of them.

With several machines, the sums of each block for updates on the host go over the network as soon as they are complete:
a ``reduce`` makes them those of all processes. It is listed in every pass that adds up, and carried out in the last.

Device memory is two pools: the *arena* holds weights and optimizer states at offsets fixed by the plan, everything else
(activations, gradients, workspaces) is allocated as the framework goes. Arena memory released by an op may be reused by
any op issued later; the later op is ordered after the release by events.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Literal

from lt_offload.schema.files import Strict, load_json, save_json
from lt_offload.schema.lanes import LANES, LaneName, OpKind
from lt_offload.schema.profile import WITH_LOSS, OptionName

PLAN_SCHEMA = 4
ALIGNMENT = 512
"""Every arena offset is a multiple of this many bytes."""

Payload = Literal["weight", "grad", "state", "sum", "activation"]
Pass = Literal["beginning", "accumulating", "updating", "settling"]
"""Kinds of passes: three of a micro-batch, by the use of its gradients; the updates after all of them."""
ADDING: tuple[Pass, ...] = ("beginning", "accumulating")
"""Passes that leave their gradients in sums."""
Rows = Literal["others", "looked up"]
"""Rows of a table that a batch does not look up, whose gradient is the last block's alone, and those that it does."""
UpdatePlace = Literal["device", "paged", "host", "none"]
PlannerName = Literal["auto", "offmate", "stream", "greedy", "l2l", "memferry", "pofo", "resident"]
Save = Literal["nothing", "input", "all"]
"""Tensors that a forward saves: ``input`` the block's input, ``all`` everything that its backward needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Strict):
    """One forward or backward of a block."""

    kind: Literal["forward", "backward"]
    block: int


def one_batch(blocks: int) -> tuple[Step, ...]:
    """Return the timeline of an iteration over one batch: every forward, then every backward, the last block first."""
    forward = [Step(kind="forward", block=block) for block in range(blocks)]
    return (*forward, *(Step(kind="backward", block=block) for block in reversed(range(blocks))))


class Timeline:
    """The steps of an iteration, with the position of each block's forward and backward."""

    __slots__ = ("_positions", "steps")

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        self._positions = {(step.kind, step.block): index for index, step in enumerate(steps)}

    def __len__(self) -> int:
        return len(self.steps)

    def forward(self, block: int) -> int:
        """Return the step of a block's forward."""
        return self._positions["forward", block]

    def backward(self, block: int) -> int:
        """Return the step of a block's backward."""
        return self._positions["backward", block]

    def block(self, step: int) -> int:
        """Return the block that ``step`` computes."""
        return self.steps[step].block

    def is_backward(self, step: int) -> bool:
        """Return whether ``step`` is a backward."""
        return self.steps[step].kind == "backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup(Strict):
    """Weights, optimizer states, gradients or sums of them that are in the same ops and travel in one copy."""

    payload: Literal["weight", "state", "sum", "grad"]
    tensors: tuple[int, ...]
    """Indices into ``Profile.tensors``, in the order in which they lie side by side."""
    sizes: tuple[int, ...]
    """Bytes that each takes of the arena, or of the host memory of gradients: multiples of ``ALIGNMENT``."""
    span: int = 0
    """Groups of weights, and of states, that have the same number stand side by side in host memory, in their order:
    where they do so in the arena, too, one copy moves them all."""
    host_offset: int | None = None
    """Address of copied gradients in the host memory that all such groups share. None: they are copied to where their
    sums are."""

    @property
    def bytes(self) -> int:
        """Bytes that it takes of the arena, or of the host memory of gradients."""
        return sum(self.sizes)

    def offsets(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield each tensor and its offset in a group that begins at ``start``."""
        return zip(self.tensors, accumulate(self.sizes, initial=start), strict=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Op(Strict):
    """One operation of the plan."""

    id: int
    kind: OpKind
    step: int
    """The position in ``Plan.timeline`` of the step during which it is issued."""
    block: int
    """The block it serves."""
    lane: LaneName
    """The lane it occupies; ``none`` for drops. An offload of gradients on ``compute`` is written by the backward
    itself."""
    payload: Payload | None = None
    """Kind of tensors that are copied or dropped; None for computations and updates."""
    groups: tuple[int, ...] = ()
    """Indices into ``Plan.groups``. Of an update: the weights that it changes; it runs as the gradient of each is
    complete, or has arrived. Empty for computations and activations (those belong to ``block``)."""
    offsets: tuple[int, ...] = ()
    """Arena offset per group, for prefetches of weights and states."""
    bytes: int = 0
    """Bytes copied or dropped; for computations, bytes they read directly in host memory; for reductions, the sums."""
    seconds: float = 0.0
    """Expected duration on its lane."""
    after: tuple[int, ...] = ()
    release_after: int | None = None
    """For offloads: the step at whose end the device memory is given back. None: the device copy stays."""
    save: Save | None = None
    """Tensors saved by a forward that runs again in a backward step. None: a first forward saves by its option."""
    zero_copy: tuple[int, ...] = ()
    """For computations: the groups of weights that they read in host memory."""
    passes: tuple[Pass, ...] = ("updating",)
    """The kinds of passes that carry it out, in the order of ``Plan.passes``."""
    rows: Rows | None = None
    """For gradients and updates of a table that is updated in two parts; None: all of the tensor at once."""

    @property
    def label(self) -> str:
        """Name for people, e.g. ``"prefetch weight 4"`` or ``"forward 3 again"``."""
        words = " ".join(part for part in (self.kind, self.payload, str(self.block)) if part)
        if self.save is not None:
            words += " again"
        if self.rows is not None:
            words += f", rows {self.rows}" if self.rows == "looked up" else ", other rows"
        return f"{words}, direct" if self.zero_copy or self.writes_gradients else words

    @property
    def computes(self) -> bool:
        """True for a forward, also one that runs again, and for a backward."""
        return self.kind in ("forward", "backward")

    @property
    def writes_gradients(self) -> bool:
        """True for gradients that the backward itself writes to host memory."""
        return self.payload == "grad" and self.lane == "compute"

    @property
    def sends_gradients(self) -> bool:
        """True for a copy of gradients to the host."""
        return self.payload == "grad" and self.lane != "compute"

    @property
    def updates(self) -> bool:
        """True for an update of weights."""
        return self.kind == "update"

    @property
    def updates_on_host(self) -> bool:
        """True for an update by the host."""
        return self.updates and self.lane == "host"

    @property
    def uses_gradients(self) -> bool:
        """True if the op adds gradients up or updates with them."""
        return self.kind in ("update", "accumulate")


def describe(op: Op) -> str:
    """Return the name of ``op`` in errors."""
    return f"op {op.id} ({op.label}, step {op.step})"


def deadlines(ops: Sequence[Op]) -> dict[int, int]:
    """Return, per op on the host's lane, the position of the first op that waits for it.

    That may be a copy of gradients to the memory that the update reads: an update that makes room for others is taken
    before one that only the next forward needs.

    Positions count on into the next iteration: a value of ``len(ops)`` or more means an op of that.
    """
    first: dict[int, int] = {}
    for op in ops:
        for other in op.after:
            if ops[other].lane == "host" and op.lane != "host":
                # A number that is not smaller is of the iteration before: seen from there, this op is in the next.
                position = op.id if other < op.id else op.id + len(ops)
                first[other] = min(position, first.get(other, position))
    return first


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialCopy(Strict):
    """A group of weights or states that is on the device at the start of the first step."""

    group: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction(Strict):
    """The simulator's figures for a plan; times in seconds, sizes in bytes."""

    iteration_s: float
    lower_bound_s: float
    """No plan under these budgets is faster, whichever method makes it: the value of a relaxed program without barriers
    between steps. It leaves out copies outside the windows around uses (less than 0.01 %) and what is read in RAM."""
    no_offload_s: float
    """The same iteration on a device with enough memory: everything kept, device update."""
    device_peak_bytes: int
    host_peak_bytes: int
    proved: bool = True
    """False where time was up: the lower bound is that of the computations alone, and the gap to it says little."""

    @property
    def gap(self) -> float:
        """Relative distance to the lower bound, e.g. 0.02 for 2 %."""
        return self.iteration_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative(Strict):
    """A candidate that was generated and not chosen."""

    planner: str
    iteration_s: float | None
    """None if it was not feasible."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPoint(Strict):
    """One update that was considered when the plan's was chosen."""

    batch_size: int
    parts: int = 1
    """Parts of a batch that go through each block in turn."""
    accumulate: int = 1
    """Batches per update."""
    samples_per_s: float | None = None
    """Simulated; None if there is no plan for it."""
    iteration_s: float | None = None
    """Of an update."""
    device_peak_bytes: int | None = None
    relaxed_samples_per_s: float | None = None
    """Speed of the relaxed program's solution, which plans come near to; None: not solved, or it does not fit."""
    reason: str = ""
    """The reason for or against it."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plan(Strict):
    """One planned iteration. See the module's first lines for what the ops mean."""

    fingerprint: str
    """``Profile.fingerprint`` of the model it was made for."""
    model: str
    planner: str
    batch_size: int
    sequence_length: int
    budget_bytes: int
    host_budget_bytes: int
    options: tuple[OptionName, ...]
    """Activation option per block."""
    update_places: tuple[UpdatePlace, ...]
    """Per tensor; ``none`` for frozen tensors."""
    timeline: tuple[Step, ...]
    """The steps of an iteration, in their order."""
    groups: tuple[TensorGroup, ...]
    """Every weight is in one group; states are if they are ever on the device, gradients if they go to the host."""
    initial: tuple[InitialCopy, ...]
    ops: tuple[Op, ...]
    """All ops of all kinds of passes, each once, in the order of issue."""
    arena_bytes: int
    """Extent of the arena; the rest of the budget is for activations, gradients and workspaces."""
    predicted: Prediction
    gradient_bytes: int = 0
    """Extent of the host memory to which gradients are copied; see ``TensorGroup.host_offset``."""
    estimated: bool = False
    """True if the profile was an estimate."""
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    batch_curve: tuple[BatchPoint, ...] = ()
    """Throughput against samples per update, ascending, if these were chosen with the plan."""
    host_threads: int = 0
    """Threads with which the host shall update; 0: as many as torch uses, or the plan does not say."""
    host_kernel: bool = False
    """True if the compiled kernel of AdamW updates on the host, as far as the profile knew."""
    context_bytes: int = 0
    """Device memory that is left to the context and to workspaces of libraries; 0 in plans that do not say."""
    process_bytes: int = 0
    """RAM that the process takes before the first tensor; part of what the plan needs. 0 in plans that do not say."""
    window: int = 1
    """Passes per update that it was made for. With more than one it serves any number; see the first lines."""
    forwards: int = 1
    """Calls of the model with gradients per micro-batch, each of which is a pass."""
    deferred_forwards: int = 0
    """Number of them whose backward waits for other forwards; each of these runs again then."""
    delayed: bool = False
    """True: updates wait until all gradients are complete, as clipping by their norm needs."""
    graphed: tuple[int, ...] = ()
    """Blocks that always run with a graph, as torch would take other kernels without."""
    chunk_tokens: int = 0
    """Tokens of which the last block has logits at a time, if it is ``chunked``: they decide about last bits."""
    flops_per_token: float = 0.0
    """As in the profile."""
    peak_flops_per_s: float = 0.0
    """Likewise."""
    parts: int = 1
    """Parts of a batch that go through each block in turn, before the next block begins; one step and one computation
    of the plan are all of them."""
    tile_tokens: int = 0
    """As in the profile: it decides about last bits."""
    processes: int = 1
    """Processes on all machines that carry the plan out at the same time, each with batches of its own."""
    schema: int = PLAN_SCHEMA

    @property
    def accumulate(self) -> int:
        """Micro-batches per update that it was made for, as the setting says it; ``parts`` are within each."""
        return self.window // self.forwards

    @property
    def samples_per_s(self) -> float:
        """Samples trained per second in all processes, as simulated; 0 if it was not."""
        seconds = self.predicted.iteration_s
        return self.processes * self.batch_size * self.accumulate / seconds if seconds else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all processes, padding included; None where that is not known.

        What has no length has no tokens, and of several forwards only the largest one's length is known.
        """
        known = self.sequence_length > 1 and self.forwards == 1 and self.predicted.iteration_s
        return self.samples_per_s * self.sequence_length if known else None

    @property
    def peak_share(self) -> float | None:
        """The arithmetic that training needs by what the devices are specified for, as simulated; None if unknown.

        The model FLOPs utilisation of Chowdhery et al., PaLM (2022), appendix B: recomputation counts as time only.
        """
        needed, peak = (self.tokens_per_s or 0.0) * self.flops_per_token, self.processes * self.peak_flops_per_s
        return needed / peak if needed and peak else None

    @property
    def busy(self) -> dict[LaneName, float]:
        """Part of an iteration for which each lane is busy, as simulated, without what lanes take from each other."""
        seconds: dict[LaneName, float] = {}
        for op, count in zip(self.ops, self.counts, strict=True):
            seconds[op.lane] = seconds.get(op.lane, 0.0) + count * op.seconds
        whole = self.predicted.iteration_s
        return {lane.name: seconds[lane.name] / whole for lane in LANES if whole and seconds.get(lane.name)}

    @property
    def adds_up(self) -> bool:
        """True if gradients are added up in sums."""
        return self.window > 1 or self.delayed

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The kinds of passes that it has, the one with the updates last."""
        if self.delayed:
            return (*ADDING, "settling")
        return (*ADDING, "updating") if self.adds_up else ("updating",)

    @property
    def adding(self) -> int:
        """Passes per update that only add up: where updates wait, all but a settling pass that comes on top."""
        return self.window if self.delayed else self.window - 1

    def program(self, which: Pass) -> list[Op]:
        """Return the ops of a kind of pass, in the order of issue."""
        return [op for op in self.ops if which in op.passes]

    @property
    def counts(self) -> tuple[int, ...]:
        """Times that an iteration, up to an update, carries out each op."""
        times = {"beginning": 1, "accumulating": self.adding - 1}
        counts = (sum(times.get(which, 1) for which in op.passes) for op in self.ops)
        return tuple(1 if op.kind == "reduce" else count for op, count in zip(self.ops, counts, strict=True))

    @property
    def unit(self) -> str:
        """The work up to an update, in words, e.g. ``"iteration"`` or ``"window of 4 micro-batches"``."""
        return "iteration" if self.accumulate == 1 else f"window of {self.accumulate} micro-batches"

    def begins_sums(self, op: Op) -> bool:
        """Return whether ``op`` copies gradients to where their sums are on the host."""
        return op.sends_gradients and all(self.groups[group].host_offset is None for group in op.groups)

    def tensors(self, op: Op) -> tuple[int, ...]:
        """Return the tensors of the groups that ``op`` names."""
        return tuple(tensor for group in op.groups for tensor in self.groups[group].tensors)

    def zero_copy(self, op: Op) -> tuple[int, ...]:
        """Return the tensors that ``op`` reads in host memory, ascending."""
        return tuple(sorted(tensor for group in op.zero_copy for tensor in self.groups[group].tensors))

    def save(self, path: str | Path) -> Path:
        """Write JSON."""
        return save_json(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read JSON; raises ``PlanError`` if it is not a plan of this schema version."""
        return load_json(cls, path, schema=PLAN_SCHEMA, problems=problems)

    def explain(self) -> str:
        """Return a table of the tensors that stay, travel, are recomputed and updated, and of the predictions."""
        from lt_offload.schema.explain import explain

        return explain(self)

    def __repr__(self) -> str:
        """Return one line; all of a plan is a hundred pages."""
        from lt_offload.schema.explain import headline

        return f"<Plan for {self.model}: {headline(self)}>"

    def _repr_html_(self) -> str:
        from lt_offload.schema.explain import brief

        return f'<pre style="white-space:pre-wrap">{escape(brief(self))}</pre>'


def problems(plan: Plan) -> Iterator[str]:
    """Yield the contradictions in ``plan``, one sentence each; nothing if it is sound."""
    tensors = len(plan.update_places)
    for name, value in (("batch_size", plan.batch_size), ("sequence_length", plan.sequence_length)):
        if value < 1:
            yield f"{name} is {value}, it has to be positive"
    predicted = plan.predicted
    sizes = [plan.budget_bytes, plan.host_budget_bytes, plan.arena_bytes, plan.gradient_bytes]
    sizes += [predicted.device_peak_bytes, predicted.host_peak_bytes]
    if min(sizes) < 0 or min(predicted.iteration_s, predicted.lower_bound_s, predicted.no_offload_s) < 0:
        yield "a size or time is negative"
    if plan.window < 1:
        yield f"window is {plan.window}, it has to be at least 1"
    # A window counts passes, and every forward of a micro-batch is one.
    if plan.forwards < 1 or plan.window % plan.forwards or not 0 <= plan.deferred_forwards <= plan.forwards:
        yield f"window {plan.window}, forwards {plan.forwards} and deferred_forwards {plan.deferred_forwards} differ"
    if plan.parts < 1:
        yield f"parts is {plan.parts}, it has to be at least 1"
    if plan.parts > 1 and plan.deferred_forwards:
        yield f"parts is {plan.parts} and deferred_forwards {plan.deferred_forwards}, which cannot be combined"
    if not plan.options:
        yield "it has no blocks"
    # No other block's output is what the loss is made of.
    if any(option in WITH_LOSS for option in plan.options[:-1]):
        yield f"{' and '.join(WITH_LOSS)} are options of the last block only"
    if ("chunked" in plan.options) is not (plan.chunk_tokens > 0):
        yield f"chunk_tokens is {plan.chunk_tokens}, which has to be positive with option chunked and 0 without"
    for number, step in enumerate(plan.timeline):
        if not 0 <= step.block < len(plan.options):
            yield f"timeline.{number}: the {step.kind} of block {step.block}, there are {len(plan.options)} blocks"
    for number, group in enumerate(plan.groups):
        if not group.tensors or len(group.sizes) != len(group.tensors):
            yield f"groups.{number}: {len(group.sizes)} sizes for {len(group.tensors)} tensors"
        if any(not 0 <= tensor < tensors for tensor in group.tensors):
            yield f"groups.{number}: it has tensors that do not exist, there are {tensors}"
        if any(size < 0 for size in group.sizes) or (group.host_offset or 0) < 0:
            yield f"groups.{number}: a size is negative"
    for number, copy in enumerate(plan.initial):
        if not 0 <= copy.group < len(plan.groups) or copy.offset < 0:
            yield f"initial.{number}: group {copy.group} at {copy.offset}, there are {len(plan.groups)} groups"
    for position, op in enumerate(plan.ops):
        yield from (f"{describe(op)}: {problem}" for problem in _of_op(op, position, plan))


def _of_op(op: Op, position: int, plan: Plan) -> Iterator[str]:
    steps, blocks = len(plan.timeline), len(plan.options)
    if op.id != position:
        yield f"ids: it stands at position {position}"
    if not 0 <= op.step < steps or not 0 <= op.block < blocks:
        yield f"step {op.step} of block {op.block}: there are {steps} steps and {blocks} blocks"
    if op.release_after is not None and not op.step <= op.release_after < steps:
        yield f"release_after: step {op.release_after} is not one of the rest of the iteration"
    if not op.passes or not {*op.passes} <= {*plan.passes}:
        yield f"passes {', '.join(op.passes)}, the plan has {', '.join(plan.passes)}"
    groups = (*op.groups, *op.zero_copy)
    if any(not 0 <= group < len(plan.groups) for group in groups):
        # All that follows looks groups up.
        yield f"groups: it names some that do not exist, the plan has {len(plan.groups)}"
        return
    if any(not 0 <= other < len(plan.ops) for other in op.after):
        yield f"after: it waits for ops that do not exist, the plan has {len(plan.ops)}"
    # Not a number fails here, too: it compares with nothing.
    if not 0 <= op.seconds < math.inf:
        yield f"seconds: {op.seconds} is no time"
    if op.bytes < 0:
        yield f"bytes: {op.bytes} is no size"
    # Computations and updates name the weights that they read or change.
    if any(plan.groups[group].payload != (op.payload or "weight") for group in groups):
        yield f"groups: it names some of another payload than {op.payload or 'weight'}"
    if len(set(op.groups)) < len(op.groups) or len(set(op.zero_copy)) < len(op.zero_copy):
        yield "groups: it names one twice"
    # Activations have no group: they come back to wherever the framework has room.
    if len(op.offsets) != (len(op.groups) if op.kind == "prefetch" else 0):
        yield f"offsets: {len(op.offsets)} for {len(op.groups)} groups"
    if any(offset % ALIGNMENT or offset < 0 for offset in op.offsets):
        yield f"offsets: they have to be multiples of {ALIGNMENT}"
