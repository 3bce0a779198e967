"""``lt-finetune plan``: one plan or many from settings alone, without weights.

The parameters of :func:`plan` are the verb's flags.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lt_offload.cli import recipes
from lt_offload.cli.outputs import check_output, print_table
from lt_offload.compat.hugging_face import set_attention
from lt_offload.errors import ConfigError, InfeasibleError, OffloadError
from lt_offload.finetune import load
from lt_offload.finetune.preferences import planned_loss
from lt_offload.finetune.terminal import clear, quiet, say, status
from lt_offload.plan import choose_batch, make_plan, simulate
from lt_offload.plan.batch.choose import choose_parts
from lt_offload.plan.batch.profiles import in_parts, scaled
from lt_offload.plan.orders import compared
from lt_offload.plan.settings import Settings
from lt_offload.plan.several import check_cards, gain, one_of
from lt_offload.plan.sweep import HEAD, SweepPoint, SweepRange, parse_sweep, run_sweep, save_sweep
from lt_offload.plan.what_if import gains
from lt_offload.profiling.from_config import profile_config
from lt_offload.profiling.hardware import load_hardware, measure_machine
from lt_offload.report.perfetto import save_perfetto
from lt_offload.report.plan_page import write_plan_report
from lt_offload.schema.explain import brief
from lt_offload.strategy.windows import choices_of, reads_gradients, settings_from_trainer
from lt_offload.units import Budget, format_bytes, format_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lt_offload.cli.app import App
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import HardwareProfile, Profile

_GAIN_SECONDS = 8.0
"""Seconds for each of the plans in a report that show the gains of a better machine."""
_SWEEP_SECONDS = 90.0
"""Seconds for all plans of a sweep together ..."""
_LEAST_SECONDS = 4.0
"""... but at least this for each of them."""
_FIRST_SECONDS = 0.5
"""Seconds for a first plan."""
_GLANCE = 4
"""Sequences of a batch that is profiled for a first plan only."""
_WIDTH = 100


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
    devices: int | None = None,
    nodes: int | None = None,
) -> int:
    """Plan without weights and without a GPU, and explain the plan.

    Standard error has a first plan within seconds. Ctrl-C ends the search for better ones and keeps the best so far.

    Args:
        app: the settings.
        memory: device memory, e.g. 12GB; default: the strategy's, else all of the hardware's.
        hardware: name of a shipped description (rtx-3060-12gb, ...) or a YAML file, as 'lt-finetune doctor --save'
            writes; changes may follow: rtx-3060,host=ddr4-64gb or rtx-3060,ram=48GB,link=6GB; of RAM that is named so
            a tenth is left to the system; default: this machine.
        sweep: plan for many and compare: memory=6GB:24GB:2GB, host_memory=32GB:128GB, hardware=rtx-3060,rtx-3090,
            devices=1:8 or nodes=1:64.
        save: file to write the plan to; --trainer.strategy.plan replays it on the machine it was made for. With sweep,
            the table as .csv or .json.
        report: HTML page to write; says what more memory or a faster link would buy, which takes a few plans more.
        trace: file to write the simulated iteration to, for ui.perfetto.dev and chrome://tracing.
        explain: say what happens to every block, and why the plan was chosen.
        devices: cards of the machine, each with its process: the plan is that of one of them while all work, and says
            what they buy beside one; default: those of --trainer.devices.
        nodes: machines that are alike, each with as many cards and one network card; default: --trainer.num_nodes.
    """
    count = app.trainer.num_devices if devices is None else devices
    machines = app.trainer.num_nodes if nodes is None else nodes
    check_cards(count, machines)
    for flag, path in (("--save", save), ("--report", report), ("--trace", trace)):
        if path is not None:
            check_output(path, flag, make=True)
    replayed = getattr(app.trainer.strategy, "plan_path", None)
    if replayed is not None:
        raise ConfigError(
            f"trainer.strategy.plan={str(replayed)!r} is replayed by training, and this verb makes plans; set it to "
            "null"
        )
    budget = Budget.of(memory)  # slips are noticed here, before all that is slow
    if budget.nbytes is not None and hardware is not None and sweep is None:
        Settings(memory=budget).check_card(load_hardware(hardware))
    if sweep is not None:
        for flag, value in ((f"trace={trace!r}", trace), ("--explain", explain)):
            if value:
                raise ConfigError(f"{flag} shows one plan and a sweep makes many; leave one of them out")
        if report is not None:
            raise ConfigError(
                f"report={report!r} draws one plan and a sweep makes many; --save table.csv keeps its table"
            )
        return _sweep(app, parse_sweep(sweep), memory, hardware, (count, machines), save=save)
    best: list[tuple[Profile, Plan]] = []
    stopped = False
    try:
        profile, made = _planned(app, budget, hardware, (count, machines), lambda *pair: best.append(pair))
    except InfeasibleError as error:
        raise _with_recipe(error, app, hardware) from None
    except KeyboardInterrupt:
        if not best:
            raise
        (profile, made), stopped = best[-1], True
    clear()
    print(made.explain() if explain else f"{brief(made)}\n--explain shows it block by block.")
    if stopped:
        print("Stopped by Ctrl-C: this is the best plan until then.")
    elif count * machines > 1:
        print(textwrap.fill(_bought(app, made, profile, hardware), 79))
    if save is not None:
        print(f"plan: {made.save(save)}")
    simulated = simulate(made, profile)
    if trace is not None:
        print(f"trace: {save_perfetto(simulated, trace)}")
    if report is not None:
        bought = [] if stopped else gains(made, profile, _solver(app, _GAIN_SECONDS), say=status)
        print(f"report: {write_plan_report(report, made, profile, simulated, bought)}")
    return 130 if stopped else 0


def _with_recipe(error: InfeasibleError, app: App, hardware: str | None) -> InfeasibleError:
    """Return ``error`` with a recipe that fits the machine, if its RAM is too small."""
    if error.needed_host_bytes is None or hardware is None:
        return error
    machine = load_hardware(hardware)
    name = recipes.largest_within(machine.device_bytes, settings_of(app).host_budget(machine))
    more = f"; of the recipes that come with lt_offload, {name} fits" if name else ""
    return InfeasibleError(f"{error}{more}", needed_bytes=error.needed_bytes, needed_host_bytes=error.needed_host_bytes)


def _bought(app: App, plan: Plan, profile: Profile, hardware: str | None) -> str:
    """Return the gain of the cards of ``profile`` over one card, as a sentence."""
    count = profile.processes * profile.machines
    one = estimate(app, hardware, profile.batch_size, profile.parts)
    status("planning for one card")
    settings = replace(settings_of(app), memory=plan.budget_bytes, accumulate=plan.accumulate)
    try:
        alone = make_plan(one, settings)
    except InfeasibleError as error:
        return f"{count} cards; one of them alone cannot be planned with this RAM: {error}"
    clear()
    return f"{gain(plan, profile, alone).sentence()}. The plan is that of one of the {count} processes."


def _planned(
    app: App, memory: Budget, hardware: str | None, cards: tuple[int, int], keep: Callable[[Profile, Plan], None]
) -> tuple[Profile, Plan]:
    """Return the profile and the plan of the strategy's batch, or of the fastest size or number of parts.

    ``cards`` are those of each machine, and the number of machines; ``keep`` gets the best plan whenever it changes.
    """
    best, parts = getattr(app.trainer.strategy, "batch_size", None) == "auto", parts_of(app)
    size, count = batch_of(app), 1 if parts == "auto" else parts
    # A batch in parts takes seconds to profile: a first plan is of fewer sequences that go through blocks as a whole.
    rough = not best and count > 1 and not quiet()
    first = estimate(app, hardware, 1 if best else min(size, _GLANCE) if rough else size, 1 if best or rough else count)
    # The machine is measured once: others are estimated for what it has shown the first time.
    machine = first.hardware
    settings = on_machine(settings_of(app), memory, machine)
    # One of several processes has its part of the RAM that was named.
    if (ram := settings.host.nbytes) is not None:
        settings = replace(settings, host_memory=ram // cards[0])
    if not quiet():
        _first(one_of(in_parts(scaled(first, size), count) if rough else first, *cards), settings, keep)
    alone = one_of(estimate(app, machine, size, count) if rough else first, *cards)

    def profile_at(size: int, count: int) -> Profile:
        known = (size, count) == (alone.batch_size, alone.parts)
        return alone if known else one_of(estimate(app, machine, size, count), *cards)

    if best:
        choices = choices_of(app.trainer, app.datamodule.batch_size)
        profile, plan = choose_batch(profile_at, settings, choices, on_progress=status, on_plan=keep)
    elif parts == "auto":
        profile, plan = choose_parts(lambda count: profile_at(alone.batch_size, count), settings, on_plan=keep)
    else:
        status("looking for better plans")
        made = make_plan(alone, settings)
        keep(alone, made)
        status("comparing with other updates")
        return alone, compared(made, alone, settings, thorough=True)
    keep(profile, plan)
    return profile, compared(plan, profile, replace(settings, accumulate=plan.accumulate), thorough=True)


def _first(profile: Profile, settings: Settings, keep: Callable[[Profile, Plan], None]) -> None:
    """Tell a plan that is found at once, if there is one; a search at length has the last word.

    Raises ``InfeasibleError`` if RAM is too small for any plan.
    """
    status("looking for a first plan")
    quick = replace(settings, solver_time_limit=min(settings.solver_time_limit, _FIRST_SECONDS))
    try:
        plan = make_plan(profile, quick, bounded=False)
    except OffloadError as error:
        if isinstance(error, InfeasibleError) and error.needed_host_bytes is not None:
            raise  # another estimate would need as much
        return
    keep(profile, plan)
    predicted, batch = plan.predicted, f"{plan.accumulate} x " * (plan.accumulate > 1)
    rate = f", {plan.tokens_per_s:.0f} tokens/s" if plan.tokens_per_s else ""
    say(
        f"it fits. A first plan: about {format_seconds(predicted.iteration_s)} for {batch}{plan.batch_size} x "
        f"{plan.sequence_length} tokens{rate}, {format_bytes(predicted.device_peak_bytes)} on the device, "
        f"{format_bytes(predicted.host_peak_bytes)} of RAM. Better ones take about {settings.solver_time_limit:.0f} s "
        "at most; Ctrl-C keeps the best so far"
    )


# -- many plans ------------------------------------------------------------------------------------------------------


def _sweep(
    app: App, wanted: SweepRange, memory: str | None, hardware: str | None, cards: tuple[int, int], *, save: str | None
) -> int:
    """Plan for a row of sizes, machines, numbers of cards or of machines and print a table.

    ``cards`` are those of each machine, and the number of machines, where the sweep is not over them.
    """
    axis, (devices, nodes) = wanted.axis, cards
    for count in wanted.sizes if axis in ("devices", "nodes") else ():
        check_cards(*((count, nodes) if axis == "devices" else (devices, count)))
    for name in ("batch_size", "micro_batches"):
        if getattr(app.trainer.strategy, name, None) == "auto":
            raise ConfigError(f"trainer.strategy.{name}='auto' cannot be combined with a sweep; give a number")
    fixed = {"memory": memory, "hardware": hardware, "devices": devices, "nodes": nodes}.get(axis)
    if fixed not in (None, 1):
        raise ConfigError(f"{axis}={fixed!r} cannot be combined with a sweep over {axis}; leave one out")
    if save is not None and Path(save).suffix.lower() not in (".csv", ".json"):
        raise ConfigError(f"save={save!r}: a sweep is saved as a table; end the name with .csv or .json")
    points, answer = run_sweep(axis, list(_questions(app, wanted, Budget.of(memory), hardware, cards)), status)
    clear()
    batches = sorted({point.plan.batch_size for point in points if point.plan is not None})
    batch = f"batch {'-'.join(map(str, batches[:: max(1, len(batches) - 1)]))} x " if batches else ""
    about = f"{model_name(app)}, {app.model.model_dtype}, {batch}{app.datamodule.max_length} tokens"
    print(f"{about}; times and peaks are simulated\n")
    print_table((axis.replace("_", " "), *HEAD), (point.row(axis) for point in points), width=_WIDTH, words=True)
    print(f"\n{answer}")
    if save is not None:
        print(f"table: {save_sweep(save, points)}")
    return 0


def _questions(
    app: App, wanted: SweepRange, memory: Budget, hardware: str | None, cards: tuple[int, int]
) -> Iterator[tuple[SweepPoint, Callable[[], Plan]]]:
    """Yield the points of a sweep, on ``cards`` of so many machines; the model is profiled once per machine."""
    settings, axis = settings_of(app), wanted.axis
    # Divided by the points, so that a sweep takes about as long whatever it goes over.
    solve = _solver(app, max(_LEAST_SECONDS, _SWEEP_SECONDS / len(wanted.sizes or wanted.names)))
    profile: Profile | None = None
    for value in wanted.sizes or wanted.names:
        if isinstance(value, str):
            machine = load_hardware(value)
            profile = estimate(app, machine) if app.model.model_dtype in machine.flops_per_s else None
            budget = min(memory.nbytes or machine.device_bytes, machine.device_bytes)
        elif profile is None:
            profile = estimate(app, hardware)
            machine = profile.hardware
            budget = 0 if axis == "memory" else on_machine(settings, memory, machine).device_budget(machine)
        at: dict[str, int] = {"memory": budget, "host_memory": settings.host_budget(machine)}
        at |= {"devices": cards[0], "nodes": cards[1]} | ({} if isinstance(value, str) else {axis: value})

        def plan_it(profile: Profile | None = profile, at: dict[str, int] = at) -> Plan:
            # The error comes with the point's turn: one machine without figures is a row of
            # the table, not the end of the sweep.
            if profile is None:
                raise InfeasibleError(f"there are no figures for {app.model.model_dtype}")
            # Each process may take its part of the RAM that the machine has, or that was named.
            one = one_of(profile, at["devices"], at["nodes"])
            return solve(one, at["memory"], at["host_memory"] // at["devices"])

        point = SweepPoint(
            hardware=machine.name, memory_bytes=at["memory"], host_memory_bytes=at["host_memory"],
            devices=at["devices"], nodes=at["nodes"],
        )  # fmt: skip
        yield point, plan_it


# -- the request to the planner --------------------------------------------------------------------------------------


def estimate(
    app: App,
    hardware: str | HardwareProfile | None,
    batch_size: int | None = None,
    micro_batches: int | None = None,
    *,
    host_memory: int | None = None,
) -> Profile:
    """Return the profile of the app's model on ``hardware`` (None: this machine), without weights.

    Batch size and parts of a batch are the settings' where they are None. ``host_memory``: bytes of RAM, of which the
    weights alone must not take more; None: any.
    """
    parts = micro_batches or parts_of(app)
    assert parts != "auto"
    module, data = app.model, app.datamodule
    if hardware is not None:
        say(f"estimating for {hardware if isinstance(hardware, str) else hardware.name}")
    config = configuration(app)
    if hardware is None:
        machine = measure_machine(on_progress=status)
    else:
        machine = load_hardware(hardware) if isinstance(hardware, str) else hardware
    profile = profile_config(
        config,
        batch_size=batch_size or batch_of(app),
        sequence_length=data.max_length,
        dtype=module.model_dtype,
        # Of float16, which has as many bytes, no machine has figures.
        autocast="bfloat16" if app.trainer.precision in ("bf16-mixed", "16-mixed") else None,
        hardware=machine,
        optimizer=module.make_optimizer,
        quantize=module.quantize,
        prepare=partial(module.prepare, machine=machine),
        loss=partial(planned_loss, beta=module.dpo_beta) if data.pairs else None,
        padding=not data.pack,
        packing=data.pack is True,
        blocks=getattr(app.trainer.strategy, "blocks", None),
        micro_batches=parts,
        tile_tokens=getattr(app.trainer.strategy, "tile_tokens", None),
        compile_blocks=module.compile_blocks,
        host_memory=host_memory,
        on_progress=status,
    )
    return replace(profile, model=model_name(app), added_up_first=reads_gradients(app.trainer))


def configuration(app: App) -> PreTrainedConfig:
    """Return the configuration of the app's model with the settings that change it.

    Raises ``ConfigError`` if there is none without the hub, or a setting does not suit it.
    """
    module, data = app.model, app.datamodule
    config = load.load_config(module.name, module.architecture)
    module.check_data(config, data, app.trainer.strategy)
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


def batch_of(app: App) -> Any:
    """Return the samples of a batch: the strategy's, which may be ``"auto"``, else the data's; of a pair two."""
    size = getattr(app.trainer.strategy, "batch_size", None) or app.datamodule.batch_size
    return 2 * size if app.datamodule.pairs and size != "auto" else size


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


def _solver(app: App, seconds: float) -> Callable[[Profile, int, int], Plan]:
    """Return a solver with the strategy's settings, for plans in ``seconds`` each; for all cards of a profile."""
    settings = settings_of(app)
    # Never more time than the user allows for a single plan.
    settings = replace(settings, solver_time_limit=min(settings.solver_time_limit, seconds))
    return lambda profile, memory, host_memory: make_plan(
        profile, replace(settings, memory=memory, host_memory=host_memory)
    )
