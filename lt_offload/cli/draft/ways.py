"""Ways to train a model, each planned as the recipe that would be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lt_offload.cli import recipes
from lt_offload.cli.app import App
from lt_offload.cli.draft.model import NamedModel
from lt_offload.cli.planning.estimate import estimate
from lt_offload.cli.progress import keeping_quiet, status
from lt_offload.cli.verbs.plan import plan
from lt_offload.errors import InfeasibleError, OffloadError, UnsupportedError, named
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.batch.profiles import scaled
from lt_offload.plan.orders import in_parts
from lt_offload.plan.sweep import reason
from lt_offload.units import format_bytes

if TYPE_CHECKING:
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import HardwareProfile, Profile

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
_FOUR_BITS = ("quantize", "nf4", "layers under the adapters have four bits, unpacked where they compute")
METHODS = (
    Method("full", "all weights in fp32"),
    Method("bf16", "all weights in bf16, fp32 masters", (_BF16,), (_MASTERS,)),
    Method("bf16", "all weights in bf16, rounded at random", (_BF16,), (_ROUNDED,)),
    Method("bf16", "all weights in bf16, AdamW in 8 bits", (_BF16,), (_ROUNDED, _EIGHT_BITS)),
    Method("lora", "LoRA on bf16 weights", (_BF16, _LORA)),
    Method("qlora", "LoRA on 4-bit weights (QLoRA)", (_BF16, _LORA), (_FOUR_BITS,)),
)
"""The most exact first."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the plans."""

    profile: HardwareProfile
    hardware: str | None
    """The value of ``--hardware``; None: this machine."""
    memory: str
    host_memory: str | None


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """The division of an update's sequences into batches and parts."""

    parts: int = 1
    """Parts of a batch, which go through each layer in turn."""
    accumulate: int = 1
    """Batches, one after the other: for models that do not take them in parts, or have large logits."""


_SPLITS = (BatchSplit(parts=4), BatchSplit(parts=16), BatchSplit(), BatchSplit(accumulate=4), BatchSplit(accumulate=16))
"""The most likely first; batches one after the other only if nothing else fits."""


