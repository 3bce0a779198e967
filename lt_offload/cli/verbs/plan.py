"""``lt-finetune plan``: one plan or many from settings alone. The parameters of :func:`plan` are the verb's flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lt_offload.cli.outputs import check_output
from lt_offload.cli.progress import clear, say, status
from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.finetune.module import check_data
from lt_offload.plan.settings import Settings
from lt_offload.plan.sweep import Question, SweepRange, parse_sweep, run_sweep
from lt_offload.plan.what_if import Solver, gains
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.explain import brief
from lt_offload.strategy.windows import asked, effective_batch
from lt_offload.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from lt_offload.cli.app import App
    from lt_offload.profiling.optimizer import OptimizerFactory
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import HardwareProfile, Profile

_GAIN_SECONDS = 8.0
"""What a plan of a report that says what more memory would buy may take."""
_SWEEP_SECONDS = 90.0
"""What the plans of a sweep may take together ..."""
_LEAST_SECONDS = 4.0
"""... unless each of them has less than this."""


def plan(
    app: App,
    *,
    memory: str | None = None,
    hardware: str | None = None,
    sweep: str | None = None,
    save: str | None = None,
    report: str | None = None,
    trace: str | None = None,
    explain: bool = False,
) -> int:
    """Plan without weights and without a GPU, and explain the plan.

    Args:
        app: the settings.
        memory: device memory, e.g. 12GB; default: the strategy's, else all of the hardware's.
        hardware: name of a shipped description (rtx-3060-12gb, ...) or a YAML file, as 'lt-finetune doctor --save'
            writes; changes may follow: rtx-3060,host=ddr4-64gb or rtx-3060,ram=48GB,link=6GB; default: this machine.
        sweep: plan for many and compare: memory=6GB:24GB:2GB, host_memory=32GB:128GB or hardware=rtx-3060,rtx-3090.
        save: file to write the plan to; --trainer.strategy.plan replays it on the machine it was made for. With sweep,
            the table as .csv or .json.
        report: HTML page to write; says what more memory or a faster link would buy, which takes a few plans more.
        trace: file to write the simulated iteration to, for ui.perfetto.dev and chrome://tracing.
        explain: say what happens to every block, and why the plan was chosen.
    """
    for flag, path in (("--save", save), ("--report", report), ("--trace", trace)):
        if path is not None:
            check_output(path, flag, make=True)
    replayed = getattr(app.trainer.strategy, "plan_path", None)
    if replayed is not None:
        raise ConfigError(
            f"trainer.strategy.plan={str(replayed)!r} is replayed by training, and this verb makes plans; set it to "
            "null"
        )
    if memory is not None:
        parse_bytes(memory)  # a slip is noticed here, before all that is slow
    if sweep is not None:
        return _sweep(
            app,
            parse_sweep(sweep),
            memory=memory,
            hardware=hardware,
            save=save,
            report=report,
            trace=trace,
            explain=explain,
        )
    from lt_offload.plan import simulate
    from lt_offload.report.perfetto import save_perfetto

    if getattr(app.trainer.strategy, "batch_size", None) == "auto":
        profile, made = _with_best_batch(app, memory, hardware)
    else:
        profile, made = _with_parts(app, memory, hardware)
    clear()
    print(made.explain() if explain else f"{brief(made)}\n--explain shows it block by block.")
    if save is not None:
        print(f"plan: {made.save(save)}")
    simulated = simulate(made, profile)
    if trace is not None:
        print(f"trace: {save_perfetto(simulated, trace)}")
    if report is not None:
        from lt_offload.report.plan_page import write_plan_report

        bought = gains(made, profile, _solver(app, _GAIN_SECONDS), say=status)
        print(f"report: {write_plan_report(report, made, profile, simulated, bought)}")
    return 0


def _with_parts(app: App, memory: str | None, hardware: str | None) -> tuple[Profile, Plan]:
    """Return the profile and the plan of the batch in as many parts as the strategy says, or as are fastest."""
    from lt_offload.plan import make_plan
    from lt_offload.plan.orders import choose_parts, compared

    count = _parts(app)
    profile = estimate(app, hardware, micro_batches=1 if count == "auto" else count)
    settings, machine = _settings(app), profile.hardware
    settings = replace(settings, memory=_budget(settings, memory, machine))
    if count != "auto":
        return profile, compared(make_plan(profile, settings), profile, settings, thorough=True)
    whole = profile
    choice = choose_parts(lambda n: whole if n == 1 else estimate(app, machine, micro_batches=n), settings)
    return choice.profile, compared(choice.plan, choice.profile, settings, thorough=True)


def _parts(app: App) -> int | Literal["auto"]:
    found: int | Literal["auto"] = getattr(app.trainer.strategy, "micro_batches", 1)
    return found


def _with_best_batch(app: App, memory: str | None, hardware: str | None) -> tuple[Profile, Plan]:
    """Return the profile and the plan of the batch size with the highest throughput."""
    from lt_offload.plan import choose_batch

    first = estimate(app, hardware, 1)
    settings, machine = _settings(app), first.hardware
    choice = choose_batch(
        lambda size: first if size == 1 else estimate(app, machine, size),
        replace(settings, memory=_budget(settings, memory, machine)),
        effective=effective_batch(app.trainer, app.datamodule.batch_size),
        on_progress=status,
    )
    return choice.profile, choice.plan


def _sweep(
    app: App,
    asked: SweepRange,
    *,
    memory: str | None,
    hardware: str | None,
    save: str | None,
    report: str | None,
    trace: str | None,
    explain: bool,
) -> int:
    """Plan for a row of sizes or machines and print a table."""
    if getattr(app.trainer.strategy, "batch_size", None) == "auto":
        raise ConfigError("trainer.strategy.batch_size='auto' cannot be combined with a sweep; give a number")
    if _parts(app) == "auto":
        raise ConfigError("trainer.strategy.micro_batches='auto' cannot be combined with a sweep; give a number")
    given = {"memory": memory, "hardware": hardware, "host_memory": None}[asked.axis]
    if given is not None:
        raise ConfigError(f"{asked.axis}={given!r} cannot be combined with a sweep over {asked.axis}; leave one out")
    if trace is not None:
        raise ConfigError(f"trace={trace!r} shows one plan and a sweep makes many; leave one of them out")
    if explain:
        raise ConfigError("--explain shows one plan and a sweep makes many; leave one of them out")
    if save is not None and Path(save).suffix.lower() not in (".csv", ".json"):
        raise ConfigError(f"save={save!r}: a sweep is saved as a table; end the name with .csv or .json")
    seconds = max(_LEAST_SECONDS, _SWEEP_SECONDS / len(asked.sizes or asked.names))
    questions = list(_questions(app, asked, memory, hardware, _solver(app, seconds)))
    swept = run_sweep(
        asked.axis,
        questions,
        model=_model_name(app),
        dtype=app.model.model_dtype,
        sequence_length=app.datamodule.max_length,
        say=status,
    )
    clear()
    print(swept.explain())
    if save is not None:
        print(f"table: {swept.save(save)}")
    if report is not None:
        from lt_offload.report.sweep_page import write_sweep_report

        print(f"report: {write_sweep_report(report, swept)}")
    return 0


def _questions(
    app: App, asked: SweepRange, memory: str | None, hardware: str | None, solve: Solver
) -> Iterator[Question]:
    """Yield the points of a sweep; the model is profiled once per machine."""

    def question(machine: HardwareProfile, budget: int, ram: int, profile: Profile | None) -> Question:
        def plan_it() -> Plan:
            if profile is None:
                raise InfeasibleError(f"there are no figures for {app.model.model_dtype}")
            return solve(profile, budget, ram)

        return Question(hardware=machine.name, memory_bytes=budget, host_memory_bytes=ram, solve=plan_it)

    settings = _settings(app)
    for machine in [load_hardware(name) for name in asked.names]:
        rated = app.model.model_dtype in machine.flops_per_s  # its description has figures for this dtype
        budget = machine.device_bytes if memory is None else min(parse_bytes(memory), machine.device_bytes)
        yield question(machine, budget, settings.host_budget(machine), estimate(app, machine) if rated else None)
    if asked.axis == "hardware":
        return
    profile = estimate(app, hardware)
    machine = profile.hardware
    if asked.axis == "memory":
        budgets = [(size, settings.host_budget(machine)) for size in asked.sizes]
    else:
        memory_bytes = _budget(settings, memory, machine)
        budgets = [(memory_bytes, size) for size in asked.sizes]
    yield from (question(machine, budget, ram, profile) for budget, ram in budgets)


def _solver(app: App, seconds: float) -> Solver:
    """Return what plans with the strategy's settings, each plan in ``seconds`` at most."""
    from lt_offload.plan import make_plan

    settings = _settings(app)
    settings = replace(settings, time_limit=min(settings.time_limit, seconds))
    return lambda profile, memory, host_memory: make_plan(
        profile, replace(settings, memory=memory, host_memory=host_memory)
    )


