"""Records iterations as they happen, to be compared with what was simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from lt_offload.execute.device.base import Device
from lt_offload.execute.device.lanes import WAITING
from lt_offload.schema.lanes import LaneName
from lt_offload.schema.trace import Span, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Figures of the last complete iteration; sizes in bytes, time in seconds."""

    iterations: int
    iteration_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    grad_norm: float | None
    """Global L2 norm of the gradients, where it was asked for."""
    waited_s: float = 0.0
    """Seconds spent waiting for other processes' gradients."""


class Recorder:
    """Keeps spans and memory peaks of the last complete iteration."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.iterations = 0
        self.iteration_s = 0.0
        self.waited_s = 0.0
        self.device_peak = 0
        self._waited = 0.0
        self._began = 0.0
        self._steps: list[float] = []
        self._peaks: list[int] = []
        self._finished: tuple[float, float, list[tuple[float, int]]] = (0.0, 0.0, [])
        self._spans: list[tuple[int, str, str, float, float]] = []

    def begin(self) -> None:
        """Start an iteration."""
        self._began = self.device.now()
        self._steps, self._peaks = [], []
        self.device.record(True)
        self.device.reset_peak()

    def begin_step(self) -> None:
        """Note when a step starts."""
        self._steps.append(self.device.now())

    def end_step(self) -> None:
        """Note the largest use of device memory in the step."""
        self._peaks.append(self.device.peak_memory())
        self.device.reset_peak()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Enclose what waits until other processes have come as far."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def end(self) -> None:
        """End the iteration."""
        now = self.device.now()
        self.waited_s, self._waited = self._waited, 0.0
        self.iterations += 1
        self.iteration_s = now - self._began
        self.device_peak = max(self._peaks, default=self.device.peak_memory())
        self._finished = (self._began, now, list(zip(self._steps, self._peaks, strict=True)))
        self._spans = [span for span in self._spans if span[4] > self._began] + self.device.take_spans()
        self.device.end_iteration()

    def stats(self, host_peak: int, grad_norm: float | None) -> EngineStats:
        """Return the figures of the last complete iteration."""
        return EngineStats(
            iterations=self.iterations,
            iteration_s=self.iteration_s,
            device_peak_bytes=self.device_peak,
            host_peak_bytes=host_peak,
            grad_norm=grad_norm,
            waited_s=self.waited_s,
        )

    def trace(self, budget_bytes: int, host_peak: int) -> Trace:
        """Return the last complete iteration; work of others that overlaps it is cut at its ends."""
        began, ended, samples = self._finished
        spans = [
            Span(
                op=op,
                lane=cast(LaneName, lane),
                label=label,
                start=max(start, began) - began,
                end=min(end, ended) - began,
            )
            for op, lane, label, start, end in self._spans
            # Waiting for other processes is no work of this one.
            if end > began and start < ended and lane not in WAITING
        ]
        return Trace(
            source="measured",
            iteration_time=ended - began,
            device_peak=self.device_peak,
            host_peak=host_peak,
            budget_bytes=budget_bytes,
            spans=tuple(sorted(spans, key=lambda span: (span.start, span.lane))),
            memory=tuple((at - began, peak) for at, peak in samples),
        )
