"""``lt-finetune new``: a recipe for any causal language model, chosen by planning ways to train it."""

from __future__ import annotations

import itertools
import math
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lt_offload.cli import messages
from lt_offload.cli.outputs import check_output, print_table
from lt_offload.cli.table import imported
from lt_offload.errors import ConfigError
from lt_offload.finetune.terminal import clear, say, status
from lt_offload.profiling.hardware import hardware_names, load_hardware, measure_machine
from lt_offload.replacing import save_text
from lt_offload.resources import is_file, user_path
from lt_offload.units import Budget, format_bytes, format_seconds

if TYPE_CHECKING:
    from lt_offload.cli.models import NamedModel
    from lt_offload.cli.verbs.ways import Machine, WayToTrain
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import HardwareProfile

_WIDTH = 80
RAM = re.compile(r" \(\d+ GB of RAM\)$")
"""The end of a recipe's first line."""


def new(
    model: str,
    *,
    memory: str | None = None,
    host_memory: str | None = None,
    hardware: str | None = None,
    method: Literal["auto", "full", "bf16", "lora", "qlora"] = "auto",
    data: str | None = None,
    output: str | None = None,
) -> int:
    """Write a recipe for a causal language model, without its weights and without a GPU.

    Every way to train it is planned: roughly in the first seconds, and then better. Of those that fit, the most exact
    one is taken that is at least half as fast as the fastest one. Ctrl-C writes the recipe with what there is by then.

    Args:
        model: name on the hub, model folder, JSON file with a configuration, GGUF file, or a shipped architecture
            (llama3-8b).
        memory: device memory that the training may take, e.g. 12GB; default: all of the hardware's.
        host_memory: RAM that the training may take; default: all of the hardware's.
        hardware: what to plan for, as 'lt-finetune plan' takes it; default: the GPU of this machine, else a shipped
            description of a card with that much memory.
        method: auto; all weights in fp32 (full) or in bfloat16 (bf16); adapters on bfloat16 weights (lora) or on ones
            of four bits (qlora).
        data: what to train on; default: a data set of instructions from the hub.
        output: file to write; default: named after model, method and memory. Nothing is overwritten.
    """
    if output is not None and Path(output).suffix not in (".yaml", ".yml"):
        stem = output.rstrip("/") or "recipe"
        raise ConfigError(f"--output: {output!r} is not the name of a recipe; did you mean {stem}.yaml?")
    free = next(path for path in _numbered("recipe.yaml") if not os.path.lexists(path))
    check_output(output or free, "--output", new=True)
    status(f"lt-finetune new {model}: starting PyTorch and Lightning")
    card = _machine(memory, host_memory, hardware)
    # What can be refused at once has been: these imports take seconds.
    imported("lt_offload.cli.verbs.ways")
    from lt_offload.cli.models import named
    from lt_offload.cli.verbs.ways import Drafts, Machine, best

    machine, source = Machine(*card, host_memory), named(model)
    _check_architecture(source, user_path(output or "").parent)
    messages.install()
    with tempfile.TemporaryDirectory() as folder:
        drafts, stopped = Drafts(source, machine, data, Path(folder)), False
        try:
            drafts.ways(method)
            ways, chosen = drafts.choose(drafts.improved())
        except KeyboardInterrupt:
            if not any(way.plan is not None for way in drafts.known):
                raise
            ways, chosen, stopped = drafts.known, best(drafts.known), True
    clear()
    memory_name = machine.memory.replace(" ", "").lower()
    name = f"{source.architecture.removesuffix('.json')}-{chosen.method.name}-{memory_name}.yaml"
    text = drafts.text(chosen, stopped=stopped)
    for target in _numbered(name) if output is None else [user_path(output)]:
        with suppress(FileExistsError):  # planning has taken a minute
            _write(target, source, chosen, machine, text=text, has_data=data is not None)
            break
        if output is not None:
            check_output(target, "--output", new=True)
    _explain(source, machine, ways, chosen, stopped=stopped)
    print(f"{target}  (run it: lt-finetune {target})")
    return 130 if stopped else 0


def _machine(
    memory: str | None, host_memory: str | None, hardware: str | None
) -> tuple[HardwareProfile, str | None, str]:
    """Return the machine to plan for, with its name and its memory: the named one, this one, or a card with as much."""
    device = Budget.of(memory).nbytes
    Budget.of(host_memory, setting="host_memory")  # a slip is noticed here
    if hardware is None and imported("torch").cuda.is_available():
        profile = measure_machine(on_progress=status)
    else:
        if hardware is None:
            hardware = _card(memory, device)
            say(f"there is no GPU here: planning for {hardware}; --hardware names another")
        if host_memory is not None:
            hardware = f"{hardware},free={host_memory}"
        profile = load_hardware(hardware)
    if device is not None and device < profile.context_bytes:
        raise ConfigError(
            f"memory={memory!r} is not enough for any model: on {profile.name} CUDA takes "
            f"{format_bytes(profile.context_bytes)} before the first weight; give more, e.g. --memory 2GB"
        )
    return profile, hardware, memory or f"{profile.device_bytes // 10**9}GB"


