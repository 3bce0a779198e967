"""The planner's request for the app's settings: a profile without weights, switches and budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lt_offload.compat.hugging_face import set_attention
from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.module import check_data
from lt_offload.finetune.terminal import say, status
from lt_offload.plan import make_plan
from lt_offload.plan.settings import Settings
from lt_offload.plan.what_if import Solver
from lt_offload.profiling.from_config import profile_config
from lt_offload.profiling.hardware import measure_machine
from lt_offload.strategy.windows import reads_gradients, settings_from_trainer
from lt_offload.units import Budget, format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lt_offload.cli.app import App
    from lt_offload.schema.profile import HardwareProfile, Profile


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
        module.assume_tokens(config.vocab_size + len(module.new_tokens))
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
