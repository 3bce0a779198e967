"""``lt-finetune new``: a recipe for any causal language model, chosen by planning ways to train it."""

from __future__ import annotations

import json
import math
import re
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml

from lt_offload.cli import messages, recipes
from lt_offload.cli.app import App
from lt_offload.cli.outputs import check_output, print_table
from lt_offload.cli.verbs.plan import estimate, plan
from lt_offload.compat.hugging_face import NAME
from lt_offload.errors import ConfigError, InfeasibleError, OffloadError, UnsupportedError
from lt_offload.errors import named as worded
from lt_offload.finetune import load
from lt_offload.finetune.quantize import stored_form
from lt_offload.finetune.terminal import clear, keeping_quiet, say, status
from lt_offload.finetune.weights.gguf import SMOLLM2, is_gguf
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.batch.profiles import in_parts, scaled
from lt_offload.plan.sweep import reason
from lt_offload.profiling.hardware import hardware_names, load_hardware, measure_machine
from lt_offload.resources import is_dir, is_file, shipped_files, user_path
from lt_offload.suggest import did_you_mean
from lt_offload.units import Budget, format_bytes, format_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import HardwareProfile, Profile

_VARIANT = re.compile(r"(-chat|-instruct|-base|-hf|-it|-pt)+$")
_WIDTH = 80
RAM = re.compile(r" \(\d+ GB of RAM\)$")
"""The end of a recipe's first line."""
BATCH = 16
"""Sequences per update of every recipe written here, as usual for a few thousand examples."""
_LENGTHS = (1024, 512, 256, 128)
_PRICE_SECONDS = 4.0
"""Seconds for a plan that is only compared with others."""
_GOOD = 1.05
"""The factor on the time with enough memory up to which a plan is not compared with others."""
_WORTH = 0.5
"""The least part of the fastest method's tokens per second with which a more exact method is taken."""
_PLAIN_TEXT = (".txt", ".md")


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
    if output is not None:
        check_output(output, "--output", new=True)
    machine = _machine(memory, host_memory, hardware)
    source = named(model)
    _check_architecture(source, user_path(output or "").parent)
    messages.install()
    with tempfile.TemporaryDirectory() as folder:
        drafts = Drafts(source, machine, data, Path(folder))
        ways, chosen = drafts.choose(drafts.ways(method))
    clear()
    memory_name = machine.memory.replace(" ", "").lower()
    name = f"{source.architecture.removesuffix('.json')}-{chosen.method.name}-{memory_name}.yaml"
    target = user_path(output) if output else Path(name)
    check_output(target, "--output", new=True)
    _write(target, source, chosen, machine, text=drafts.text(chosen), has_data=data is not None)
    _explain(source, machine, ways, chosen)
    print(f"{target}  (run it: lt-finetune {target})")
    return 0


def _machine(memory: str | None, host_memory: str | None, hardware: str | None) -> Machine:
    """Return the machine to plan for: the named one, this one, or a card with as much memory."""
    device = Budget.of(memory).nbytes
    Budget.of(host_memory, setting="host_memory")  # a slip is noticed here
    if hardware is None and torch.cuda.is_available():
        profile = measure_machine(on_progress=status)
    else:
        if hardware is None:
            hardware = _card(memory, device)
            say(f"there is no GPU here: planning for {hardware}; --hardware names another")
        if host_memory is not None:
            hardware = f"{hardware},ram={host_memory}"
        profile = load_hardware(hardware)
    if device is not None and device < profile.context_bytes:
        raise ConfigError(
            f"memory={memory!r} is not enough for any model: on {profile.name} CUDA takes "
            f"{format_bytes(profile.context_bytes)} before the first weight; give more, e.g. --memory 2GB"
        )
    return Machine(profile, hardware, memory or f"{profile.device_bytes // 10**9}GB", host_memory)


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


# -- models ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model and its name."""

    name: str
    """The value of ``model.name``."""
    architecture: str
    """The name of a shipped architecture, or of the file to write."""
    config: PreTrainedConfig
    shipped: bool

    def save_architecture(self, path: Path) -> None:
        """Write the configuration to ``path``, without the defaults of its type."""
        values = self.config.to_diff_dict()
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def has_architecture_of(self, path: Path) -> bool:
        """Return whether the configuration in ``path`` is this one, whatever the model is called in it."""
        try:
            return _shape(load.load_config("", str(path))) == _shape(self.config)
        except ConfigError:  # no configuration at all
            return False


