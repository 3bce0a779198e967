"""The strategy for ``lightning.pytorch``; what it does is in ``lifecycle.py``.

A Trainer of ``pytorch_lightning`` takes it, too, although its own base class is another one: there the class counts as
a virtual subclass of that base, and an object becomes one of ``strategy_class("pytorch_lightning")`` when the Trainer
gives it an accelerator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.strategies import Strategy

from lt_offload.errors import ConfigError
from lt_offload.schema.plan import PlannerName
from lt_offload.strategy import register as _register
from lt_offload.strategy.offmate import OffmateCore


class OffmateStrategy(OffmateCore, Strategy):
    """Trains inside a device memory budget by planning one iteration, with the same numbers as plain training.

    On ``accelerator="cuda"`` blocks run on the GPU; on ``accelerator="cpu"`` the same plan runs on an emulated device
    of ``memory`` bytes. What is not supported is refused before training, see ``lt_offload.limits``.

    Updates of one iteration overlap the next forward. Hooks and callbacks may read and write weights and optimizer
    states between iterations all the same: whatever they touch is completed first, and that alone.

    Args:
        memory: device memory that training may occupy, such as ``"10GB"``, ``"10GiB"`` or bytes; None: what is free.
        host_memory: RAM that training may take; None: what is free.
        planner: which planner to use; ``"auto"`` simulates several and takes the fastest.
        batch_size: set as ``batch_size`` of the datamodule (or of the module, if that makes the loader) before loaders
            and schedules are made; ``"auto"``: the size with the highest throughput, at most the number of samples, or
            that of the run whose checkpoint is resumed; None: as it is.
        host_update: allow optimizer updates on the host.
        activation_offload: allow activations to travel to the host and back.
        recompute: allow activations to be computed again.
        gradient_reserve: for ``planner="memferry"``: the part of all gradient bytes, 0 to 1, that the device may hold;
            None: as much as fits.
        plan: path of a saved plan to replay instead of planning.
        solver_time_limit: seconds that planning may take.
        report_dir: folder for profile.json, plan.json and trace.json; None: the logger's folder, if there is one.

    Raises:
        ConfigError: if an option cannot be used as given.
    """

    def __init__(
        self,
        *,
        memory: str | int | float | None = None,
        host_memory: str | int | float | None = None,
        planner: PlannerName = "auto",
        batch_size: int | Literal["auto"] | None = None,
        host_update: bool = True,
        activation_offload: bool = True,
        recompute: bool = True,
        gradient_reserve: float | None = None,
        plan: str | Path | None = None,
        solver_time_limit: float = 30.0,
        report_dir: str | Path | None = None,
    ) -> None:
        super().__init__(
            memory=memory,
            host_memory=host_memory,
            planner=planner,
            batch_size=batch_size,
            host_update=host_update,
            activation_offload=activation_offload,
            recompute=recompute,
            gradient_reserve=gradient_reserve,
            plan=plan,
            solver_time_limit=solver_time_limit,
            report_dir=report_dir,
        )

    @property
    def accelerator(self) -> Any:
        """Set by the Trainer, before anything else."""
        return Strategy.accelerator.fget(self)  # type: ignore[attr-defined]

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        namespace = _register.namespace_of(accelerator)
        if namespace not in (None, self.namespace):
            if type(self) is not OffmateStrategy:
                raise ConfigError(
                    f"{type(self).__name__} derives from lt_offload.OffmateStrategy, which is a strategy of "
                    f"{self.namespace}; import Trainer from {self.namespace}, or derive from "
                    f"lt_offload.strategy.register.strategy_class({namespace!r})"
                )
            # The same attributes over the other base: its hooks, and the types its Trainer asks for, are then right.
            self.__class__ = _register.strategy_class(namespace)
        self._accelerator = accelerator


class offmate(OffmateStrategy):
    """The strategy under its name in the registry: command lines take ``.memory=`` beside ``strategy: offmate``."""

    def __new__(cls, **options: Any) -> Any:
        """Return the strategy itself."""
        return OffmateStrategy(**options)


_register.accept(OffmateStrategy)
