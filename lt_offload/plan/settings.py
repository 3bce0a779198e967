"""What a user may set about planning: budgets and switches, each declared once, with its default and what is refused.

``OffmateStrategy``, ``solve``, ``offloaded`` and ``lt-finetune plan`` take these one by one, and pass one object on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.schema.plan import PlannerName
from lt_offload.schema.profile import EMULATED, HardwareProfile
from lt_offload.units import format_bytes, parse_bytes

PLANNERS: tuple[PlannerName, ...] = get_args(PlannerName)
"""All planners."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Budgets and switches of planning.

    Raises:
        UnsupportedError: if there is no such ``planner``.
        ConfigError: if another value cannot be used.
    """

    memory: str | int | None = None
    """Device budget, context included, e.g. ``"10GB"`` or bytes; None: all that the profile's device has."""
    host_memory: str | int | None = None
    """RAM budget; None: all that the profile says may be taken."""
    planner: PlannerName = "auto"
    """Which planner to use; ``auto`` simulates what several propose and takes the fastest."""
    host_update: bool = True
    """Whether the host may update parameters."""
    activation_offload: bool = True
    """Whether activations may be copied to the host."""
    recompute: bool = True
    """Whether activations may be computed again."""
    gradient_reserve: float | None = None
    """For ``memferry``: the part of all gradient bytes, 0 to 1, that the device may hold at a time; None: what fits."""
    accumulate: int = 1
    """Micro-batches whose gradients are added up for one update."""
    delayed: bool = False
    """Whether updates wait until all gradients are there, as clipping by their norm needs."""
    time_limit: float = 30.0
    """Seconds after which no further candidate is generated; ``solver_time_limit`` of the strategy."""

    def __post_init__(self) -> None:
        if self.planner not in PLANNERS:
            raise UnsupportedError(f"planner={self.planner!r} does not exist; choose one of {', '.join(PLANNERS)}")
        for name in ("memory", "host_memory"):
            if (size := getattr(self, name)) is not None:
                parse_bytes(size, setting=name, least=1)
        reserve = self.gradient_reserve
        if reserve is not None and not 0 <= reserve <= 1:
            raise ConfigError(
                f"gradient_reserve={reserve} is not a part of the gradients; choose a number from 0 to 1, or None"
            )
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ConfigError(f"accumulate={self.accumulate!r} must be at least 1: micro-batches per update")
        if self.time_limit <= 0:
            raise ConfigError(f"solver_time_limit={self.time_limit} must be a positive number of seconds")

    def device_budget(self, machine: HardwareProfile) -> int:
        """Return the bytes of device memory that a plan for ``machine`` may use."""
        return machine.device_bytes if self.memory is None else parse_bytes(self.memory, least=1)

    def check_card(self, machine: HardwareProfile) -> None:
        """Raise ``ConfigError`` if the budget is more than the card has; the emulated device has what RAM is free."""
        budget, has = self.device_budget(machine), machine.device_bytes
        if budget > has and machine.name != EMULATED:
            raise ConfigError(
                f"memory={format_bytes(budget)} is more than {machine.name} has; set memory={has // 10**6}MB, all of "
                "it, or less, or plan for another card"
            )

    def host_budget(self, machine: HardwareProfile) -> int:
        """Return the bytes of RAM that a plan for ``machine`` may use."""
        if self.host_memory is None:
            return machine.host_bytes
        return parse_bytes(self.host_memory, setting="host_memory", least=1)