def _shape(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the values of ``config`` as in a file, without the model's name."""
    values = json.loads(json.dumps(config.to_diff_dict()))
    return {key: value for key, value in values.items() if key != NAME}


def named(model: str) -> NamedModel:
    """Return the causal language model called ``model``; ``ConfigError`` if there is none, or it is of another kind."""
    located = _located(model)
    _check_causal(model, located.config)
    return located


def _located(model: str) -> NamedModel:
    path = user_path(model)
    if is_dir(path) or (is_file(path) and is_gguf(path)):
        return NamedModel(model, f"{_short(model)}.json", load.load_config(model), shipped=False)
    if is_file(path):
        config = load.load_config(model, str(path))
        name = str(path.parent) if path.name == "config.json" else str(config.name_or_path)
        if not name:
            raise ConfigError(
                f'new: {model} does not say which model it is of; add "_name_or_path": "NAME ON THE HUB" to it, '
                "or give the model's folder"
            )
        return NamedModel(name, f"{_short(name)}.json", config, shipped=False)
    shipped = shipped_files("configs/models", ".json")
    hubs = {name: str(json.loads(file.read_text(encoding="utf-8"))[NAME]) for name, file in shipped.items()}
    # Chat and base variants of a model have one shape: the description of one plans the other without a download.
    variants = {_without_variant(hub): name for name, hub in hubs.items()} | {SMOLLM2: "smollm2-135m"}
    architecture = model if model in shipped else variants.get(model, variants.get(_without_variant(model)))
    if architecture is not None:
        name = hubs.get(model, model)
        return NamedModel(name, architecture, load.load_config(name, architecture), shipped=True)
    try:
        return NamedModel(model, f"{_short(model)}.json", load.load_config(model), shipped=False)
    except ConfigError as error:
        hint = did_you_mean(model, [*hubs.values(), *shipped])
        raise ConfigError(
            f"new: {error}{hint or '; without the hub give a folder, a config.json or one of ' + ', '.join(shipped)}"
        ) from error


def _without_variant(name: str) -> str:
    """Return a name on the hub without endings about training, on which the shape does not depend."""
    return _VARIANT.sub("", name.lower())


def _short(name: str) -> str:
    """Return the last part of a model's name, as files are called."""
    path = user_path(name)
    return (path.resolve().name if is_dir(path) else path.stem if is_file(path) else name.rpartition("/")[2]).lower()


def _check_causal(model: str, config: PreTrainedConfig) -> None:
    """Raise ``ConfigError`` unless ``config`` is of a causal language model whose weights can be trained."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    # The mapping alone is not enough: encoders such as BERT are in it, with a head that is not among their weights.
    auto_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    stated = config.architectures or []
    if auto_class is None or (stated and auto_class.__name__ not in stated):
        raise ConfigError(
            f"new: {model} is not a causal language model but {' or '.join(stated) or f'of type {config.model_type}'}; "
            "this package fine-tunes models that continue a text"
        )
    try:
        stored_form(config)
    except ConfigError as error:
        raise ConfigError(f"new: {model}: {error}") from None


# -- ways to train it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train."""

    name: str
    """The value of ``--method``."""
    title: str
    pieces: tuple[str, ...] = ()
    """Files of ``configs`` that it builds on."""
    settings: tuple[tuple[str, Any, str], ...] = ()
    """Settings of the model, with their values and meaning."""


_BF16, _LORA = "configs/bf16.yaml", "configs/lora.yaml"
_ROUNDED = ("stochastic_rounding", True, "small updates count on average, without fp32 copies of the weights")
_MASTERS = ("master_weights", True, "updates are of fp32 copies of the weights, in RAM")
_EIGHT_BITS = ("optimizer", "adamw8bit", "moments in 8 bits, as in bitsandbytes: 2 bytes per weight instead of 8")
_FOUR_BITS = ("quantize", "nf4", "weights under the adapters have four bits, opened where they compute")
METHODS = (
    Method("full", "all weights in fp32"),
    Method("bf16", "all weights in bf16, fp32 masters", (_BF16,), (_MASTERS,)),
    Method("bf16", "all weights in bf16, rounded at random", (_BF16,), (_ROUNDED,)),
    Method("bf16", "all weights in bf16, AdamW in 8 bits", (_BF16,), (_ROUNDED, _EIGHT_BITS)),
    Method("lora", "LoRA on bf16 weights", (_BF16, _LORA)),
    Method("qlora", "LoRA on 4-bit weights (QLoRA)", (_BF16, _LORA), (_FOUR_BITS,)),
)
"""The most exact first."""


def _methods(source: NamedModel, method: str) -> list[Method]:
    """Return the methods that ``method`` may mean for a model; raises ``ConfigError`` if it has none of them."""
    form = stored_form(source.config)
    if form is None:
        return [way for way in METHODS if method in ("auto", way.name)]
    if method not in ("auto", "lora", "qlora"):
        raise ConfigError(
            f"new: --method {method} trains weights, and those of {source.name} are stored as {form.upper()}, in which "
            "they stay frozen; use --method lora, or give the model that it was made of"
        )
    setting = "quantize", form, "weights under the adapters stay as they are shipped, and are opened where they compute"
    return [Method("lora", f"LoRA on its {form.upper()} weights", (_BF16, _LORA), (setting,))]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the plans."""

    profile: HardwareProfile
    hardware: str | None
    """The value of ``--hardware``; None: this machine."""
    memory: str
    host_memory: str | None


_SPLITS = ((4, 1), (16, 1), (1, 1), (1, 4), (1, 16))
"""Parts of a batch, and batches per update: for models that take no parts, or have large logits; the likely first."""


@dataclass(frozen=True, slots=True)
class WayToTrain:
    """A method with its plan, or with the error that stands in its way."""

    method: Method
    length: int
    parts: int = 1
    """Parts of a batch, which go through each layer in turn."""
    accumulate: int = 1
    """Batches of an update, one after the other."""
    plan: Plan | None = None
    error: Exception | None = None

    @property
    def why(self) -> str:
        """The words for the error that has ended it."""
        error = self.error
        if isinstance(error, InfeasibleError):
            return reason(error)
        return str(error) if isinstance(error, OffloadError) else worded(error) if error is not None else ""

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained per second; 0 without a plan."""
        return (self.plan.tokens_per_s or 0.0) if self.plan else 0.0


class Drafts:
    """Recipes that are planned, and written only if they are chosen."""

    def __init__(self, source: NamedModel, machine: Machine, data: str | None, folder: Path) -> None:
        self.source, self.machine, self.data, self.folder = source, machine, data, folder
        if not source.shipped:
            source.save_architecture(folder / source.architecture)

    def ways(self, method: str) -> list[WayToTrain]:
        """Return every way with ``method``, at the longest sequences with which one fits.

        Raises ``InfeasibleError`` if none fits, and the first one's error if none is possible, however much memory
        there is.
        """
        wanted = _methods(self.source, method)
        positions = getattr(self.source.config, "max_position_embeddings", None) or _LENGTHS[0]
        for length in [length for length in _LENGTHS if length <= positions] or [positions]:
            ways = [self.way(method, length) for method in wanted]
            if any(way.plan is not None for way in ways):
                return ways
            if not any(isinstance(way.error, InfeasibleError) for way in ways):
                raise next(way.error for way in ways if way.error is not None)
        ram = format_bytes(self.machine.profile.host_bytes)
        raise InfeasibleError(
            f"new: {self.source.name} cannot be trained in memory={self.machine.memory} with {ram} of RAM, even with "
            f"sequences of {length} tokens: {'; '.join(f'{way.method.title} {way.why}' for way in ways)}",
            needed_bytes=min(filter(None, (getattr(way.error, "needed_bytes", None) for way in ways)), default=None),
        )

    def way(self, method: Method, length: int, splits: Sequence[tuple[int, int]] = _SPLITS) -> WayToTrain:
        """Return a rough plan of ``method`` with the best of a few divisions of its batch."""
        status(f"planning {method.title}, {BATCH} x {length} tokens")
        way, errors = WayToTrain(method, length), list[Exception]()
        try:
            whole = self._profile(way)
        except Exception as error:  # raised here, any error of one method would hide the others
            return replace(way, error=error)
        for parts, accumulate in splits:
            predicted = way.plan.predicted if way.plan is not None else None
            # Batches one after the other read all weights once for each of them: not worth a plan where parts fit.
            if predicted and (accumulate > 1 or predicted.iteration_s <= _GOOD * predicted.no_offload_s):
                break
            try:
                # One profile is scaled instead of estimated anew: a comparison needs no more,
                # and takes a fraction of the time.
                plan = self._plan(in_parts(scaled(whole, BATCH // accumulate), parts), _PRICE_SECONDS, accumulate)
            except Exception as error:
                errors.append(error)
                continue
            if predicted is None or plan.predicted.iteration_s < predicted.iteration_s:
                way = replace(way, plan=plan, parts=parts, accumulate=accumulate)
        if way.plan is not None:
            return way
        short = [error for error in errors if isinstance(error, InfeasibleError)]
        # By what is missing, RAM after device memory.
        least = min(short, key=lambda one: (one.needed_host_bytes or 0, one.needed_bytes or 0), default=errors[0])
        return replace(way, error=least)

    def choose(self, ways: Sequence[WayToTrain]) -> tuple[list[WayToTrain], WayToTrain]:
        """Return ``ways`` and the best of them, with the plan of the very recipe that will be written.

        Raises the best one's error if no way with a rough plan works.
        """
        left, errors = [*ways], list[Exception]()
        while any(way.plan is not None for way in left):
            way = best(left)
            status(f"planning {way.method.title} at length")
            try:
                final = self._plan(self._profile(way), Settings().time_limit, way.accumulate)
                return left, replace(way, plan=final)
            except Exception as error:
                # A rough plan is of a profile that was scaled. It does not know what a model refuses, as to take
                # batches in parts: then batches come one after the other, or the next best way is taken.
                refused = isinstance(error, (UnsupportedError, InfeasibleError)) and way.parts > 1
                in_turn = [split for split in _SPLITS if split[1] > 1]
                other = self.way(way.method, way.length, in_turn) if refused else replace(way, plan=None, error=error)
                left[left.index(way)] = other
                errors += [] if other.plan is not None else [other.error or error]
        raise errors[0]

    def text(self, way: WayToTrain) -> str:
        """Return the recipe without its header, for the folder of the architecture."""
        source = self.source
        name = "text" if self.data is not None and Path(self.data).suffix in _PLAIN_TEXT else "alpaca"
        pieces = ["configs/base.yaml", *way.method.pieces, f"configs/data/{name}.yaml"]
        machine, accumulate = self.machine, way.accumulate
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
        if way.parts > 1:
            lines.append(f"      micro_batches: {way.parts}  # parts of a batch that go through each layer in turn")
        lines += [
            "model:",
            f"  name: {_quoted(source.name)}",
            f"  architecture: {_quoted(source.architecture)}  # what is planned without a download",
            *(f"  {key}: {str(value).lower()}  # {about}" for key, value, about in way.method.settings),
            "  warmup_steps: 0.03  # over which the learning rate rises, as a share of all steps",
            "data:",
            *([f"  path: {_quoted(self.data)}"] if self.data is not None else []),
            f"  batch_size: {BATCH // accumulate}  # sequences{'' if accumulate > 1 else ' per update'}",
            f"  max_length: {way.length}  # tokens per sequence",
        ]
        return "\n".join(lines) + "\n"

    def _profile(self, way: WayToTrain) -> Profile:
        file = self.folder / "draft.yaml"
        file.write_text(self.text(way), encoding="utf-8")
        with keeping_quiet(True):
            # The draft goes through a file and the parser, as it will when the user runs it: a
            # recipe that is written has been read.
            app = App(plan, file, recipes.chain(file), [])
            return estimate(app, self.machine.profile, micro_batches=way.parts)

    def _plan(self, profile: Profile, seconds: float, accumulate: int) -> Plan:
        machine = self.machine
        settings = Settings(
            memory=machine.memory, host_memory=machine.host_memory, time_limit=seconds, accumulate=accumulate
        )
        return make_plan(profile, settings)


def best(ways: Sequence[WayToTrain]) -> WayToTrain:
    """Return the most exact way that is fast enough."""
    # Ways stand from the most exact to the least exact one, so that the first one that is fast enough is meant.
    fastest = max(way.tokens_per_s for way in ways)
    return next(way for way in ways if way.plan is not None and way.tokens_per_s >= _WORTH * fastest)


def _quoted(text: str) -> str:
    """Return ``text`` as a YAML scalar."""
    # YAML ends a document of one plain scalar with a line of three dots.
    return str(yaml.safe_dump(text, width=1000, allow_unicode=True)).removesuffix("\n").removesuffix("\n...")


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


def _check_architecture(source: NamedModel, folder: Path) -> None:
    """Raise ``ConfigError`` if ``folder`` has the architecture of another model under this one's name."""
    file = folder / source.architecture
    if not source.shipped and is_file(file) and not source.has_architecture_of(file):
        raise ConfigError(f"new: {file} exists already and is of another model; choose another folder")


def _write(target: Path, source: NamedModel, way: WayToTrain, machine: Machine, *, text: str, has_data: bool) -> None:
    """Write the recipe, and the architecture beside it unless it comes with the package."""
    assert way.plan is not None
    if not source.shipped:
        architecture = target.parent / source.architecture
        if not is_file(architecture):
            source.save_architecture(architecture)
            print(f"{architecture}  (what is planned without a download)")
    title = f"{source.name}, {way.method.title}"
    flags = {"flags": ""} if has_data else {}
    lines = header(title, str(target), machine.hardware, figures(way.plan), **flags)
    target.write_text("\n".join(lines) + "\n" + text, encoding="utf-8")


def _explain(source: NamedModel, machine: Machine, ways: Sequence[WayToTrain], chosen: WayToTrain) -> None:
    """Print the table of the plans, and the reason for the choice, in 80 columns."""
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
    reasons = f"Chosen: {chosen.method.title}, {why}; its step takes {slower:.2f} times as long as with enough memory."
    print(textwrap.fill(reasons, _WIDTH))
