"""Plans from settings alone, without weights: the request to the planner for the app's settings, and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lt_offload.cli.outputs import print_table
from lt_offload.compat.hugging_face import set_attention
from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.finetune import load
from lt_offload.finetune.module import check_data
from lt_offload.finetune.terminal import clear, say, status
from lt_offload.plan import make_plan
from lt_offload.plan.settings import Settings
from lt_offload.plan.several import check_cards, one_of
from lt_offload.plan.sweep import HEAD, SweepPoint, SweepRange, run_sweep, save_sweep
from lt_offload.plan.what_if import Solver
from lt_offload.profiling.from_config import profile_config
from lt_offload.profiling.hardware import load_hardware, measure_machine
from lt_offload.strategy.windows import reads_gradients, settings_from_trainer
from lt_offload.units import Budget, format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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


def estimate(
    app: App,
    hardware: str | HardwareProfile | None,
    batch_size: int | None = None,
    micro_batches: int | None = None,
) -> Profile:
    """Return the profile of the app's model on ``hardware`` (None: this machine), without weights.

    Batch size and parts of a batch are the settings' where they are None.
    """
    parts = micro_batches or parts_of(app)
    assert parts != "auto"
    module, data = app.model, app.datamodule
    if hardware is not None:
        say(f"estimating for {hardware if isinstance(hardware, str) else hardware.name}")
    config = configuration(app)
    profile = profile_config(
        config,
        batch_size=batch_size or getattr(app.trainer.strategy, "batch_size", None) or data.batch_size,
        sequence_length=data.max_length,
        dtype=module.model_dtype,
        autocast="bfloat16" if app.trainer.precision == "bf16-mixed" else None,
        hardware=hardware or measure_machine(on_progress=status),
        optimizer=module.make_optimizer,
        quantize=module.quantize,
        prepare=module.prepare,
        padding=not data.pack,
        packing=data.pack is True,
        blocks=getattr(app.trainer.strategy, "blocks", None),
        micro_batches=parts,
        compile_blocks=module.compile_blocks,
        on_progress=status,
    )
    return replace(profile, model=model_name(app), added_up_first=reads_gradients(app.trainer))


def configuration(app: App) -> PreTrainedConfig:
    """Return the configuration of the app's model with the settings that change it.

    Raises ``ConfigError`` if there is none without the hub, or a setting does not suit it.
    """
    module, data = app.model, app.datamodule
    config = load.load_config(module.name, module.architecture)
    check_data(config, max_length=data.max_length)
    module.check_packing(config, data)
    if module.dropout is not None:
        load.set_dropout(config, module.dropout)
    # On the configuration itself: the model is made on meta from it, where nothing else says how it computes.
    if module.attention is not None:
        set_attention(config, module.attention)
    try:
        module.count_tokens()
    except ConfigError:  # a plan needs nothing from the hub
        module.vocabulary = config.vocab_size + len(module.new_tokens)
        say(f"the tokenizer is not here: planning for {module.count_tokens()} tokens")
    return config


def model_name(app: App) -> str:
    """Return the short name of the model: that of its configuration, or of the folder that holds it."""
    path = Path(app.model.architecture or app.model.name)
    return path.resolve().parent.name if path.name == "config.json" else path.name.removesuffix(".json")


def parts_of(app: App) -> int | Literal["auto"]:
    """Return the strategy's number of micro-batches per batch."""
    parts: int | Literal["auto"] = getattr(app.trainer.strategy, "micro_batches", 1)
    return parts


def settings_of(app: App) -> Settings:
    """Return the strategy's settings of plans with the Trainer's batches per update; defaults without offmate."""
    settings = getattr(app.trainer.strategy, "settings", None)
    return settings_from_trainer(settings if isinstance(settings, Settings) else Settings(), app.trainer)


def on_machine(settings: Settings, memory: Budget, machine: HardwareProfile) -> Settings:
    """Return ``settings`` with the device budget ``memory``, else the recipe's as far as ``machine`` has it."""
    has = machine.device_bytes
    if memory.nbytes is not None:
        settings = replace(settings, memory=memory)
        settings.check_card(machine)
    budget = settings.device_budget(machine)
    # A recipe's budget is for the card that it was written for. One that was asked for now was checked above instead.
    if budget > has and memory.nbytes is None:
        say(f"{machine.name} has {format_bytes(has)}, not {format_bytes(budget)} as in the recipe")
        budget = has
    say(f"planning for {format_bytes(budget)} on {machine.name}")
    return replace(settings, memory=budget)


def solver(app: App, seconds: float) -> Solver:
    """Return a solver with the strategy's settings, for plans in ``seconds`` each; for all cards of a profile."""
    settings = settings_of(app)
    # Never more time than the user allows for a single plan.
    settings = replace(settings, time_limit=min(settings.time_limit, seconds))
    return lambda profile, memory, host_memory: make_plan(
        profile, replace(settings, memory=memory, host_memory=host_memory)
    )
