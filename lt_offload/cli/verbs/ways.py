"""Ways to train a model: first plans of all of them, better ones to compare, and the recipe of the best."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lt_offload.cli import recipes
from lt_offload.cli.app import App
from lt_offload.cli.models import NamedModel
from lt_offload.cli.verbs.plan import estimate, plan
from lt_offload.errors import ConfigError, InfeasibleError, OffloadError, UnsupportedError
from lt_offload.errors import named as worded
from lt_offload.finetune.quantize import stored_form
from lt_offload.finetune.terminal import keeping_quiet, say, status
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.batch.profiles import in_parts, scaled
from lt_offload.plan.batch.splits import Split
from lt_offload.plan.orders import promised_s
from lt_offload.plan.sweep import reason
from lt_offload.replacing import save_text
from lt_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import HardwareProfile, Profile

BATCH = 16
"""Sequences per update of every recipe written here, as usual for a few thousand examples."""
_LENGTHS = (1024, 512, 256, 128)
_FIRST_SECONDS, _PRICE_SECONDS = 0.5, 4.0
"""Seconds for a first plan of a method, and for one that is only compared with others."""
_GLANCE = 2
"""Sequences of the profiles that plans are compared with."""
_ALIKE = 1.02
"""The factor on promised times up to which divisions of a batch count as equally fast."""
_GOOD = 1.05
"""The factor on the time with enough memory up to which a plan is not compared with others."""
_WORTH = 0.5
"""The least part of the fastest method's tokens per second with which a more exact method is taken."""
_PLAIN_TEXT = (".txt", ".md")


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
    compared: bool = False
    """True once other divisions of its batch have been looked at."""

    @property
    def why(self) -> str:
        """The words for the error that has ended it."""
        error = self.error
        if isinstance(error, InfeasibleError):
            return reason(error)
        return str(error) if isinstance(error, OffloadError) else worded(error) if error is not None else ""

    @property
    def iteration_s(self) -> float:
        """Seconds of an update; infinity without a plan."""
        return self.plan.predicted.iteration_s if self.plan else math.inf

    @property
    def slowdown(self) -> float:
        """The time of an update over that with enough memory."""
        return self.iteration_s / self.plan.predicted.no_offload_s if self.plan else math.inf

    @property
    def undecided(self) -> bool:
        """True if its batch is in the first number of parts that fits, where another may be faster."""
        return self.parts > 1 and self.slowdown > _GOOD and not self.compared

    @property
    def verdict(self) -> str:
        """The answer to whether it fits, with the figures of its plan."""
        if self.plan is None:
            return f"no, {self.why}"
        device, host = self.plan.predicted.device_peak_bytes, self.plan.predicted.host_peak_bytes
        return (
            f"yes, {format_seconds(self.iteration_s)} per step, {self.tokens_per_s:.0f} tokens/s, "
            f"{format_bytes(device)} on the GPU, {format_bytes(host)} of RAM"
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained per second; 0 without a plan."""
        return (self.plan.tokens_per_s or 0.0) if self.plan else 0.0


class Drafts:
    """Recipes that are planned, and written only if they are chosen."""

    def __init__(self, source: NamedModel, machine: Machine, data: str | None, folder: Path) -> None:
        self.source, self.machine, self.data, self.folder = source, machine, data, folder
        self.known: list[WayToTrain] = []
        """The ways that have been tried, each with its best plan so far."""
        self._wholes: dict[Method, Profile] = {}
        """Profiles of :data:`_GLANCE` sequences, by method."""
        self._profile_s = 0.0
        if not source.shipped:
            source.save_architecture(folder / source.architecture)

    def ways(self, method: str) -> list[WayToTrain]:
        """Return every way with ``method``, with a first plan, at the longest sequences with which one fits.

        Each is told as soon as it is known, and is in :attr:`known` from then on. Raises ``InfeasibleError`` if none
        fits, and the first one's error if none is possible, however much memory there is.
        """
        wanted = _methods(self.source, method)
        positions = getattr(self.source.config, "max_position_embeddings", None) or _LENGTHS[0]
        for length in [length for length in _LENGTHS if length <= positions] or [positions]:
            self.known = ways = []
            say(f"{self.source.name}, {BATCH} x {length} tokens per update, first plans:")
            for one in wanted:
                ways.append(self.first(one, length))
                say(f"- {one.title}: {ways[-1].verdict}")
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

    def first(self, method: Method, length: int) -> WayToTrain:
        """Return ``method`` with a plan that is found at once, or with the error that says why there is none."""
        status(f"planning {method.title}, {BATCH} x {length} tokens")
        way, began = WayToTrain(method, length), time.monotonic()
        try:
            self._wholes[method] = self._profile(way, _GLANCE)
            self._profile_s = time.monotonic() - began
            return self._split(way, _SPLITS, _FIRST_SECONDS)
        except Exception as error:  # raised here, any error of one method would hide the others
            return replace(way, error=error)

    def _split(self, way: WayToTrain, splits: Sequence[tuple[int, int]], seconds: float) -> WayToTrain:
        """Return ``way`` with a plan of the first division of its batch that has one."""
        # One profile of few sequences is scaled instead of estimated anew: a comparison needs no more, and takes a
        # fraction of the time.
        whole, errors = self._wholes[way.method], list[Exception]()
        for parts, accumulate in splits:
            cut = in_parts(scaled(whole, BATCH // accumulate), parts)
            try:
                try:
                    plan = self._plan(cut, seconds, accumulate)
                except ConfigError:  # too little time for any plan
                    plan = self._plan(cut, _PRICE_SECONDS, accumulate)
            except Exception as error:
                errors.append(error)
                continue
            return replace(way, plan=plan, parts=parts, accumulate=accumulate)
        short = [error for error in errors if isinstance(error, InfeasibleError)]
        # By what is missing, RAM after device memory.
        fewest = min(short, key=lambda one: (one.needed_host_bytes or 0, one.needed_bytes or 0), default=errors[0])
        return replace(way, plan=None, error=fewest)

    def improved(self) -> list[WayToTrain]:
        """Return the known ways with better plans where their first ones are far from what enough memory gives."""
        far = [at for at, way in enumerate(self.known) if way.plan is not None and way.slowdown > _GOOD]
        chosen = best(self.known)
        far.sort(key=lambda at: self.known[at] is not chosen)  # first what is written if this is stopped
        for done, at in enumerate(far):
            way = self.known[at]
            # The recipe that is chosen is profiled anew, and planned at length.
            left = (len(far) - done) * _PRICE_SECONDS + 3 * self._profile_s + 2 * _PRICE_SECONDS
            status(f"planning better, about {_in_fives(left)} s left, Ctrl-C keeps the first plans: {way.method.title}")
            parts, accumulate = self._likely(way)
            self.known[at] = way = replace(way, compared=(parts, accumulate) == (way.parts, way.accumulate))
            cut = in_parts(scaled(self._wholes[way.method], BATCH // accumulate), parts)
            with suppress(OffloadError):  # the first plan stays
                plan = self._plan(cut, _PRICE_SECONDS, accumulate)
                if plan.predicted.iteration_s < way.iteration_s:
                    way = replace(way, plan=plan, parts=parts, accumulate=accumulate)
            self.known[at] = replace(way, compared=True)
        return self.known

    def _likely(self, way: WayToTrain) -> tuple[int, int]:
        """Return the division of the batch of ``way`` that promises the least time, its own if others do about so."""
        own = way.parts, way.accumulate
        # Batches one after the other read all weights once for each of them: not worth a look where parts fit.
        splits = [own, *(split for split in _SPLITS if (split[1] > 1) == (own[1] > 1) and split != own)]
        whole, settings = self._wholes[way.method], self._settings(_PRICE_SECONDS)
        times = {split: promised_s(whole, Split(BATCH, split[1], split[0]), settings) for split in splits}
        return next(split for split in splits if times[split] <= min(times.values()) * _ALIKE)

    def choose(self, ways: Sequence[WayToTrain]) -> tuple[list[WayToTrain], WayToTrain]:
        """Return ``ways`` and the best of them, with the plan of the very recipe that will be written.

        Raises the best one's error if no way with a rough plan works.
        """
        left, errors = [*ways], list[Exception]()
        while any(way.plan is not None for way in left):
            way = best(left)
            seconds = 3 * self._profile_s + 2 * _PRICE_SECONDS
            status(f"planning at length, about {_in_fives(seconds)} s left, Ctrl-C keeps its plan: {way.method.title}")
            try:
                final = self._plan(self._profile(way), Settings().solver_time_limit, way.accumulate)
                return left, replace(way, plan=final)
            except Exception as error:
                # A rough plan is of a profile that was scaled. It does not know what a model refuses, as to take
                # batches in parts: then batches come one after the other, or the next best way is taken.
                refused = isinstance(error, (UnsupportedError, InfeasibleError)) and way.parts > 1
                in_turn = [split for split in _SPLITS if split[1] > 1]
                other = self._split(way, in_turn, _PRICE_SECONDS) if refused else replace(way, plan=None, error=error)
                left[left.index(way)] = other
                self.known = left
                errors += [] if other.plan is not None else [other.error or error]
        raise errors[0]

    def text(self, way: WayToTrain, *, stopped: bool = False) -> str:
        """Return the recipe without its header, for the folder of the architecture.

        ``stopped``: it is written before all has been compared, and what is open is left to the plan of the training.
        """
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
            parts = "auto" if stopped and way.undecided else way.parts
            lines.append(f"      micro_batches: {parts}  # parts of a batch that go through each layer in turn")
        lines += [
            "model:",
            f"  name: {quoted(source.name)}",
            f"  architecture: {quoted(source.architecture)}  # what is planned without a download",
            *(f"  {key}: {str(value).lower()}  # {about}" for key, value, about in way.method.settings),
            "  warmup_steps: 0.03  # over which the learning rate rises, as a share of all steps",
            "data:",
            *([f"  path: {quoted(self.data)}"] if self.data is not None else []),
            f"  batch_size: {BATCH // accumulate}  # sequences{'' if accumulate > 1 else ' per update'}",
            f"  max_length: {way.length}  # tokens per sequence",
        ]
        return "\n".join(lines) + "\n"

    def _profile(self, way: WayToTrain, batch_size: int | None = None) -> Profile:
        """Return the profile of a batch of ``way``, or of ``batch_size`` sequences."""
        file = save_text(self.folder / "draft.yaml", self.text(way))
        with keeping_quiet(True):
            # The draft goes through a file and the parser, as it will when the user runs it: a
            # recipe that is written has been read.
            app = App(plan, file, recipes.chain(file), [])
            host_memory = self._settings(_PRICE_SECONDS).host_budget(self.machine.profile)
            return estimate(app, self.machine.profile, batch_size, way.parts, host_memory=host_memory)

    def _settings(self, seconds: float) -> Settings:
        return Settings(memory=self.machine.memory, host_memory=self.machine.host_memory, solver_time_limit=seconds)

    def _plan(self, profile: Profile, seconds: float, accumulate: int) -> Plan:
        return make_plan(profile, replace(self._settings(seconds), accumulate=accumulate))


def best(ways: Sequence[WayToTrain]) -> WayToTrain:
    """Return the most exact way that is fast enough."""
    # Ways stand from the most exact to the least exact one, so that the first one that is fast enough is meant.
    fastest = max(way.tokens_per_s for way in ways)
    return next(way for way in ways if way.plan is not None and way.tokens_per_s >= _WORTH * fastest)


def _in_fives(seconds: float) -> int:
    """Return ``seconds`` as people say them, in fives."""
    return 5 * max(1, round(seconds / 5))


def quoted(text: str) -> str:
    """Return ``text`` as a YAML scalar."""
    # YAML ends a document of one plain scalar with a line of three dots.
    return str(yaml.safe_dump(text, width=1000, allow_unicode=True)).removesuffix("\n").removesuffix("\n...")
