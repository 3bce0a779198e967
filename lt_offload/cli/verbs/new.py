"""``lt-finetune new``: a recipe for any causal language model, chosen by planning ways to train it."""

from __future__ import annotations

import json
import re
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml

from lt_offload.cli import messages, recipes
from lt_offload.cli.app import App
from lt_offload.cli.header import SimulatedStep, header
from lt_offload.cli.outputs import check_output
from lt_offload.cli.progress import clear, keeping_quiet, say, status
from lt_offload.cli.verbs.plan import estimate, plan
from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.finetune import load
from lt_offload.finetune.weights.gguf import SMOLLM2
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.batch.profiles import scaled
from lt_offload.plan.orders import in_parts
from lt_offload.plan.sweep import reason
from lt_offload.profiling.hardware import hardware_names, load_hardware, measure_machine
from lt_offload.resources import is_dir, is_file, shipped_files, user_path
from lt_offload.suggest import did_you_mean
from lt_offload.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import HardwareProfile, Profile

_BATCH = 16
"""Sequences per update of every recipe written here: what people take for a few thousand examples."""
_LENGTHS = (1024, 512, 256, 128)
_PRICE_SECONDS = 4.0
"""What a plan that is only compared may take."""
_GOOD = 1.05
"""A plan this close to a GPU with enough memory is not compared with others."""
_WORTH = 0.5
"""The most exact method is taken that trains at least this part of the tokens per second of the fastest one."""
_VARIANT = re.compile(r"(-chat|-instruct|-base|-hf|-it|-pt)+$")
_WIDTH = 80
_PLAIN_TEXT = (".txt", ".md")


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train."""

    name: str
    """As ``--method`` says it."""
    title: str
    pieces: tuple[str, ...] = ()
    """Files of ``configs`` that it builds on."""
    settings: tuple[tuple[str, Any, str], ...] = ()
    """Of the model, with their meaning."""


METHODS = (
    Method("full", "all weights in fp32"),
    Method(
        "bf16",
        "all weights in bf16, fp32 masters",
        ("configs/bf16.yaml",),
        (("master_weights", True, "updates are of fp32 copies of the weights, in RAM"),),
    ),
    Method(
        "bf16",
        "all weights in bf16, rounded at random",
        ("configs/bf16.yaml",),
        (("stochastic_rounding", True, "small updates count on average, without fp32 copies of the weights"),),
    ),
    Method("lora", "LoRA on bf16 weights", ("configs/bf16.yaml", "configs/lora.yaml")),
    Method(
        "qlora",
        "LoRA on 4-bit weights (QLoRA)",
        ("configs/bf16.yaml", "configs/lora.yaml"),
        (("quantize", "nf4", "layers under the adapters have four bits, unpacked where they compute"),),
    ),
)
"""The most exact first."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model by the name that was given."""

    name: str
    """What ``model.name`` says."""
    architecture: str
    """The name of a shipped architecture, or of the file that is to be written."""
    config: PreTrainedConfig
    shipped: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """What is planned for."""

    profile: HardwareProfile
    hardware: str | None
    """As ``--hardware`` takes it; None: this machine."""
    memory: str
    host_memory: str | None


@dataclass(frozen=True, slots=True)
class Divided:
    """How the sequences of an update go through the model."""

    parts: int = 1
    """Of a batch, that go through each layer in turn."""
    accumulate: int = 1
    """Batches, one after the other: for models that do not take them in parts, or have large logits."""


_DIVIDED = (Divided(parts=4), Divided(parts=16), Divided(), Divided(accumulate=4), Divided(accumulate=16))
"""The most likely first; batches one after the other only if nothing else fits."""


