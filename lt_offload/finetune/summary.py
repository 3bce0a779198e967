"""What a fine-tuning run did, told at its end: losses before and after, speed, memory, a sample.

Works with any strategy; one that has a plan, a profile and a trace is compared with its plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from lt_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lt_offload.plan.what_if import Gain
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import Profile

_PATIENCE = 0.1
"""The part of the time of training that the report may take to say what more memory would have bought ..."""
_MOST_PATIENCE = 40.0
"""... in seconds at most ..."""
_LEAST_PATIENCE = 2.0
"""... and not at all with fewer seconds than that for each of its plans."""


class RunSummary(Callback):
    """Collects what the end of a run is to say, and lets the model continue the data module's ``sample_prompt``."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []
        """(step, validation loss) of every complete evaluation; step 0 is before training."""
        self.step_times: list[float] = []
        self.prompt: str | None = None
        self.sample: str | None = None
        self.figures: dict[str, int] = {}
        """``device_peak_bytes`` and ``host_peak_bytes`` over the run, where the strategy measures them."""
        self._started = 0.0
        self._seconds = 0.0
        """Of the micro-batches of the present step so far."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loss; a sanity check counts if it saw every batch."""
        loss = trainer.callback_metrics.get("val_loss")
        if loss is None or (trainer.sanity_checking and trainer.num_sanity_val_steps != float("inf")):
            return
        self.losses.append((trainer.global_step, float(loss)))
        if trainer.sanity_checking:
            rank_zero_info(f"held-out loss before training: {float(loss):.4f}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock of this micro-batch."""
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop it."""
        self._seconds += time.perf_counter() - self._started
        if trainer.fit_loop._should_accumulate():
            return  # more micro-batches of this step are to come
        self.step_times.append(self._seconds)
        self._seconds = 0.0
        stats = getattr(getattr(trainer.strategy, "engine", None), "stats", None)
        if stats is not None:
            for name in ("device_peak_bytes", "host_peak_bytes"):
                self.figures[name] = max(self.figures.get(name, 0), getattr(stats, name))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a sample while the weights are still where training had them."""
        data: Any = getattr(trainer, "datamodule", None)
        prompt = getattr(data, "sample_prompt", None)
        if prompt is None:
            return
        rank_zero_info("writing a sample ...")
        pl_module.eval()
        with torch.no_grad():
            batch = trainer.strategy.batch_to_device(data.prompt(prompt))
            tokens: Any = trainer.strategy.predict_step(batch, 0)
        pl_module.train()
        self.prompt, self.sample = prompt, data.tokenizer.decode(tokens, skip_special_tokens=True)

    def facts(self, trainer: Trainer) -> dict[str, str]:
        """Return what is known about the finished run, as a person reads it."""
        plan = getattr(trainer.strategy, "plan", None)
        facts = {"steps": str(trainer.global_step)}
        if self.losses:
            facts["held-out loss"] = " -> ".join(f"{loss:.4f}" for _, loss in _ends(self.losses))
        if plan is not None:
            predicted = plan.predicted
            batches = f"{plan.micro_batches} micro-batches of " if plan.micro_batches > 1 else ""
            chosen = f", chosen from {len(plan.batch_curve)} sizes" if plan.batch_curve else ""
            if batches or chosen:
                facts["batch size"] = f"{batches}{plan.batch_size}{chosen}"
            facts["memory budget"] = format_bytes(plan.budget_bytes)
            facts["measured peak"] = (
                f"{_bytes(self.figures, 'device_peak_bytes')} (plan: {format_bytes(predicted.device_peak_bytes)})"
            )
            facts["host memory"] = (
                f"{_bytes(self.figures, 'host_peak_bytes')} (plan: {format_bytes(predicted.host_peak_bytes)})"
            )
            facts["step time"] = (
                f"{format_seconds(self.step_time)} (plan: {format_seconds(predicted.iteration_s)}, "
                f"with enough memory: {format_seconds(predicted.no_offload_s)})"
            )
            facts["plan"] = (
                f"{plan.planner}, {predicted.gap:.1%} above the bound of {format_seconds(predicted.lower_bound_s)}"
            )
        elif self.step_times:
            facts["step time"] = format_seconds(self.step_time)
        return facts

    @property
    def step_time(self) -> float:
        """The median step."""
        return sorted(self.step_times)[len(self.step_times) // 2] if self.step_times else 0.0


def write_run_report(summary: RunSummary, trainer: Trainer, folder: Path, gains: Sequence[Gain] = ()) -> Path | None:
    """Write ``report.html`` into ``folder`` if the strategy has a plan, and return its path."""
    strategy: Any = trainer.strategy
    if getattr(strategy, "plan", None) is None or strategy.profile is None:
        return None
    from lt_offload.plan import simulate
    from lt_offload.report.page import write_report

    content: dict[str, object] = {"steps": trainer.global_step, "step_s": summary.step_time, **summary.figures}
    if summary.losses:
        content["loss_before"], content["loss_after"] = summary.losses[0][1], summary.losses[-1][1]
    if summary.sample is not None:
        content["sample"] = f"{summary.prompt}{summary.sample}"
    return write_report(
        folder,
        plan=strategy.plan,
        profile=strategy.profile,
        predicted=simulate(strategy.plan, strategy.profile),
        measured=strategy.trace,
        summary=content,
        gains=gains,
    )


def run_gains(summary: RunSummary, trainer: Trainer) -> tuple[Gain, ...]:
    """Return what more memory and faster links would have bought; nothing after a run too short to be worth the wait.

    A few plans are made for that, in a small part of the time that training took.
    """
    strategy: Any = trainer.strategy
    patience = min(_MOST_PATIENCE, _PATIENCE * sum(summary.step_times)) / 4
    if getattr(strategy, "plan", None) is None or strategy.profile is None or patience < _LEAST_PATIENCE:
        return ()
    from lt_offload.plan import make_plan
    from lt_offload.plan.what_if import gains

    def again(profile: Profile, memory: int, host_memory: int) -> Plan:
        return make_plan(
            profile, replace(strategy.settings, memory=memory, host_memory=host_memory, time_limit=patience)
        )

    return gains(strategy.plan, strategy.profile, again, say=lambda what: rank_zero_info(f"{what} ..."))


def print_summary(summary: RunSummary, trainer: Trainer, folder: Path, report: Path | None) -> None:
    """Print the end of a run."""
    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in summary.facts(trainer).items():
        table.add_row(f"[bold]{name}[/bold]", value)
    table.add_row("[bold]run folder[/bold]", str(folder))
    if report is not None:
        table.add_row("[bold]report[/bold]", str(report))
    console.print(Panel(table, title="done", expand=False))
    if summary.sample is not None:
        console.print("[bold]sample[/bold]")
        console.print(summary.prompt, style="dim", end="", markup=False, highlight=False)
        console.print(summary.sample, markup=False, highlight=False)
    checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if checkpoint and (folder / "config.yaml").is_file():
        command = f"lt-finetune generate {folder / 'config.yaml'} --ckpt_path {checkpoint} --prompt TEXT"
        console.print(f"\nTry the result:\n  {command}", markup=False, highlight=False, soft_wrap=True)


def _ends(losses: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return losses if len(losses) < 2 else [losses[0], losses[-1]]


def _bytes(figures: Mapping[str, int], name: str) -> str:
    return format_bytes(figures[name]) if name in figures else "not measured"
