"""The comment at the top of a recipe: the model, commands to run and plan it, and figures of its plan."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lt_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lt_offload.schema.plan import Plan

RAM = re.compile(r" \(\d+ GB of RAM\)$")
"""The end of a recipe's first line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """Figures of a plan for one update."""

    samples: int
    """Sequences per update, of all processes."""
    sequence_length: int
    iteration_s: float
    """Seconds of an update ..."""
    no_offload_s: float
    """... and with enough memory on the device."""
    device_peak_bytes: int
    host_peak_bytes: int

    @classmethod
    def of(cls, plan: Plan) -> SimulatedStep:
        """Return the figures of ``plan``."""
        predicted = plan.predicted
        return cls(
            samples=plan.processes * plan.batch_size * plan.accumulate,
            sequence_length=plan.sequence_length,
            iteration_s=predicted.iteration_s,
            no_offload_s=predicted.no_offload_s,
            device_peak_bytes=predicted.device_peak_bytes,
            host_peak_bytes=predicted.host_peak_bytes,
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, padding included."""
        return self.samples * self.sequence_length / self.iteration_s

    @property
    def ram(self) -> str:
        """The RAM in whole GB, rounded up."""
        return f"{math.ceil(self.host_peak_bytes / 1e9)} GB"


def header(
    title: str,
    recipe: str,
    hardware: str | None,
    figures: SimulatedStep,
    *,
    flags: str = " --data.path my.json",
    made: str = "",
) -> list[str]:
    """Return the lines of the comment.

    ``title`` is the model and the way it is trained, and may have the RAM of an earlier plan at its end; ``hardware``
    the machine of the plan, as ``--hardware`` takes it (None: this one); ``made`` the date of the plan, and the
    version.
    """
    step, enough = format_seconds(figures.iteration_s), format_seconds(figures.no_offload_s)
    device, host = format_bytes(figures.device_peak_bytes), format_bytes(figures.host_peak_bytes)
    return [
        f"# {RAM.sub('', title)} ({figures.ram} of RAM)",
        f"#   lt-finetune {recipe}{flags}",
        f"#   lt-finetune plan {recipe}{f' --hardware {hardware}' if hardware else ''}",
        f"# Simulated there: {step} per step of {figures.samples} x {figures.sequence_length} tokens ({enough} with "
        f"enough memory), {device} on the GPU, {host} of RAM",
        *([f"# Planned on {made}"] if made else []),
    ]