@dataclass(frozen=True, slots=True)
class WayToTrain:
    """A method, and what its plan says; ``why`` not, where there is none."""

    method: Method
    length: int
    divided: Divided = Divided()
    plan: Plan | None = None
    why: str = ""
    needed_bytes: int | None = None
    """The smallest device memory that would do, where that is what is too small."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained per second; 0 without a plan."""
        return _BATCH * self.length / self.plan.predicted.iteration_s if self.plan else 0.0

    @property
    def good(self) -> bool:
        """Whether it is nearly as fast as on a GPU with enough memory."""
        found = self.plan.predicted if self.plan else None
        return found is not None and found.iteration_s <= _GOOD * found.no_offload_s


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

    Every way to train it is planned. Of those that fit, the most exact one is taken that is at least half as fast as
    the fastest one.

    Args:
        model: name on the hub, model folder, JSON file with a configuration, or a shipped architecture (llama3-8b).
        memory: device memory that the training may take, e.g. 12GB; default: all of the hardware's.
        host_memory: RAM that the training may take; default: all of the hardware's.
        hardware: what to plan for, as 'lt-finetune plan' takes it; default: the GPU of this machine, else a shipped
            description of a card with that much memory.
        method: auto; all weights in fp32 (full) or in bfloat16 (bf16); adapters on bfloat16 weights (lora) or on ones
            of four bits (qlora).
        data: what to train on; default: a data set of instructions from the hub.
        output: file to write; default: named after model, method and memory. Nothing is overwritten.
    """
    if output is not None:
        _check_free(user_path(output))
    machine = _machine(memory, host_memory, hardware)
    source = _source(model)
    _check_causal(model, source.config)
    messages.install()
    with tempfile.TemporaryDirectory() as folder:
        drafts = _Drafts(source, machine, data, Path(folder))
        ways = _ways(drafts, method)
        chosen = drafts.final(_chosen(ways))
    clear()
    target = user_path(output) if output else Path(_file_name(source, chosen, machine))
    _check_free(target)
    _write(target, source, chosen, machine, text=drafts.text(chosen, source, target), has_data=data is not None)
    for line in _explanation(source, machine, ways, chosen):
        print(line)
    print(f"{target}  (run it: lt-finetune {target})")
    return 0


# -- what is asked for -------------------------------------------------------------------------------------------------


def _machine(memory: str | None, host_memory: str | None, hardware: str | None) -> Machine:
    """Return the machine to plan for: the one that was named, this one, or a card with as much memory."""
    for setting, size in (("memory", memory), ("host_memory", host_memory)):
        if size is not None:
            parse_bytes(size, setting=setting)
    if hardware is None and torch.cuda.is_available():
        profile = measure_machine(on_progress=status)
    else:
        if hardware is None:
            hardware = _card(memory)
            say(f"planning for {hardware}; --hardware names another")
        if host_memory is not None:
            hardware = f"{hardware},ram={host_memory}"
        profile = load_hardware(hardware)
    return Machine(profile, hardware, memory or f"{profile.device_bytes // 10**9}GB", host_memory)


def _card(memory: str | None) -> str:
    """Return the shipped card with the least memory that is enough, the slowest of those with as much."""
    if memory is None:
        raise ConfigError(
            "new: there is no GPU here to plan for; say how much memory yours has, e.g. --memory 12GB, or name it, "
            "e.g. --hardware rtx-3060-12gb"
        )
    cards = [load_hardware(name) for name in hardware_names()]
    wanted = parse_bytes(memory)
    fitting = [card for card in cards if card.device_bytes >= wanted and "bfloat16" in card.flops_per_s]
    if not fitting:
        most = max(card.device_bytes for card in cards)
        raise ConfigError(
            f"memory={memory!r} is more than any card has that is described here ({format_bytes(most)}); describe "
            "yours in a file that --hardware names, see 'lt-finetune doctor --save'"
        )
    return min(fitting, key=lambda card: (card.device_bytes, card.flops_per_s["bfloat16"], card.name)).name


def _source(model: str) -> NamedModel:
    """Return the model called ``model``."""
    shipped = shipped_files("configs/models", ".json")
    known = {str(json.loads(path.read_text(encoding="utf-8"))["_name_or_path"]): name for name, path in shipped.items()}
    if is_file(user_path(model)):
        config = load.load_config(model, str(user_path(model)))
        path = user_path(model)
        name = str(path.parent) if path.name == "config.json" else str(config.name_or_path)
        if not name:
            raise ConfigError(
                f'new: {model} does not say which model it is of; add "_name_or_path": "NAME ON THE HUB" to it, '
                "or give the model's folder"
            )
        return NamedModel(name, f"{_short(name)}.json", config, shipped=False)
    if is_dir(user_path(model)):
        return NamedModel(model, f"{_short(model)}.json", load.load_config(model), shipped=False)
    if model == SMOLLM2:
        return NamedModel(model, "smollm2-135m", load.load_config(model, "smollm2-135m"), shipped=True)
    if model in shipped:
        hub = next(name for name, architecture in known.items() if architecture == model)
        return NamedModel(hub, model, load.load_config(hub, model), shipped=True)
    variants = {_without_variant(hub): architecture for hub, architecture in known.items()}
    if (architecture := variants.get(_without_variant(model))) is not None:
        return NamedModel(model, architecture, load.load_config(model, architecture), shipped=True)
    try:
        return NamedModel(model, f"{_short(model)}.json", load.load_config(model), shipped=False)
    except ConfigError as error:
        hint = did_you_mean(model, [*known, *shipped])
        raise ConfigError(
            f"new: {error}{hint or '; without the hub give a folder, a config.json or one of ' + ', '.join(shipped)}"
        ) from error


def _without_variant(name: str) -> str:
    """Return a name on the hub without what says how the model was trained, which its shape does not depend on."""
    return _VARIANT.sub("", name.lower())


def _short(name: str) -> str:
    """Return the last part of a model's name, as files are called."""
    return Path(name).resolve().name.lower() if is_dir(user_path(name)) else name.rpartition("/")[2].lower()