def _card(memory: str | None, wanted: int | None) -> str:
    """Return the shipped card with the least memory that is enough, the slowest of those with as much."""
    if wanted is None:
        raise ConfigError(
            "new: there is no GPU here to plan for; say how much memory yours has, e.g. --memory 12GB, or name it, "
            "e.g. --hardware rtx-3060-12gb"
        )
    cards = [load_hardware(name) for name in hardware_names()]
    fitting = [card for card in cards if card.device_bytes >= wanted and "bfloat16" in card.flops_per_s]
    if not fitting:
        most = max(card.device_bytes for card in cards)
        raise ConfigError(
            f"memory={memory!r} is more than any card has that is described here ({format_bytes(most)}); describe "
            "yours in a file that --hardware names, see 'lt-finetune doctor --save'"
        )
    return min(fitting, key=lambda card: (card.device_bytes, card.flops_per_s["bfloat16"], card.name)).name


# -- files and words ---------------------------------------------------------------------------------------------------


def figures(plan: Plan) -> dict[str, float]:
    """Return the figures of ``plan`` for one update that a header shows: seconds, bytes, and sequences of all cards."""
    shown = ("iteration_s", "no_offload_s", "device_peak_bytes", "host_peak_bytes")
    samples = plan.processes * plan.batch_size * plan.accumulate
    return {"samples": samples, "sequence_length": plan.sequence_length} | {
        name: getattr(plan.predicted, name) for name in shown
    }


def header(
    title: str,
    recipe: str,
    hardware: str | None,
    figures: Mapping[str, float],
    *,
    flags: str = " --data.path my.json",
    made: str = "",
) -> list[str]:
    """Return the lines of the comment.

    ``title`` is the model and the way it is trained, and may have the RAM of an earlier plan at its end; ``hardware``
    the machine of the plan, as ``--hardware`` takes it (None: this one); ``made`` the date of the plan, and the
    version.
    """
    step, enough = format_seconds(figures["iteration_s"]), format_seconds(figures["no_offload_s"])
    device, host = (format_bytes(int(figures[name])) for name in ("device_peak_bytes", "host_peak_bytes"))
    return [
        f"# {RAM.sub('', title)} ({math.ceil(figures['host_peak_bytes'] / 1e9)} GB of RAM)",
        f"#   lt-finetune {recipe}{flags}",
        f"#   lt-finetune plan {recipe}{f' --hardware {hardware}' if hardware else ''}",
        f"# Simulated there: {step} per step of {figures['samples']} x {figures['sequence_length']} tokens ({enough} "
        f"with enough memory), {device} on the GPU, {host} of RAM",
        *([f"# Planned on {made}"] if made else []),
    ]


def _numbered(name: str) -> Iterator[Path]:
    """Yield the path ``name``, and then with a number in it for each time that something has that name."""
    path = Path(name)
    yield path
    yield from (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))


def _check_architecture(source: NamedModel, folder: Path) -> None:
    """Raise ``ConfigError`` if ``folder`` has the architecture of another model under this one's name."""
    file = folder / source.architecture
    if not source.shipped and os.path.exists(file) and not (is_file(file) and source.has_architecture_of(file)):
        raise ConfigError(f"new: {file} exists already and is of another model; choose another folder")


def _write(target: Path, source: NamedModel, way: WayToTrain, machine: Machine, *, text: str, has_data: bool) -> None:
    """Write the recipe, a new file, and the architecture beside it unless it comes with the package."""
    assert way.plan is not None
    if not source.shipped:
        architecture = target.parent / source.architecture
        if not is_file(architecture):
            source.save_architecture(architecture)
            print(f"{architecture}  (what is planned without a download)")
    title = f"{source.name}, {way.method.title}"
    flags = {"flags": ""} if has_data else {}
    lines = header(title, str(target), machine.hardware, figures(way.plan), **flags)
    save_text(target, "\n".join(lines) + "\n" + text, new=True)


def _explain(
    source: NamedModel, machine: Machine, ways: Sequence[WayToTrain], chosen: WayToTrain, *, stopped: bool
) -> None:
    """Print the table of the plans, and the reason for the choice, in 80 columns."""
    from lt_offload.cli.verbs.ways import BATCH

    about = (
        f"{source.name} on {machine.profile.name} with {machine.memory} on the GPU and "
        f"{format_bytes(machine.profile.host_bytes)} of RAM, {BATCH} sequences of {chosen.length} tokens per update "
        "(estimates):"
    )
    print(f"{textwrap.fill(about, _WIDTH)}\n")
    rows, others = [], []
    for way in (chosen if way.method == chosen.method else way for way in ways):
        if way.plan is None:
            others.append(f"{way.method.title}: {way.why}")
            continue
        promise = way.plan.predicted
        peaks = map(format_bytes, (promise.device_peak_bytes, promise.host_peak_bytes))
        rows.append((way.method.title, format_seconds(promise.iteration_s), f"{way.tokens_per_s:.0f}", *peaks))
    print_table(("", "step", "tokens/s", "GPU", "RAM"), rows, width=_WIDTH)
    print("", *(textwrap.fill(other, _WIDTH) for other in others), sep="\n")
    assert chosen.plan is not None
    predicted = chosen.plan.predicted
    slower = predicted.iteration_s / predicted.no_offload_s
    fitting = [way.method for way in ways if way.plan is not None]
    why = "the most exact one that is at least half as fast as the fastest"
    if fitting[0] == chosen.method:
        why = "the only one that fits" if len(fitting) == 1 else "the most exact one that fits"
    if stopped:
        print(textwrap.fill("Stopped by Ctrl-C: this is the best plan until then.", _WIDTH))
        why += " so far; training, or 'lt-finetune plan', finds a better plan"
    reasons = f"Chosen: {chosen.method.title}, {why}; its step takes {slower:.2f} times as long as with enough memory."
    print(textwrap.fill(reasons, _WIDTH))
