"""Plans for a row of sizes or machines, and their table: ``lt-finetune plan --sweep``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lt_offload.cli.outputs import print_table
from lt_offload.cli.planning.estimate import estimate, model_name, on_machine, settings_of, solver
from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.finetune.terminal import clear, status
from lt_offload.plan.several import check_cards, one_of
from lt_offload.plan.sweep import HEAD, SweepPoint, SweepRange, run_sweep, save_sweep
from lt_offload.plan.what_if import Solver
from lt_offload.profiling.hardware import load_hardware
from lt_offload.units import Budget

if TYPE_CHECKING:
    from lt_offload.cli.app import App
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import HardwareProfile, Profile

_SECONDS = 90.0
"""Seconds for all plans of a sweep together ..."""
_LEAST_SECONDS = 4.0
"""... but at least this for each of them."""
_WIDTH = 100


def plan_sweep(
    app: App,
    wanted: SweepRange,
    memory: str | None,
    hardware: str | None,
    cards: tuple[int, int],
    *,
    save: str | None,
) -> int:
    """Plan for a row of sizes, machines, numbers of cards or of machines and print a table.

    ``cards`` are those of each machine, and the number of machines, where the sweep is not over them.
    """
    axis, (devices, nodes) = wanted.axis, cards
    if axis in ("devices", "nodes"):
        for count in wanted.sizes:
            check_cards(*((count, nodes) if axis == "devices" else (devices, count)))
    for name in ("batch_size", "micro_batches"):
        if getattr(app.trainer.strategy, name, None) == "auto":
            raise ConfigError(f"trainer.strategy.{name}='auto' cannot be combined with a sweep; give a number")
    fixed = {"memory": memory, "hardware": hardware, "devices": devices, "nodes": nodes}.get(axis)
    if fixed not in (None, 1):
        raise ConfigError(f"{axis}={fixed!r} cannot be combined with a sweep over {axis}; leave one out")
    if save is not None and Path(save).suffix.lower() not in (".csv", ".json"):
        raise ConfigError(f"save={save!r}: a sweep is saved as a table; end the name with .csv or .json")
    # Divided by the points, so that a sweep takes about as long whatever it goes over.
    seconds = max(_LEAST_SECONDS, _SECONDS / len(wanted.sizes or wanted.names))
    questions = list(_questions(app, wanted, Budget.of(memory), hardware, solver(app, seconds), cards))
    points, answer = run_sweep(axis, questions, status)
    clear()
    batches = sorted({point.plan.batch_size for point in points if point.plan is not None})
    batch = f"batch {'-'.join(map(str, batches[:: max(1, len(batches) - 1)]))} x " if batches else ""
    about = f"{model_name(app)}, {app.model.model_dtype}, {batch}{app.datamodule.max_length} tokens"
    print(f"{about}; times and peaks are simulated\n")
    head = (axis.replace("_", " "), *HEAD)
    print_table(head, (point.row(axis) for point in points), width=_WIDTH, words=True)
    print(f"\n{answer}")
    if save is not None:
        print(f"table: {save_sweep(save, points)}")
    return 0


def _questions(
    app: App, wanted: SweepRange, memory: Budget, hardware: str | None, solve: Solver, cards: tuple[int, int]
) -> Iterator[tuple[SweepPoint, Callable[[], Plan]]]:
    """Yield the points of a sweep, on ``cards`` of so many machines; the model is profiled once per machine."""
    settings, axis = settings_of(app), wanted.axis

    def question(
        profile: Profile | None, machine: HardwareProfile, budget: int, ram: int, size: int = 0
    ) -> tuple[SweepPoint, Callable[[], Plan]]:
        devices = size if axis == "devices" else cards[0]
        nodes = size if axis == "nodes" else cards[1]

        def plan_it() -> Plan:
            # The error comes with the point's turn: one machine without figures is a row of
            # the table, not the end of the sweep.
            if profile is None:
                raise InfeasibleError(f"there are no figures for {app.model.model_dtype}")
            # Each process may take its part of the RAM that the machine has, or that was named.
            return solve(one_of(profile, devices, nodes), budget, ram // devices)

        point = SweepPoint(
            hardware=machine.name, memory_bytes=budget, host_memory_bytes=ram, devices=devices, nodes=nodes
        )
        return point, plan_it

    for machine in [load_hardware(name) for name in wanted.names]:
        rated = app.model.model_dtype in machine.flops_per_s  # its description has figures for this dtype
        budget = machine.device_bytes if memory.nbytes is None else min(memory.nbytes, machine.device_bytes)
        yield question(estimate(app, machine) if rated else None, machine, budget, settings.host_budget(machine))
    if axis == "hardware":
        return
    profile = estimate(app, hardware)
    machine = profile.hardware
    budget = 0 if axis == "memory" else on_machine(settings, memory, machine).device_budget(machine)
    for size in wanted.sizes:
        ram = size if axis == "host_memory" else settings.host_budget(machine)
        yield question(profile, machine, size if axis == "memory" else budget, ram, size)