def _check_causal(model: str, config: PreTrainedConfig) -> None:
    """Raise ``ConfigError`` unless ``config`` is of a causal language model whose weights can be trained."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    stated = config.architectures or []
    if found is None or (stated and found.__name__ not in stated):
        raise ConfigError(
            f"new: {model} is not a causal language model but {' or '.join(stated) or f'of type {config.model_type}'}; "
            "this package fine-tunes models that continue a text"
        )
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        raise ConfigError(
            f"new: the weights of {model} are stored with few bits already, which cannot be trained; give the model "
            "that they were made of"
        )


# -- plans -------------------------------------------------------------------------------------------------------------


class _Drafts:
    """Recipes that are planned, and written only if they are chosen."""

    def __init__(self, source: NamedModel, machine: Machine, data: str | None, folder: Path) -> None:
        self.source, self.machine, self.data, self.folder = source, machine, data, folder
        if not source.shipped:
            _save_config(source.config, folder / source.architecture)

    def way(self, method: Method, length: int) -> WayToTrain:
        """Return how fast ``method`` is, in the best of a few numbers of parts or batches: at a glance."""
        way, short = WayToTrain(method, length), None
        try:
            whole = self._profile(way)
        except ConfigError as error:
            return replace(way, why=str(error))
        for divided in _DIVIDED:
            if way.plan is not None and (way.good or divided.accumulate > 1):
                break
            try:
                part = in_parts(scaled(whole, _BATCH // divided.accumulate), divided.parts)
                found = self._plan(part, _PRICE_SECONDS, divided.accumulate)
            except InfeasibleError as error:
                short = error if short is None else min(short, error, key=_needs)
                continue
            if way.plan is None or found.predicted.iteration_s < way.plan.predicted.iteration_s:
                way = replace(way, plan=found, divided=divided)
        if way.plan is None and short is not None:
            return replace(way, why=reason(short), needed_bytes=short.needed_bytes)
        return way

    def final(self, way: WayToTrain) -> WayToTrain:
        """Return ``way`` with the plan of the very recipe that will be written.

        Raises:
            OffloadError: if what looked well at a glance does not work.
        """
        status(f"planning {way.method.title} at length")
        seconds = Settings().time_limit
        tried = [way, *(replace(way, divided=divided) for divided in _DIVIDED if divided.accumulate > 1)]
        for other in tried:
            try:
                return replace(other, plan=self._plan(self._profile(other), seconds, other.divided.accumulate))
            except (UnsupportedError, InfeasibleError):
                if other is tried[-1]:
                    raise
        raise AssertionError("the last one is returned, or raises")

    def text(self, way: WayToTrain, source: NamedModel, target: Path | None = None) -> str:
        """Return the recipe without its header; ``target``: where it will be, beside the architecture."""
        folder = self.folder if target is None else target.parent
        architecture = source.architecture if source.shipped else str(folder / source.architecture)
        name = "text" if self.data is not None and Path(self.data).suffix in _PLAIN_TEXT else "alpaca"
        pieces = ["configs/base.yaml", *way.method.pieces, f"configs/data/{name}.yaml"]
        machine, accumulate = self.machine, way.divided.accumulate
        lines = [
            f"base: [{', '.join(pieces)}]",
            "trainer:",
            *([f"  accumulate_grad_batches: {accumulate}  # batches per update"] if accumulate > 1 else []),
            "  strategy:",
            "    init_args:",
            f"      memory: {machine.memory}  # of the GPU, all that a system monitor shows; null: what is free",
        ]
        if machine.host_memory is not None:
            lines.append(f"      host_memory: {machine.host_memory}  # RAM; null: what is free")
        if way.divided.parts > 1:
            lines.append(
                f"      micro_batches: {way.divided.parts}  # parts of a batch that go through each layer in turn"
            )
        lines += [
            "model:",
            f"  name: {_quoted(source.name)}",
            f"  architecture: {_quoted(architecture)}  # what is planned without a download",
            *(f"  {key}: {str(value).lower()}  # {about}" for key, value, about in way.method.settings),
            "  warmup_steps: 100  # over which the learning rate rises",
            "data:",
            *([f"  path: {_quoted(self.data)}"] if self.data is not None else []),
            f"  batch_size: {_BATCH // accumulate}  # sequences{'' if accumulate > 1 else ' per update'}",
            f"  max_length: {way.length}  # tokens per sequence",
        ]
        return "\n".join(lines) + "\n"

    def _profile(self, way: WayToTrain) -> Profile:
        file = self.folder / "draft.yaml"
        file.write_text(self.text(way, self.source), encoding="utf-8")
        with keeping_quiet(True):
            app = App(plan, file, recipes.chain(file), [])
            return estimate(app, self.machine.profile, micro_batches=way.divided.parts)

    def _plan(self, profile: Profile, seconds: float, accumulate: int = 1) -> Plan:
        machine = self.machine
        settings = Settings(memory=machine.memory, host_memory=machine.host_memory, time_limit=seconds)
        return make_plan(profile, replace(settings, accumulate=accumulate))


def _needs(error: InfeasibleError) -> tuple[int, int]:
    """Order errors by what is missing, RAM after device memory."""
    return (error.needed_host_bytes or 0, error.needed_bytes or 0)


def _ways(drafts: _Drafts, method: str) -> list[WayToTrain]:
    """Return every way with ``method``, at the longest sequences with which one fits."""
    wanted = [way for way in METHODS if method in ("auto", way.name)]
    positions = getattr(drafts.source.config, "max_position_embeddings", None) or _LENGTHS[0]
    lengths = [length for length in _LENGTHS if length <= positions] or [positions]
    for length in lengths:
        ways = []
        for candidate in wanted:
            status(f"planning {candidate.title}, {_BATCH} x {length} tokens")
            ways.append(drafts.way(candidate, length))
        if any(way.plan is not None for way in ways):
            return ways
    raise InfeasibleError(_too_small(drafts, ways), needed_bytes=_least(ways))


def _least(ways: Sequence[WayToTrain]) -> int | None:
    return min((way.needed_bytes for way in ways if way.needed_bytes is not None), default=None)


def _too_small(drafts: _Drafts, ways: Sequence[WayToTrain]) -> str:
    machine = drafts.machine
    ram = format_bytes(machine.profile.host_bytes)
    needs = "; ".join(f"{way.method.title} {way.why}" for way in ways)
    return (
        f"new: {drafts.source.name} cannot be trained in memory={machine.memory} with {ram} of RAM, even with "
        f"sequences of {ways[0].length} tokens: {needs}"
    )


def _chosen(ways: Sequence[WayToTrain]) -> WayToTrain:
    """Return the most exact way that is fast enough."""
    fastest = max(way.tokens_per_s for way in ways)
    return next(way for way in ways if way.plan is not None and way.tokens_per_s >= _WORTH * fastest)


# -- files and words ---------------------------------------------------------------------------------------------------


def _file_name(source: NamedModel, way: WayToTrain, machine: Machine) -> str:
    memory = machine.memory.replace(" ", "").lower()
    return f"{source.architecture.removesuffix('.json')}-{way.method.name}-{memory}.yaml"


def _check_free(target: Path) -> None:
    if is_file(target):
        raise ConfigError(f"new: {target} exists already; give another name with --output, or remove it first")
    check_output(target, "--output")


def _write(target: Path, source: NamedModel, way: WayToTrain, machine: Machine, *, text: str, has_data: bool) -> None:
    """Write the recipe, and the architecture beside it where that does not come with the package."""
    assert way.plan is not None
    if not source.shipped:
        architecture = target.parent / source.architecture
        if is_file(architecture):
            if load.load_config(source.name, str(architecture)).to_dict() != _reloaded(source.config):
                raise ConfigError(f"new: {architecture} exists already and is of another model; choose another folder")
        else:
            _save_config(source.config, architecture)
            print(f"{architecture}  (what is planned without a download)")
    title = f"{source.name}, {way.method.title}"
    flags = {"flags": ""} if has_data else {}
    lines = header(title, str(target), machine.hardware, SimulatedStep.of(way.plan), **flags)
    target.write_text("\n".join(lines) + "\n" + text, encoding="utf-8")


def _save_config(config: PreTrainedConfig, path: Path) -> None:
    values = config.to_diff_dict()
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _reloaded(config: PreTrainedConfig) -> dict[str, Any]:
    """Return ``config`` as it is after it was written and read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        _save_config(config, path)
        return load.load_config("", str(path)).to_dict()


