"""A user's settings of planning: budgets and switches, each declared once, with its default and its refusals.

``OffmateStrategy``, ``solve``, ``offloaded`` and ``lt-finetune plan`` take these one by one, and pass one object on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, get_args

from lt_offload.arguments import check_types
from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.schema.plan import PlannerName
from lt_offload.schema.profile import EMULATED, HardwareProfile
from lt_offload.units import Budget, Memory, format_bytes, is_count

PLANNERS: tuple[PlannerName, ...] = get_args(PlannerName)
"""All planners."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Budgets and switches of planning.

    Budgets may be given as people write them; the object holds each as a :class:`Budget`.

    Raises:
        UnsupportedError: if there is no such ``planner``.
        ConfigError: if another value cannot be used.
    """

    memory: Memory = None
    """Device budget, context included, e.g. ``"10GB"`` or bytes; None: all that the profile's device has."""
    host_memory: Memory = None
    """RAM budget; None: all that the profile says may be taken."""
    planner: PlannerName = "auto"
    """The planner to use; ``auto`` simulates the proposals of several and takes the fastest."""
    host_update: bool = True
    """True: the host may update parameters."""
    activation_offload: bool = True
    """True: activations may be copied to the host."""
    recompute: bool = True
    """True: activations may be computed again."""
    chunked_loss: bool = False
    """True: the output projection and the loss take a few tokens at a time wherever they can, with the sums of
    ``lt_offload.chunked_loss_reference``. False: they do so only where nothing else fits."""
    gradient_reserve: float | None = None
    """For ``memferry``: the part of all gradient bytes, 0 to 1, that the device may hold at a time; None: what fits."""
    accumulate: int = 1
    """Micro-batches whose gradients are added up for one update."""
    delayed: bool = False
    """True: updates wait until all gradients are complete, as clipping by their norm needs."""
    hosted: bool = False
    """True: the host updates all parameters, as plans of several processes need whose updates do not wait."""
    solver_time_limit: float = 30.0
    """Seconds after which no further candidate is generated."""

    def __post_init__(self) -> None:
        if self.planner not in PLANNERS:
            raise UnsupportedError(f"planner={self.planner!r} does not exist; choose one of {', '.join(PLANNERS)}")
        for name in ("memory", "host_memory"):
            object.__setattr__(self, name, Budget.of(getattr(self, name), setting=name, least=1))
        check_types(type(self), self.values())
        reserve = self.gradient_reserve
        if reserve is not None and not 0 <= reserve <= 1:
            raise ConfigError(
                f"gradient_reserve={reserve} is not a part of the gradients; choose a number from 0 to 1, or None"
            )
        if self.chunked_loss and not self.recompute:
            raise ConfigError(
                "chunked_loss=True lets no logits exist, and recompute=False keeps them for your code; leave out one "
                "of the two"
            )
        if not is_count(self.accumulate):
            raise ConfigError(f"accumulate={self.accumulate!r} must be at least 1: micro-batches per update")
        if not self.solver_time_limit > 0:  # not a number is none
            raise ConfigError(f"solver_time_limit={self.solver_time_limit} must be a positive number of seconds")

    @classmethod
    def named(cls, memory: Memory, accumulate: int, switches: Mapping[str, Any]) -> Settings:
        """Return the settings with ``switches`` of an ``offloaded``; raises ``ConfigError`` if one does not exist."""
        names = [setting.name for setting in fields(cls)]
        for name in switches.keys() - set(names):
            near = get_close_matches(name, names, 1) or names
            raise ConfigError(f"{name}={switches[name]!r} is no setting of offloaded(); choose among {', '.join(near)}")
        return cls(memory=memory, accumulate=accumulate, **switches)

    @classmethod
    def among(cls, options: Mapping[str, Any]) -> Settings:
        """Return the settings among the ``options`` of a strategy or a context, which has others, too."""
        names = {setting.name for setting in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in names})

    def values(self) -> dict[str, str | int | float | None]:
        """Return all of them as they were named, by their names; None: nobody has named a budget."""
        of_fields = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        return {name: value.nbytes if isinstance(value, Budget) else value for name, value in of_fields.items()}

    @property
    def device(self) -> Budget:
        """The budget of device memory."""
        return Budget.of(self.memory)

    @property
    def host(self) -> Budget:
        """The budget of RAM."""
        return Budget.of(self.host_memory)

    def within(self, free: Callable[[], int]) -> Settings:
        """Return the settings with a device budget in bytes: that of ``free`` where none is named."""
        return replace(self, memory=Budget(self.device.resolved(free)))

    def device_budget(self, machine: HardwareProfile) -> int:
        """Return the bytes of device memory that a plan for ``machine`` may use."""
        return self.device.resolved(lambda: machine.device_bytes)

    def check_card(self, machine: HardwareProfile) -> None:
        """Raise ``ConfigError`` if the budget is more than the card has; the emulated device has the free RAM."""
        budget, has = self.device_budget(machine), machine.device_bytes
        if budget > has and machine.name != EMULATED:
            raise ConfigError(
                f"memory={format_bytes(budget)} is more than {machine.name} has; set memory={has // 10**6}MB, all of "
                "it, or less, or plan for another card"
            )

    def host_budget(self, machine: HardwareProfile) -> int:
        """Return the bytes of RAM that a plan for ``machine`` may use."""
        return self.host.resolved(lambda: machine.host_bytes)
