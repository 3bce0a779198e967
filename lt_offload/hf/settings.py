"""Settings of ``lt_offload.hf_trainer``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lt_offload.model.parts import check_micro_batches
from lt_offload.plan import Settings
from lt_offload.schema.plan import PlannerName
from lt_offload.units import Budget, Memory


@dataclass(frozen=True, kw_only=True)
class HFSettings:
    """Arguments of ``hf_trainer``; see there.

    Raises:
        ConfigError: if one cannot be used as given.
    """

    memory: Memory = None
    host_memory: Memory = None
    planner: PlannerName = "auto"
    micro_batches: int | Literal["auto"] = 1
    blocks: str | None = None
    host_update: bool = True
    activation_offload: bool = True
    recompute: bool = True
    chunked_loss: bool = False
    gradient_reserve: float | None = None
    plan: str | Path | None = None
    solver_time_limit: float = 30.0
    report_dir: str | Path | None = None
    sample_batch: Any = None

    def __post_init__(self) -> None:
        check_micro_batches(self.micro_batches, auto=True)
        object.__setattr__(self, "memory", Budget.of(self.memory, least=1))
        object.__setattr__(self, "host_memory", Budget.of(self.host_memory, setting="host_memory"))
        # Refuses what cannot be used as given here, and not when training begins.
        self.planning(1)

    @property
    def device(self) -> Budget:
        """The budget of device memory."""
        return Budget.of(self.memory)

    @property
    def budget(self) -> int | None:
        """Device bytes; None: what is free."""
        return self.device.nbytes

    def planning(self, accumulate: int) -> Settings:
        """Return the settings of plans for windows of ``accumulate`` micro-batches."""
        return Settings(
            memory=self.memory,
            host_memory=self.host_memory,
            planner=self.planner,
            host_update=self.host_update,
            activation_offload=self.activation_offload,
            recompute=self.recompute,
            chunked_loss=self.chunked_loss,
            gradient_reserve=self.gradient_reserve,
            time_limit=self.solver_time_limit,
            accumulate=accumulate,
            delayed=True,
        )
