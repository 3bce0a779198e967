"""A summary of a fine-tuning run, kept while it trains and written at its end, also after an error; samples meanwhile.

Works with any strategy; one that has a plan, a profile and a trace is compared with its plan.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import socket
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng

from lt_offload import __version__
from lt_offload.compiling import processor_name
from lt_offload.errors import named
from lt_offload.finetune.processes import several
from lt_offload.finetune.run.metrics import RunMetrics
from lt_offload.finetune.terminal import status
from lt_offload.model.compiled import kernels_of
from lt_offload.profiling.hardware import total_host_bytes
from lt_offload.replacing import save_text, writing
from lt_offload.report.compare import described
from lt_offload.report.runs import (
    ENVIRONMENT,
    SAMPLES,
    ProcessTimes,
    RunPart,
    RunSample,
    read_run,
    told,
    without_later,
    write_part,
)  # fmt: skip
from lt_offload.strategy.metrics import RunClock

if TYPE_CHECKING:
    from lt_offload.plan.what_if import Gain
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import Profile

TOKENS = 24
"""Tokens of a sample during training; each takes one pass of the model, in which streamed weights travel once."""
TOKENS_AT_END = 64
_PATIENCE = 0.1
"""The part of the time of training that planning for other machines may take for the report ..."""
_MOST_PATIENCE = 40.0
"""... in seconds at most ..."""
_LEAST_PATIENCE = 2.0
"""... and not at all with fewer seconds than that for each of its plans."""
_WIDTH = 80
_LABEL = 30
_OF_ENDS = ("held-out loss, first", "held-out loss, last")
"""Figures that one line says together."""


class RunSummary(Callback):
    """A callback that collects the summary of a run, and writes it, samples and environment into ``folder``, if any.

    Samples are continuations of the data module's ``sample_prompt``, one or several, at each validation and at the end.
    The most likely token is taken each time. Nothing about training changes: random states and the modes of modules are
    put back. All processes take part, and the first one writes.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.clock = RunClock()
        self.metrics = RunMetrics(self.clock)
        self.samples: list[RunSample] = []
        """Samples of this part of the run."""
        self.losses: list[tuple[int, float]] = []
        """(step, validation loss) of every complete evaluation; step 0 is before training."""
        self.first_step: int | None = None
        """The step at which this part of the run began to train; None: it has not begun."""
        self.processes: list[ProcessTimes] = []
        """Times of several processes that wait for each other, at the end of the training."""

    @property
    def callbacks(self) -> list[Callback]:
        """All callbacks of a run; samples are written before the metrics see the end of a validation."""
        return [self, self.metrics]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read every prompt, so that one that cannot be used is an error before training."""
        data: Any = getattr(trainer, "datamodule", None)
        for prompt in prompts(data):
            data.prompt(prompt)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the first step, write the environment, and forget samples of steps that a resumed run takes again."""
        self.first_step = trainer.global_step
        if self.folder is not None and trainer.is_global_zero:
            text = json.dumps(environment(), indent=2)
            save_text(self.folder / ENVIRONMENT, text + "\n")
            if trainer.global_step and (self.folder / SAMPLES).exists():
                without_later(self.folder / SAMPLES, trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loss, and write samples; before training only if the sanity check saw every batch."""
        if trainer.sanity_checking and trainer.num_sanity_val_steps != math.inf:
            return
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None:
            self.losses.append((trainer.global_step, float(loss)))
            if trainer.sanity_checking:
                rank_zero_info(f"held-out loss before training: {float(loss):.4f}")
        if trainer.state.fn == TrainerFn.FITTING:
            self._write_samples(trainer, pl_module, TOKENS)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write longer samples while the engine still streams the weights; gather times of all processes."""
        self._write_samples(trainer, pl_module, TOKENS_AT_END)
        ranks, waited = getattr(trainer.strategy, "ranks", None), self.clock.waited
        if ranks is None or not waited:
            return
        steps = self.clock.steps
        # The first step has what comes once before it.
        own = (socket.gethostname(), median(steps[1:] or steps), median(waited[1:] or waited))
        self.processes = [
            ProcessTimes(rank=rank, host=host, step_s=step, waited_s=waits)
            for rank, (host, step, waits) in enumerate(ranks.gather(own))
        ]

    def _write_samples(self, trainer: Trainer, pl_module: LightningModule, tokens: int) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        wanted, step = prompts(data), trainer.global_step
        if not wanted:
            return
        if trainer.is_global_zero:
            status("writing a sample" if len(wanted) == 1 else f"writing {len(wanted)} samples")
        with ExitStack() as undo, isolate_rng(), torch.no_grad():
            undo.callback(self.clock.enter, self.clock.enter("samples"))
            # Modes are put back one by one: train() on the whole would wake up dropout in
            # what a user keeps in evaluation mode.
            for module in pl_module.modules():
                undo.callback(setattr, module, "training", module.training)
            pl_module.eval()
            batches = [trainer.strategy.batch_to_device(data.prompt(one, max_new_tokens=tokens)) for one in wanted]
            answers: list[Any] = [trainer.strategy.predict_step(batch, 0) for batch in batches]
            texts = [str(data.tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers]
        loss = self.losses[-1][1] if self.losses and self.losses[-1][0] == step else None
        apart = "\n" if data.asks_questions else ""  # an answer does not go on with its question's line
        made = [
            RunSample(step=step, val_loss=loss, prompt=prompt, text=apart + text)
            for prompt, text in zip(wanted, texts, strict=True)
        ]
        self.samples = [sample for sample in self.samples if sample.step != step] + made
        if self.folder is not None and trainer.is_global_zero:
            samples = self.folder / SAMPLES
            with writing(samples), samples.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in made)

    def end(self, trainer: Trainer, error: BaseException | None = None) -> Path | None:
        """Write the end of this part of the run, and the report; return the report's path.

        Nothing is written about a run that has not begun to train, and only the first of several processes writes.
        After an ``error`` that ended the run early this raises none of its own.
        """
        if self.folder is None or self.first_step is None or not trainer.is_global_zero:
            return None
        try:
            write_part(self.folder, self.part(trainer, error))
            return write_report(self.folder)
        except Exception as second:
            if error is None:
                raise
            # What ended the run must not be hidden.
            rank_zero_warn(f"the report could not be written: {named(second)}")
            return None

    def part(self, trainer: Trainer, error: BaseException | None = None) -> RunPart:
        """Return this part of the run, which ended with ``error`` or as it should."""
        self.clock.enter("ended")
        metrics = self.metrics
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        ended = "finished" if error is None else "interrupted" if interrupted else "failed"
        why = named(error) if error is not None and ended == "failed" else None
        if ended == "finished" and self.broken is not None:
            ended, why = "failed", f"the loss is {self.broken}"
        return RunPart(
            first_step=self.first_step or 0,
            last_step=trainer.global_step,
            ended=ended,
            error=why,
            seconds={name: round(seconds, 6) for name, seconds in self.clock.seconds.items()},
            device_peak_bytes=metrics.peaks.get("device_peak_bytes"),
            host_peak_bytes=metrics.peaks.get("host_peak_bytes"),
            process_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            tokens=metrics.tokens,
            trained_tokens=metrics.trained,
            loss_before=self.losses[0][1] if self.losses and self.losses[0][0] == 0 else None,
            processes=tuple(self.processes),
        )

    def facts(self, trainer: Trainer) -> dict[str, str]:
        """Return the figures of the finished run, as its page has them, by their titles."""
        assert self.folder is not None
        facts = described(read_run(self.folder))
        if self.losses:  # also of a run without a logger
            ends = [self.losses[0], *self.losses[1:][-1:]]
            facts = {name: text for name, text in facts.items() if name not in _OF_ENDS}
            only_before = " (before training; none since)" if self.losses[-1][0] == 0 else ""
            facts["held-out loss"] = " -> ".join(f"{loss:.4f}" for _, loss in ends) + only_before
        if several(trainer):
            facts["processes"] = f"{trainer.world_size}; tokens are those of all, times and memory those of the first"
            if self.processes:
                facts["waiting"] = told(self.processes)
        if kernels := kernels_of(trainer.lightning_module):
            facts["kernels"] = kernels
        if self.broken is not None:
            facts["loss"] = f"{self.broken}: the weights are of no use"
        elif first := self.metrics.loss.first:
            facts["loss"] = f"not finite at step {first}, finite at the end"
        plan: Plan | None = getattr(trainer.strategy, "plan", None)
        if plan is not None and (plan.accumulate > 1 or plan.batch_curve):
            batches = f"{plan.accumulate} micro-batches of " if plan.accumulate > 1 else ""
            parts = f" in {plan.parts} parts" if plan.parts > 1 else ""
            chosen = f", chosen from {len(plan.batch_curve)} sizes" if plan.batch_curve else ""
            facts["batch size"] = f"{batches}{plan.batch_size}{parts}{chosen}"
        return facts

    @property
    def broken(self) -> str | None:
        """A description of a loss that is not finite at the end of the training; None if all are finite."""
        if not self.metrics.loss.is_finite:
            return f"not finite since step {self.metrics.loss.first}"
        return None if not self.losses or math.isfinite(self.losses[-1][1]) else "not finite on held-out data"


def prompts(data: Any) -> list[str]:
    """Return the sample prompts of a data module, none if it has none."""
    return list(getattr(data, "prompts", ()))


def write_report(folder: Path, gains: Sequence[Gain] = ()) -> Path:
    """Write ``report.html`` into the run folder ``folder`` from what is in it, and return its path."""
    from lt_offload.report.run_page import write_run_report

    return write_run_report(folder, gains)


def run_gains(summary: RunSummary, trainer: Trainer) -> tuple[Gain, ...]:
    """Return the gains of more memory and faster links; nothing after a run too short to be worth the wait.

    They take a few plans, in a small part of the time of the training.
    """
    strategy: Any = trainer.strategy
    # Four changes are planned (what_if.gains), each in a fourth of the time.
    patience = min(_MOST_PATIENCE, _PATIENCE * sum(summary.clock.steps)) / 4
    if getattr(strategy, "plan", None) is None or strategy.profile is None or patience < _LEAST_PATIENCE:
        return ()
    from lt_offload.plan import make_plan
    from lt_offload.plan.what_if import gains

    def again(profile: Profile, memory: int, host_memory: int) -> Plan:
        return make_plan(
            profile, replace(strategy.settings, memory=memory, host_memory=host_memory, solver_time_limit=patience)
        )

    return gains(strategy.plan, strategy.profile, again, say=lambda what: rank_zero_info(f"{what} ..."))


def print_summary(summary: RunSummary, trainer: Trainer, report: Path | None) -> None:
    """Print the end of a run, in 80 columns where paths are not longer than that."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"\n[bold]{'done' if summary.broken is None else 'done, in vain'}[/bold]")
    for name, value in (*summary.facts(trainer).items(), *_written(summary, trainer, report)):
        if 2 + _LABEL + len(value) > console.width and console.is_terminal:  # whole, to be copied
            value = f"\n    {value}"
        console.print(f"  {name:{_LABEL}}{value}", markup=False, soft_wrap=True)


def _written(summary: RunSummary, trainer: Trainer, report: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the last samples, the paths of files, and a command to go on with."""
    for sample in summary.samples:
        if sample.step == trainer.global_step:
            text = " ".join(f"{sample.prompt}{sample.text}".split())
            lines = textwrap.wrap(text, _WIDTH - _LABEL - 2, max_lines=3, placeholder=" ...") or [""]
            yield from zip_longest(["sample"], lines, fillvalue="")
    if report is not None:
        yield "report", str(report)
    checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if checkpoint and summary.folder is not None and (summary.folder / "config.yaml").is_file():
        yield "checkpoint", _short(checkpoint)
        if summary.broken is not None:
            return
        folder = _short(str(summary.folder))
        data: Any = getattr(trainer, "datamodule", None)
        talks = getattr(data, "asks_questions", False) and data.encoder.template is not None
        yield "try it", f"lt-finetune chat {folder}" if talks else f"lt-finetune generate {folder} --prompt TEXT"


def _short(path: str) -> str:
    """Return ``path`` from here if it is below."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        return path


_PACKAGES = (
    "torch", "lightning", "transformers", "datasets", "tokenizers", "safetensors", "peft", "bitsandbytes", "numpy",
    "liger-kernel", "triton",
)  # fmt: skip


def environment() -> dict[str, object]:
    """Return the versions of the libraries, and the properties of the machine."""
    facts: dict[str, object] = {"lt_offload": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {"cuda": torch.version.cuda, "gpu": card.name, "gpu_bytes": card.total_memory}
        facts["gpu_capability"] = f"{card.major}.{card.minor}"
    facts["system"] = f"{platform.system()} {platform.release()}"
    facts["processor"] = processor_name()
    facts["cores"] = os.cpu_count()
    facts["threads"] = torch.get_num_threads()
    facts["ram_bytes"] = total_host_bytes()
    return facts
