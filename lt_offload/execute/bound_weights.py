"""What a computation sees of its weights: device copies, or host copies that it reads over the link.

Knows when a computation begins and ends, but not what it does.
"""

from __future__ import annotations

from collections.abc import Sequence

from lt_offload.errors import PlanError
from lt_offload.execute.device.base import Cell, Device, Event
from lt_offload.execute.groups import Parcel
from lt_offload.execute.tensors import Weight
from lt_offload.schema.plan import Op, Plan


def expose(weights: Sequence[Weight], plan: Plan, device: Device) -> None:
    """Prepare what computations of ``plan`` access in host memory.

    Raises:
        UnsupportedError: if the device cannot.
    """
    for op in plan.ops:
        for tensor in plan.zero_copy(op):
            weights[tensor].expose(device)


class BoundWeights:
    """Encloses the computation ``op``: its modules see ``weights``, those of ``op.zero_copy`` in host memory.

    Raises:
        PlanError: on entry, if the plan does not bring a weight to the device, or has one read that is out of date.
    """

    def __init__(self, device: Device, weights: Sequence[Weight], op: Op, plan: Plan) -> None:
        self._device, self._op = device, op
        self._label = f"{op.kind} {op.block}"
        self._token: object = None
        self._weights = tuple(weights)
        in_host_memory = set(plan.zero_copy(op))
        self._copied = tuple(weight for weight in weights if weight.index not in in_host_memory)
        self._direct = tuple(weight for weight in weights if weight.index in in_host_memory)
        self._here = _parcels(self._copied)
        self._there = _parcels(self._direct)

    def __enter__(self) -> None:
        self._await()
        for weight in self._copied:
            assert weight.view is not None
            weight.param.data = weight.present = weight.view
        for weight in self._direct:
            assert weight.zero_copy is not None
            weight.param.data = weight.present = weight.zero_copy
        self._token = self._device.begin_compute(self._op.id, self._label)
        if self._direct:
            self._device.cross("h2d", self._op.bytes)

    def __exit__(self, *error: object) -> None:
        self._device.end_compute(self._token)
        self._token = None
        for weight in self._weights:
            weight.param.data = weight.host
            weight.present = None

    def _await(self) -> None:
        """Order the compute lane after what brings the weights."""
        events: dict[Event, None] = {}
        reads: list[Cell] = []
        for parcel in self._here:
            if parcel.buffer is None:
                raise PlanError(f"the plan does not bring {parcel.label} to the device for step {self._op.step}")
            reads.append(parcel.buffer)
            if parcel.ready is not None:
                events[parcel.ready] = None
        for parcel in self._there:
            if parcel.dirty:
                raise PlanError(
                    f"op {self._op.id} reads {parcel.label} in host memory, which is older than the device copy"
                )
            reads.append(parcel.host_cell)
            if parcel.current is not None:
                events[parcel.current] = None
        self._device.wait(*events, reads=reads)
        for parcel in self._here:
            parcel.ready = None


def _parcels(weights: Sequence[Weight]) -> tuple[Parcel, ...]:
    return tuple(dict.fromkeys(weight.parcel for weight in weights))
