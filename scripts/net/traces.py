"""What the engine asks of a device, call by call, in each kind of pass of plans that use all of its ways.

The device is the emulated one with lanes that run as late as possible, so that nothing depends on the clock. The plans
are made from a configuration, for a machine whose speeds fit a model of a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from typing_extensions import override

from lt_offload import profile_config, solve
from lt_offload.execute.device.base import Buffer, Cell, Event
from lt_offload.execute.device.lanes import Lane
from lt_offload.execute.engine import Engine
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.support import models
from tests.support.engines import make_optimizer
from tests.support.hostile.device import HostileDevice
from tests.support.profiles.golden_plans import clock_stopped

FAMILY = "llama-tied"
WINDOWS = 3
"""Of each plan: optimizer states are made in the first, copies that the last one has left are found in the second, and
the third begins as the second does."""
CLIP_NORM = 0.1
VALIDATION, OUTSIDE = "validation", "between passes"
"""What no plan says: forwards without gradients, and what is done before, between and after passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan to trace."""

    settings: dict[str, Any]
    """What is asked of the planner."""
    share: float
    """The budget, as a part of what everything takes."""
    has: Callable[[Plan], bool]
    """Whether a plan has what the case is there for."""
    parts: int = 1
    """In how many parts blocks take a batch."""


def _uses(*words: str) -> Callable[[Plan], bool]:
    """Return whether a plan has these options, places and passes."""
    return lambda plan: set(words) <= {*plan.options, *plan.update_places, *plan.passes}


def _reads_directly(plan: Plan) -> bool:
    return any(op.zero_copy for op in plan.ops)


CASES = {
    "resident": Case(settings={"planner": "resident"}, share=1.5, has=_uses("keep", "device")),
    "stream": Case(settings={"planner": "stream"}, share=0.6, has=_uses("offload", "paged")),
    # This model waits for launches, so that all options and places take as long: inputs leave, and the host updates,
    # where the device lacks the room.
    "reload": Case(settings={"planner": "greedy"}, share=0.27, has=_uses("reload", "host")),
    "recompute": Case(settings={"activation_offload": False}, share=0.3, has=_uses("recompute", "host")),
    "offload": Case(settings={"recompute": False, "host_update": False}, share=0.4, has=_uses("offload", "paged")),
    "direct": Case(settings={"planner": "memferry", "gradient_reserve": 0.0}, share=0.4, has=_reads_directly),
    "accumulate": Case(
        settings={"planner": "l2l", "accumulate": 2}, share=0.6, has=_uses("accumulating", "updating", "host")
    ),
    "accumulate-paged": Case(
        settings={"accumulate": 2, "host_update": False}, share=0.5, has=_uses("accumulating", "updating", "paged")
    ),
    "clip": Case(settings={"planner": "stream", "delayed": True}, share=0.3, has=_uses("settling", "offload", "host")),
    "accumulate-clip": Case(
        settings={"planner": "offmate", "accumulate": 2, "delayed": True, "activation_offload": False},
        share=0.5,
        has=_uses("accumulating", "settling", "recompute", "host"),
    ),
    "accumulate-clip-paged": Case(
        settings={"accumulate": 2, "delayed": True, "host_update": False},
        share=0.5,
        has=_uses("accumulating", "settling", "paged"),
    ),
    "parts": Case(settings={"planner": "stream"}, share=0.6, parts=2, has=lambda plan: plan.parts == 2),
}


@dataclass(frozen=True, slots=True)
class Call:
    """Something that was asked of the device."""

    place: str
    """In which pass."""
    kind: str
    """A lane, or ``wait``, ``mark``, ``place``, ``free``."""
    op: int
    """Of the plan; -1: none."""
    text: str


class RecordingDevice(HostileDevice):
    """Writes down what is asked of it."""

    def __init__(self, budget: int) -> None:
        self.calls: list[Call] = []
        self.during = OUTSIDE
        super().__init__(budget, "lazy", check=True)

    def _note(self, kind: str, text: str, op: int = -1) -> None:
        self.calls.append(Call(self.during, kind, op, text))

    @override
    def submit(
        self,
        lane: Lane,
        task: Callable[[], None],
        *,
        after: Sequence[Event] = (),
        reads: Sequence[Cell] = (),
        writes: Sequence[Cell] = (),
        label: str = "",
        op: int = -1,
        nbytes: int = 0,
        urgency: int = 0,
    ) -> Event:
        text = f"{label}, {nbytes} bytes, urgency {urgency}, after {_labels(after)}"
        self._note(lane, f"{text}, {_accesses(reads, writes)}", op)
        return super().submit(
            lane,
            task,
            after=after,
            reads=reads,
            writes=writes,
            label=label,
            op=op,
            nbytes=nbytes,
            urgency=urgency,
        )

    @override
    def begin_compute(self, op: int, label: str) -> object:
        self._note("compute", label, op)
        return super().begin_compute(op, label)

    @override
    def wait(self, *events: Event, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> None:
        self._note("wait", f"for {_labels(events)}, {_accesses(reads, writes)}")
        super().wait(*events, reads=reads, writes=writes)

    @override
    def mark(self, *, reads: Sequence[Cell] = (), writes: Sequence[Cell] = ()) -> Event:
        self._note("mark", _accesses(reads, writes))
        return super().mark(reads=reads, writes=writes)

    @override
    def place(self, offset: int, nbytes: int, label: str = "") -> Buffer:
        self._note("place", f"{label} at {offset}, {nbytes} bytes")
        return super().place(offset, nbytes, label)

    @override
    def free(self, buffer: Buffer, after: Sequence[Event] = ()) -> None:
        self._note("free", f"{buffer.label} after {_labels(after)}")
        super().free(buffer, after)


def _labels(named: Sequence[Any]) -> str:
    return f"[{', '.join(item.label for item in named)}]"


def _accesses(reads: Sequence[Cell], writes: Sequence[Cell]) -> str:
    return f"reads {_labels(reads)}, writes {_labels(writes)}"


@cache
def profile(parts: int = 1) -> Profile:
    """Return what the model costs on a slow machine without a context, with batches in ``parts``."""
    hardware = replace(
        load_hardware("rtx-3060-12gb"),
        context_bytes=0,
        process_bytes=0,
        h2d_bytes_per_s=1e9,
        d2h_bytes_per_s=1e9,
        flops_per_s={"float32": 1e12},
        device_memory_bytes_per_s=1e11,
    )
    config = models.build(FAMILY).config
    return profile_config(config, batch_size=2, sequence_length=12, hardware=hardware, micro_batches=parts)


def planned(case: Case) -> Plan:
    """Return the plan of ``case``, which has what the case is there for."""
    found = profile(case.parts)
    weights = sum(2 * tensor.bytes + tensor.state_bytes for tensor in found.tensors)
    everything = weights + sum(block.option("keep").saved_bytes for block in found.blocks) + found.shared_bytes
    with clock_stopped():
        plan = solve(found, memory=int(case.share * everything), solver_time_limit=1e6, **case.settings)
    assert case.has(plan), f"{case.settings}: {plan.planner}, {plan.options}, {plan.update_places}, {plan.passes}"
    return plan


def traced(plan: Plan) -> list[Call]:
    """Train ``plan``'s model for a few windows with a validation after each; return what was asked of the device."""
    model = models.build(FAMILY)
    optimizer = make_optimizer(model, "adamw-fused")
    device = RecordingDevice(plan.budget_bytes)
    engine = Engine(model, optimizer, plan, device)
    batch = partial(models.batch, model)
    accumulate = plan.accumulate
    try:
        engine.install()
        engine.follow(optimizer)
        for window in range(WINDOWS):
            if plan.window > 1:
                engine.accumulate = accumulate
            for at in range(accumulate):
                last = at == accumulate - 1 and not plan.delayed
                which = "updating" if last else "accumulating" if at else plan.passes[0]
                device.during = f"window {window}, batch {at}, {which}"
                with device.accounting():
                    (model(**batch(seed=at)).loss / accumulate).backward()
            device.during = f"window {window}, {'settling' if plan.delayed else 'step'}"
            if plan.delayed:
                engine.clip_grad_norm_(CLIP_NORM)
            with device.accounting():
                optimizer.step()
            optimizer.zero_grad()
            device.during = f"window {window}, {VALIDATION}"
            with torch.no_grad():
                model(**batch(seed=WINDOWS))
        device.during = OUTSIDE
        engine.drain()
    finally:
        engine.remove()
        device.close()
    return device.calls


def text(case: Case) -> str:
    """Return the trace of ``case``, a line per call under a heading per pass."""
    lines: list[str] = []
    during = ""
    for call in traced(planned(case)):
        if call.place != during:
            during = call.place
            lines.append(f"# {during}")
        lines.append(f"{call.kind}: {f'op {call.op}, ' if call.op >= 0 else ''}{call.text}")
    return "\n".join(lines) + "\n"