def _quoted(text: str) -> str:
    """Return ``text`` as a YAML scalar."""
    return str(yaml.safe_dump(text, width=1000, allow_unicode=True)).removesuffix("\n").removesuffix("\n...")


def _explanation(source: NamedModel, machine: Machine, ways: Sequence[WayToTrain], chosen: WayToTrain) -> list[str]:
    """Return the table of what was planned, and why one was taken, in 80 columns."""
    width = max(len(way.method.title) for way in ways)
    about = (
        f"{source.name} on {machine.profile.name} with {machine.memory} on the GPU and "
        f"{format_bytes(machine.profile.host_bytes)} of RAM, {_BATCH} sequences of {chosen.length} tokens per update "
        "(estimates):"
    )
    lines = [
        *textwrap.wrap(about, _WIDTH),
        f"{'':{width}}  {'step':>8}  {'tokens/s':>8}  {'GPU':>8}  {'RAM':>8}",
    ]
    for way in ways:
        shown = chosen if way.method == chosen.method else way
        if shown.plan is None:
            row = f"{way.method.title:{width}}  {way.why}"
            lines += textwrap.wrap(row, _WIDTH, subsequent_indent=" " * (width + 2))
            continue
        found = shown.plan.predicted
        lines.append(
            f"{way.method.title:{width}}  {format_seconds(found.iteration_s):>8}  {shown.tokens_per_s:>8.0f}  "
            f"{format_bytes(found.device_peak_bytes):>8}  {format_bytes(found.host_peak_bytes):>8}"
        )
    assert chosen.plan is not None
    found = chosen.plan.predicted
    slower = found.iteration_s / found.no_offload_s
    why = "the only one that fits" if sum(way.plan is not None for way in ways) == 1 else _because(ways, chosen)
    reasons = f"Chosen: {chosen.method.title}, {why}; its step takes {slower:.2f} times as long as with enough memory."
    return [*lines, *textwrap.wrap(reasons, _WIDTH)]


def _because(ways: Sequence[WayToTrain], chosen: WayToTrain) -> str:
    above = [way for way in ways[: next(at for at, way in enumerate(ways) if way.method == chosen.method)] if way.plan]
    if not above:
        return "the most exact one that fits"
    return "the most exact one that is at least half as fast as the fastest"
