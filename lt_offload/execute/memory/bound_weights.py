"""Binds weights to one computation: for its duration each parameter is the device copy, or the host copy (zero copy).

Outside computations a parameter is its host copy, which is what users' code then sees.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lt_offload.execute.device.base import Device
from lt_offload.execute.memory.live_group import LiveGroup, needed_by_compute
from lt_offload.execute.memory.tensors import Weight
from lt_offload.schema.plan import Op


class BoundWeights:
    """Encloses the computation ``op``: its modules see ``weights``, those of ``on_host`` in host memory.

    Raises:
        PlanError: on entry, if the plan does not bring a weight to the device, or has one read that is out of date.
    """

    def __init__(self, device: Device, weights: Sequence[Weight], op: Op, on_host: Collection[int]) -> None:
        self._device, self._op = device, op
        self._label, self._by = f"{op.kind} {op.block}", f"op {op.id}"
        self._token: object = None
        self._weights = tuple(weights)
        self._on_device = tuple(weight for weight in weights if weight.index not in on_host)
        self._in_host_memory = tuple(weight for weight in weights if weight.index in on_host)
        self._device_groups = _groups(self._on_device)
        self._host_groups = _groups(self._in_host_memory)

    def __enter__(self) -> None:
        needed_by_compute(self._device, self._device_groups, self._host_groups, by=self._by)
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
        # Without this, users' code would find a range of the arena that others use by now.
        for weight in self._weights:
            weight.param.data = weight.host
            weight.present = None


def _groups(weights: Sequence[Weight]) -> tuple[LiveGroup, ...]:
    return tuple(dict.fromkeys(weight.group for weight in weights))
