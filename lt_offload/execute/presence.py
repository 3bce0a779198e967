"""What a computation sees of its weights: device copies, or host copies that it reads over the link. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lt_offload.errors import PlanError
from lt_offload.execute.device import Device
from lt_offload.execute.params import Weight, distinct
from lt_offload.plan.schedule import Op, Plan


def expose(weights: Sequence[Weight], plan: Plan) -> None:
    """Prepare what computations of ``plan`` access in host memory.

    Raises:
        UnsupportedError: if the device cannot.
    """
    for op in plan.ops:
        for tensor in op.direct:
            weights[tensor].expose()
        if op.payload == "grad" and op.resource == "compute":
            for tensor in op.tensors:
                weights[tensor].grad_direct = True


@contextmanager
def present(device: Device, weights: Sequence[Weight], op: Op) -> Iterator[None]:
    """Let the modules see ``weights`` as the computation ``op`` shall: those in ``op.direct`` in host memory.

    Raises:
        PlanError: if the plan does not bring one of the others to the device, or has one read that is out of date.
    """
    direct = [weight for weight in weights if weight.index in op.direct]
    copied = [weight for weight in weights if weight.index not in op.direct]
    for weight in copied:
        if weight.view is None:
            raise PlanError(f"the plan does not bring {weight.label} to the device for step {op.step}")
        weight.present = weight.view
    for weight in direct:
        if weight.dirty:
            raise PlanError(f"op {op.id} reads {weight.label} in host memory, which is older than the device copy")
        assert weight.direct is not None
        weight.present = weight.direct
    device.wait(
        *distinct([*(w.ready for w in copied), *(w.current for w in direct)]),
        reads=[*(w.buffer for w in copied if w.buffer is not None), *(w.host_cell for w in direct)],
    )
    for weight in weights:
        assert weight.present is not None
        weight.param.data = weight.present
    try:
        yield
    finally:
        for weight in weights:
            weight.param.data = weight.host
            weight.present = None