def _settings(app: App) -> Settings:
    """Return what the strategy plans with; the defaults if it is another than offmate. Windows are the Trainer's."""
    settings = getattr(app.trainer.strategy, "settings", None)
    return asked(settings if isinstance(settings, Settings) else Settings(), app.trainer)


def _budget(settings: Settings, memory: str | None, machine: HardwareProfile) -> int:
    """Return the device budget: ``memory`` if that was asked for, else the recipe's as far as the device has it."""
    has = machine.device_bytes
    budget = settings.device_budget(machine) if memory is None else parse_bytes(memory)
    if budget > has and memory is None:
        say(f"{machine.name} has {format_bytes(has)}, not {format_bytes(budget)} as in the recipe")
        budget = has
    more = f", although it has {format_bytes(has)}" if budget > has else ""  # a question about another card
    say(f"planning for {format_bytes(budget)} on {machine.name}{more}")
    return budget


def estimate(
    app: App,
    hardware: str | HardwareProfile | None,
    batch_size: int | None = None,
    micro_batches: int | None = None,
) -> Profile:
    """Return the profile of the app's model on ``hardware``, without weights.

    Args:
        app: the settings.
        hardware: None: this machine.
        batch_size: None: the settings'.
        micro_batches: parts of a batch; None: the strategy's.
    """
    parts = micro_batches or _parts(app)
    assert parts != "auto"
    from lt_offload.finetune import load
    from lt_offload.optim import AdamW
    from lt_offload.profiling.from_config import profile_config
    from lt_offload.profiling.hardware import measure_machine

    module, data = app.model, app.datamodule
    if hardware is not None:
        say(f"estimating for {hardware if isinstance(hardware, str) else hardware.name}")
    config = load.load_config(module.name, module.architecture)
    check_data(config, max_length=data.max_length)
    module.check_packing(config, data)
    if module.dropout is not None:
        load.set_dropout(config, module.dropout)
    if module.attention is not None:
        config._attn_implementation = module.attention
    try:
        module.count_tokens()
    except ConfigError:  # a plan needs nothing from the hub
        module.assume_tokens(config.vocab_size + len(module.new_tokens))
        say(f"the tokenizer is not here: planning for {module.count_tokens()} tokens")
    optimizer: str | OptimizerFactory = module.optimizer
    if module.master_weights or module.stochastic_rounding:
        optimizer = partial(AdamW, stochastic_rounding=module.stochastic_rounding)
    if module.compile_blocks:
        say("estimating the blocks as they are without model.compile_blocks; training measures what is compiled")
    profile = profile_config(
        config,
        batch_size=batch_size or getattr(app.trainer.strategy, "batch_size", None) or data.batch_size,
        sequence_length=data.max_length,
        dtype=module.model_dtype,
        autocast="bfloat16" if app.trainer.precision == "bf16-mixed" else None,
        hardware=hardware or measure_machine(on_progress=status),
        optimizer=optimizer,
        quantize=module.quantize,
        prepare=module.prepare,
        padding=not data.pack,
        packing=data.pack is True,
        blocks=getattr(app.trainer.strategy, "blocks", None),
        micro_batches=parts,
        on_progress=status,
    )
    return replace(profile, model=_model_name(app))


def _model_name(app: App) -> str:
    """Return what people call the model: the name of its configuration, or of the folder that holds it."""
    path = Path(app.model.architecture or app.model.name)
    return path.resolve().parent.name if path.name == "config.json" else path.name.removesuffix(".json")
