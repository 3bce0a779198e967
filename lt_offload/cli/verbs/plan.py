"""``lt-finetune plan``: one plan or many from settings alone. The parameters of :func:`plan` are the verb's flags."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from lt_offload.cli import recipes
from lt_offload.cli.outputs import check_output
from lt_offload.cli.planning import estimate, on_machine, parts_of, plan_sweep, settings_of, solver
from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.finetune.terminal import clear, status
from lt_offload.plan import choose_batch, make_plan, simulate
from lt_offload.plan.batch.choose import choose_parts
from lt_offload.plan.orders import compared
from lt_offload.plan.several import check_cards, gain, one_of
from lt_offload.plan.sweep import parse_sweep
from lt_offload.plan.what_if import gains
from lt_offload.profiling.hardware import load_hardware
from lt_offload.report.perfetto import save_perfetto
from lt_offload.report.plan_page import write_plan_report
from lt_offload.schema.explain import brief
from lt_offload.strategy.windows import choices_of
from lt_offload.units import Budget

if TYPE_CHECKING:
    from lt_offload.cli.app import App
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import Profile

_GAIN_SECONDS = 8.0
"""Seconds for each of the plans in a report that show the gains of a better machine."""


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

    Args:
        app: the settings.
        memory: device memory, e.g. 12GB; default: the strategy's, else all of the hardware's.
        hardware: name of a shipped description (rtx-3060-12gb, ...) or a YAML file, as 'lt-finetune doctor --save'
            writes; changes may follow: rtx-3060,host=ddr4-64gb or rtx-3060,ram=48GB,link=6GB; default: this machine.
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
    budget = Budget.of(memory)  # a slip is noticed here, before all that is slow
    if sweep is not None:
        for flag, value in ((f"trace={trace!r}", trace), ("--explain", explain)):
            if value:
                raise ConfigError(f"{flag} shows one plan and a sweep makes many; leave one of them out")
        if report is not None:
            raise ConfigError(
                f"report={report!r} draws one plan and a sweep makes many; --save table.csv keeps its table"
            )
        return plan_sweep(app, parse_sweep(sweep), memory, hardware, (count, machines), save=save)
    try:
        profile, made = _planned(app, budget, hardware, (count, machines))
    except InfeasibleError as error:
        raise _with_recipe(error, app, hardware) from None
    clear()
    print(made.explain() if explain else f"{brief(made)}\n--explain shows it block by block.")
    if count * machines > 1:
        print(textwrap.fill(_bought(app, made, profile, hardware), 79))
    if save is not None:
        print(f"plan: {made.save(save)}")
    simulated = simulate(made, profile)
    if trace is not None:
        print(f"trace: {save_perfetto(simulated, trace)}")
    if report is not None:
        bought = gains(made, profile, solver(app, _GAIN_SECONDS), say=status)
        print(f"report: {write_plan_report(report, made, profile, simulated, bought)}")
    return 0


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


def _planned(app: App, memory: Budget, hardware: str | None, cards: tuple[int, int]) -> tuple[Profile, Plan]:
    """Return the profile and the plan of the strategy's batch, or of the fastest size or number of parts.

    ``cards`` are those of each machine, and the number of machines.
    """
    best, parts = getattr(app.trainer.strategy, "batch_size", None) == "auto", parts_of(app)
    # The machine is measured once: others are estimated for what it has shown the first time.
    first = estimate(app, hardware, 1 if best else None, 1 if best or parts == "auto" else parts)
    machine, alone = first.hardware, one_of(first, *cards)
    settings = on_machine(settings_of(app), memory, machine)
    # One of several processes has its part of the RAM that was named.
    if (ram := settings.host.nbytes) is not None:
        settings = replace(settings, host_memory=ram // cards[0])

    def profile_at(size: int, count: int) -> Profile:
        known = (size, count) == (alone.batch_size, alone.parts)
        return alone if known else one_of(estimate(app, machine, size, count), *cards)

    if best:
        choices = choices_of(app.trainer, app.datamodule.batch_size)
        choice = choose_batch(profile_at, settings, choices, on_progress=status)
    elif parts == "auto":
        choice = choose_parts(lambda count: profile_at(alone.batch_size, count), settings)
    else:
        return alone, compared(make_plan(alone, settings), alone, settings, thorough=True)
    settings = replace(settings, accumulate=choice.plan.accumulate)
    return choice.profile, compared(choice.plan, choice.profile, settings, thorough=True)
