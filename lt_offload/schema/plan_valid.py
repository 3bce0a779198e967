"""Whether a plan from a file agrees with itself, so that it can be shown, drawn and compared with a profile.

Whether it may be carried out is more than that, and needs a profile: :mod:`lt_offload.plan.verify.check`.
"""

from __future__ import annotations

from collections.abc import Iterator

from lt_offload.schema.plan import Op, Plan


def problems(plan: Plan) -> Iterator[str]:
    """Yield what contradicts itself in ``plan``, one sentence each; nothing if it is sound."""
    tensors = len(plan.update_places)
    for name, value in (("batch_size", plan.batch_size), ("sequence_length", plan.sequence_length)):
        if value < 1:
            yield f"{name} is {value}, it has to be positive"
    predicted = plan.predicted
    sizes = [plan.budget_bytes, plan.host_budget_bytes, plan.arena_bytes, plan.gradient_bytes]
    sizes += [predicted.device_peak_bytes, predicted.host_peak_bytes]
    if min(sizes) < 0 or min(predicted.iteration_s, predicted.lower_bound_s, predicted.no_offload_s) < 0:
        yield "a size or time is negative"
    if not plan.options:
        yield "it has no blocks"
    for number, step in enumerate(plan.timeline):
        if not 0 <= step.block < len(plan.options) or step.micro_batch < 0:
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
    unsound = False
    for position, op in enumerate(plan.ops):
        for problem in _of_op(op, position, plan):
            unsound = True
            yield f"ops.{position}: {problem}"
    if not unsound:
        try:
            assert plan.packing is not None
        except KeyError as error:
            yield f"ops: group {error.args[0]} leaves the device without being there"


def _of_op(op: Op, position: int, plan: Plan) -> Iterator[str]:
    steps, blocks = len(plan.timeline), len(plan.options)
    if op.id != position:
        yield f"its id is {op.id}"
    if not 0 <= op.step < steps or not 0 <= op.block < blocks:
        yield f"step {op.step} of block {op.block}, there are {steps} and {blocks}"
    if op.release_after is not None and not 0 <= op.release_after < steps:
        yield f"release_after step {op.release_after}, there are {steps}"
    groups = (*op.groups, *op.zero_copy)
    if any(not 0 <= group < len(plan.groups) for group in groups):
        yield f"it names groups that do not exist, there are {len(plan.groups)}"
        return
    if any(not 0 <= other < len(plan.ops) for other in op.after):
        yield "it waits for ops that do not exist"
    if op.bytes < 0 or op.seconds < 0 or any(offset < 0 for offset in op.offsets):
        yield "a size or time is negative"
    if any(plan.groups[group].payload != (op.payload or "weight") for group in groups):
        yield f"it names groups of another payload than {op.payload or 'weight'}"
    if op.payload in ("weight", "state") and op.kind == "prefetch" and len(op.offsets) != len(op.groups):
        yield f"{len(op.offsets)} offsets for {len(op.groups)} groups"
