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
    sizes = (plan.budget_bytes, plan.host_budget_bytes, plan.arena_bytes, *plan.state_bytes, *plan.weight_bytes)
    sizes += (plan.gradient_bytes, predicted.device_peak_bytes, predicted.host_peak_bytes)
    if min(sizes) < 0 or min(predicted.iteration_s, predicted.lower_bound_s, predicted.no_offload_s) < 0:
        yield "a size or time is negative"
    if not plan.options:
        yield "it has no blocks"
    if len(plan.state_bytes) != tensors or len(plan.weight_bytes) not in (0, tensors):
        yield f"update_places, state_bytes and weight_bytes do not have {tensors} entries each"
    for at, intervals in enumerate(plan.initial):
        if not 0 <= intervals.tensor < tensors or intervals.offset < 0:
            yield f"initial.{at}: tensor {intervals.tensor} at {intervals.offset}, there are {tensors} tensors"
    for at, op in enumerate(plan.ops):
        yield from (f"ops.{at}: {problem}" for problem in _of_op(op, at, plan))
    if len(plan.weight_bytes) == tensors == len(plan.state_bytes):
        try:
            assert plan.packing is not None
        except KeyError as error:
            yield f"ops: {error.args[0]} leaves the device without being there"


def _of_op(op: Op, at: int, plan: Plan) -> Iterator[str]:
    steps, blocks, tensors = plan.steps, len(plan.options), len(plan.update_places)
    if op.id != at:
        yield f"its id is {op.id}"
    if not 0 <= op.step < steps or not 0 <= op.block < blocks:
        yield f"step {op.step} of block {op.block}, there are {steps} and {blocks}"
    if op.release_after is not None and not 0 <= op.release_after < steps:
        yield f"release_after step {op.release_after}, there are {steps}"
    if any(not 0 <= tensor < tensors for tensor in (*op.tensors, *op.zero_copy)):
        yield f"it names tensors that do not exist, there are {tensors}"
    if any(not 0 <= other < len(plan.ops) for other in op.after):
        yield "it waits for ops that do not exist"
    if op.bytes < 0 or op.seconds < 0 or any(offset < 0 for offset in op.offsets):
        yield "a size or time is negative"
    if (op.payload == "grad" and op.resource == "d2h") != (op.slot is not None and op.slot >= 0):
        yield f"slot {op.slot}: gradients that are copied to the host have one, nothing else has"
    if op.payload in ("weight", "state") and op.kind == "prefetch" and len(op.offsets) != len(op.tensors):
        yield f"{len(op.offsets)} offsets for {len(op.tensors)} tensors"
