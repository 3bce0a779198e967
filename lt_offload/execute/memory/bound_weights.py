"""Binds weights to one computation: for its duration each parameter is the device copy, or the host copy (zero copy).

Outside computations a parameter is its host copy, which is what users' code then sees.
"""

from __future__ import annotations

from collections.abc import Sequence

from lt_offload.errors import PlanError
from lt_offload.execute.device.base import Cell, Device, Event
from lt_offload.execute.memory.tensors import LiveGroup, Weight
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
        self._on_device = tuple(weight for weight in weights if weight.index not in in_host_memory)
        self._in_host_memory = tuple(weight for weight in weights if weight.index in in_host_memory)
        self._device_groups = _groups(self._on_device)
        self._host_groups = _groups(self._in_host_memory)

    def __enter__(self) -> None:
        self._await()
        # Setting ``data`` leaves a parameter's version, hooks and gradient node alone as long as shape and dtype stay:
        # so between computations it is the host copy, never an empty placeholder.
        for weight in self._on_device:
            assert weight.view is not None
            weight.param.data = weight.present = weight.view
        for weight in self._in_host_memory:
            assert weight.zero_copy is not None
            weight.param.data = weight.present = weight.zero_copy
        self._token = self._device.begin_compute(self._op.id, self._label)
        if self._in_host_memory:  # an emulated link takes its time; on a GPU this does nothing
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
        for group in self._device_groups:
            if group.buffer is None:
                raise PlanError(f"the plan does not bring {group.label} to the device for step {self._op.step}")
            reads.append(group.buffer)
            if group.ready is not None:
                events[group.ready] = None
        for group in self._host_groups:
            if group.dirty:
                raise PlanError(
                    f"op {self._op.id} reads {group.label} in host memory, which is older than the device copy"
                )
            reads.append(group.host_cell)
            if group.current is not None:
                events[group.current] = None
        self._device.wait(*events, reads=reads)
        for group in self._device_groups:
            group.ready = None  # the compute lane is ordered after it for good


def _groups(weights: Sequence[Weight]) -> tuple[LiveGroup, ...]:
    return tuple(dict.fromkeys(weight.group for weight in weights))