@dataclass(frozen=True, slots=True)
class WayToTrain:
    """A method with its plan, or with the error that stands in its way."""

    method: Method
    length: int
    split: BatchSplit = BatchSplit()
    plan: Plan | None = None
    error: Exception | None = None

    @property
    def why(self) -> str:
        """The words for the error that has ended it."""
        error = self.error
        if isinstance(error, InfeasibleError):
            return reason(error)
        return str(error) if isinstance(error, OffloadError) else named(error) if error is not None else ""

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained per second; 0 without a plan."""
        return (self.plan.tokens_per_s or 0.0) if self.plan else 0.0

    @property
    def good(self) -> bool:
        """True if it is nearly as fast as on a GPU with enough memory."""
        predicted = self.plan.predicted if self.plan else None
        return predicted is not None and predicted.iteration_s <= _GOOD * predicted.no_offload_s


class Drafts:
    """Recipes that are planned, and written only if they are chosen."""

    def __init__(self, source: NamedModel, machine: Machine, data: str | None, folder: Path) -> None:
        self.source, self.machine, self.data, self.folder = source, machine, data, folder
        if not source.shipped:
            source.save_architecture(folder / source.architecture)

    def ways(self, method: str) -> list[WayToTrain]:
        """Return every way with ``method``, at the longest sequences with which one fits.

        Raises:
            InfeasibleError: if none fits.
            Exception: the first one's, if none is possible, however much memory there is.
        """
        wanted = [way for way in METHODS if method in ("auto", way.name)]
        positions = getattr(self.source.config, "max_position_embeddings", None) or _LENGTHS[0]
        longest, *shorter = [length for length in _LENGTHS if length <= positions] or [positions]
        ways = self._at(longest, wanted)
        if shorter and not _planned(ways):
            ways = self._at(shorter[-1], wanted)  # next, as nothing in between fits if they do not
            between = (self._at(length, wanted) for length in shorter[:-1] if _planned(ways))
            ways = next(filter(_planned, between), ways)
        if _planned(ways):
            return ways
        ram = format_bytes(self.machine.profile.host_bytes)
        raise InfeasibleError(
            f"new: {self.source.name} cannot be trained in memory={self.machine.memory} with {ram} of RAM, even with "
            f"sequences of {ways[0].length} tokens: {'; '.join(f'{way.method.title} {way.why}' for way in ways)}",
            needed_bytes=min(filter(None, (getattr(way.error, "needed_bytes", None) for way in ways)), default=None),
        )

    def _at(self, length: int, methods: Sequence[Method]) -> list[WayToTrain]:
        """Return the ways with sequences of ``length`` tokens; raises the error of the first if all have failed."""
        ways = []
        for method in methods:
            status(f"planning {method.title}, {BATCH} x {length} tokens")
            ways.append(self.way(method, length))
        errors = [way.error for way in ways if way.error is not None and not isinstance(way.error, InfeasibleError)]
        if len(errors) == len(ways):
            raise errors[0]
        return ways

    def way(self, method: Method, length: int) -> WayToTrain:
        """Return a rough plan of ``method`` with the best of a few divisions of its batch."""
        way, errors = WayToTrain(method, length), list[Exception]()
        try:
            whole = self._profile(way)
        except Exception as error:  # raised here, any error of one method would hide the others
            return replace(way, error=error)
        for split in _SPLITS:
            # Batches one after the other read all weights once for each of them: not worth a plan where parts fit.
            if way.plan is not None and (way.good or split.accumulate > 1):
                break
            try:
                # One profile is scaled instead of estimated anew: a comparison needs no more,
                # and takes a fraction of the time.
                part = in_parts(scaled(whole, BATCH // split.accumulate), split.parts)
                plan = self._plan(part, _PRICE_SECONDS, split.accumulate)
            except Exception as error:
                errors.append(error)
                continue
            if way.plan is None or plan.predicted.iteration_s < way.plan.predicted.iteration_s:
                way = replace(way, plan=plan, split=split)
        if way.plan is not None:
            return way
        short = [error for error in errors if isinstance(error, InfeasibleError)]
        return replace(way, error=min(short, key=_needs) if short else errors[0])

    def choose(self, ways: Sequence[WayToTrain]) -> tuple[list[WayToTrain], WayToTrain]:
        """Return ``ways`` and the best of them, with the plan of the very recipe that will be written.

        Raises:
            Exception: the best one's, if no way with a rough plan works.
        """
        left, errors = [*ways], list[Exception]()
        # A plan at a glance may be of a profile that was scaled. If
        # the recipe itself fails, the next best way is tried.
        while any(way.plan is not None for way in left):
            wanted = best(left)
            try:
                return left, self.final(wanted)
            except Exception as error:
                left[left.index(wanted)] = replace(wanted, plan=None, error=error)
                errors.append(error)
        raise errors[0]

    def final(self, way: WayToTrain) -> WayToTrain:
        """Return ``way`` with the plan of the very recipe that will be written.

        Raises:
            OffloadError: if the way does not work, in spite of its rough plan.
        """
        status(f"planning {way.method.title} at length")
        seconds = Settings().time_limit
        # Scaling does not know what a model refuses, as to take batches
        # in parts: then batches come one after the other.
        tried = [way, *(replace(way, split=split) for split in _SPLITS if split.accumulate > 1)]
        for other in tried:
            try:
                return replace(other, plan=self._plan(self._profile(other), seconds, other.split.accumulate))
            except (UnsupportedError, InfeasibleError):
                if other is tried[-1]:
                    raise
        raise AssertionError("the last one is returned, or raises")

    def text(self, way: WayToTrain) -> str:
        """Return the recipe without its header, for the folder of the architecture."""
        source = self.source
        name = "text" if self.data is not None and Path(self.data).suffix in _PLAIN_TEXT else "alpaca"
        pieces = ["configs/base.yaml", *way.method.pieces, f"configs/data/{name}.yaml"]
        machine, accumulate = self.machine, way.split.accumulate
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
        if way.split.parts > 1:
            lines.append(
                f"      micro_batches: {way.split.parts}  # parts of a batch that go through each layer in turn"
            )
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
            return estimate(app, self.machine.profile, micro_batches=way.split.parts)

    def _plan(self, profile: Profile, seconds: float, accumulate: int = 1) -> Plan:
        machine = self.machine
        settings = Settings(
            memory=machine.memory, host_memory=machine.host_memory, time_limit=seconds, accumulate=accumulate
        )
        return make_plan(profile, settings)


def _planned(ways: Sequence[WayToTrain]) -> bool:
    """Return whether one of ``ways`` has a plan."""
    return any(way.plan is not None for way in ways)


def _needs(error: InfeasibleError) -> tuple[int, int]:
    """Order errors by what is missing, RAM after device memory."""
    return (error.needed_host_bytes or 0, error.needed_bytes or 0)


def best(ways: Sequence[WayToTrain]) -> WayToTrain:
    """Return the most exact way that is fast enough."""
    # Ways stand from the most exact to the least exact one, so that the first one that is fast enough is meant.
    fastest = max(way.tokens_per_s for way in ways)
    return next(way for way in ways if way.plan is not None and way.tokens_per_s >= _WORTH * fastest)


def _quoted(text: str) -> str:
    """Return ``text`` as a YAML scalar."""
    # YAML ends a document of one plain scalar with a line of three dots.
    return str(yaml.safe_dump(text, width=1000, allow_unicode=True)).removesuffix("\n").removesuffix("\n...")
