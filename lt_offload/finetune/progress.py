"""A run's progress in one line: on a terminal one that is drawn anew, elsewhere one from time to time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.types import STEP_OUTPUT
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.table import Column

from lt_offload.compat.lightning import adds_up
from lt_offload.finetune.terminal import TERMINAL
from lt_offload.strategy.metrics import logs_after
from lt_offload.units import format_bytes

_SMOOTHED = 20
"""Records in the mean that is shown as the loss."""
_SPEED_SECONDS = 600.0
"""Seconds of the last steps from which the time of the rest is estimated."""
_LEAST_SECONDS = 0.1
"""Least time between two drawings on a terminal."""
_SEPARATOR = "  "
_TASK = TaskID(0)
_BAR = 16
_WIDE = 100
"""Least columns of a terminal with room for a bar."""


class ProgressLine(ProgressBar):
    """A line with step, loss (mean of the last 20 records), tokens/s, peaks of memory and RAM against budgets, ETA.

    The loss is read when loggers read it, every ``log_every_n_steps`` steps, so that no step waits for the device
    because of this. On a terminal the line fits its width: what matters least is left out first. Where the output is
    no terminal, or ``NO_COLOR`` or ``CI`` is set, plain lines are written instead, without control characters.

    Args:
        seconds: least time between two plain lines.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.clock: Callable[[], float] = time.monotonic
        self._enabled = True
        self._progress: Progress | None = None
        self._losses: deque[float] = deque(maxlen=_SMOOTHED)
        self._tokens_per_s: float | None = None
        self._paused = self._pause_began = 0.0
        self._written = self._drawn = -math.inf
        self._peaks = (0, 0)
        """Most device memory and RAM of the iterations so far."""

    # -- on and off --------------------------------------------------------------------------------------------------

    def enable(self) -> None:
        """Show the line."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing."""
        self._enabled = False
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the terminal as it was."""
        self._stop()

    # -- training ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        self._losses.clear()
        self._paused, self._tokens_per_s, self._peaks = 0.0, None, (0, 0)
        self._written = -math.inf
        self._stop(keep=False)
        self._bar().reset(_TASK, total=steps_of(trainer), completed=trainer.global_step)
        self._show(["training ..."], plain=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Show the step that has ended."""
        if adds_up(trainer):
            return
        self._bar().update(_TASK, completed=trainer.global_step)
        if logs_after(trainer, trainer.global_step):
            self._read(trainer.callback_metrics)
        self._show(self._parts(trainer), done=self._bar().finished)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the last line where it is."""
        self._stop()

    # -- validation --------------------------------------------------------------------------------------------------

    def on_planning_start(self) -> None:
        """Stop the time of training: the first step is measured and planned."""
        self._pause_began = self.clock()

    def on_planning_end(self) -> None:
        """Let the time of training go on."""
        self._paused += self.clock() - self._pause_began

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the time of training."""
        self._pause_began = self.clock()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show the progress of the validation."""
        self.has_dataloader_changed(dataloader_idx)
        total = self.total_val_batches_current_dataloader
        when = " before training" if trainer.sanity_checking else ""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            when = f" after step {trainer.global_step}"
        of = "" if math.isinf(total) else f"/{int(total)}"
        self._show([f"validating{when}", f"batch {batch_idx + 1}{of}"], plain=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the held-out loss of a validation within training, and let the time of training go on."""
        self._paused += self.clock() - self._pause_began
        self.reset_dataloader_idx_tracker()
        if trainer.sanity_checking or trainer.state.fn != "fit":
            self._stop(keep=False)
            return
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None:
            self._write(f"step {trainer.global_step}: held-out loss {float(loss):.4f}")
        if TERMINAL.draws:
            self._show(self._parts(trainer), done=True)

    # -- the line ----------------------------------------------------------------------------------------------------

    def _read(self, metrics: Mapping[str, Any]) -> None:
        loss = metrics.get("train_loss")
        if loss is not None:
            self._losses.append(float(loss))
        rate = metrics.get("tokens_per_s")
        self._tokens_per_s = None if rate is None else float(rate)

    def _parts(self, trainer: Trainer) -> list[str]:
        """Return the parts of the line, the most important first."""
        step, task = trainer.global_step, self._bar().tasks[_TASK]
        total = None if task.total is None else int(task.total)
        parts = [f"step {step}" if total is None else f"step {step}/{total}"]
        if self._losses:
            parts.append(f"loss {sum(self._losses) / len(self._losses):.4f}")
        if task.time_remaining:
            parts.append(f"eta {timedelta(seconds=task.time_remaining)}")
        if self._tokens_per_s:
            parts.append(f"{_count(self._tokens_per_s)} tok/s")
        engine, plan = getattr(trainer.strategy, "engine", None), getattr(trainer.strategy, "plan", None)
        if engine is not None and plan is not None:
            on_gpu = trainer.strategy.root_device.type == "cuda"
            peaks = engine.stats.device_peak_bytes, engine.stats.host_peak_bytes
            self._peaks = device, host = max(self._peaks[0], peaks[0]), max(self._peaks[1], peaks[1])
            parts.append(f"{'GPU' if on_gpu else 'device'} {of_budget(device, plan.budget_bytes)}")
            parts.append(f"RAM {of_budget(host, plan.host_budget_bytes)}")
        return parts

    def _show(self, parts: Sequence[str], *, plain: bool = True, done: bool = False) -> None:
        """Draw the line of ``parts``; write a ``plain`` one only if the last one is old, or this one is ``done``."""
        if not self._enabled:
            return
        bar, now = self._bar(), self.clock()
        if not TERMINAL.draws:
            if plain and (done or now - self._written >= self.seconds):
                self._written = now
                self._write(_SEPARATOR.join(parts))
        elif done or now - self._drawn >= _LEAST_SECONDS:
            self._drawn = now
            width = TERMINAL.console.width - (_BAR + 1) * (len(bar.columns) - 1)
            bar.update(_TASK, description=fitted(parts, width))
            TERMINAL.draw(bar.get_renderable(), below=True)

    def _write(self, line: str) -> None:
        """Write a line that stays, above the one that is drawn anew."""
        if self._enabled:
            TERMINAL.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _stop(self, *, keep: bool = True) -> None:
        bar, self._progress = self._progress, None
        if bar is None:
            return
        if keep and self._enabled and TERMINAL.draws:
            # A message about something else may stand in the place of the last step's line.
            TERMINAL.draw(bar.get_renderable(), below=True)
        TERMINAL.clear(keep=keep)

    def _bar(self) -> Progress:
        """Return the bar, which keeps the time of steps in any case."""
        if self._progress is None:
            line = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
            columns: list[ProgressColumn] = [BarColumn(_BAR)] if TERMINAL.console.width >= _WIDE else []
            self._progress = Progress(
                *columns,
                line,
                console=TERMINAL.console,
                speed_estimate_period=_SPEED_SECONDS,
                get_time=lambda: self.clock() - self._paused,
            )
            self._progress.add_task("", total=None)
        return self._progress


def steps_of(trainer: Trainer) -> int | None:
    """Return the number of steps of the training, None if it is not known."""
    total = trainer.estimated_stepping_batches
    return None if math.isinf(total) or total < 0 else int(total)


def fitted(parts: Sequence[str], width: int) -> str:
    """Return as many of ``parts``, the first ones first, as fit into ``width`` columns."""
    room = width - 1  # one column is left for the cursor
    for separator in (_SEPARATOR, " "):
        if len(separator.join(parts)) <= room:
            return separator.join(parts)
    lines = [_SEPARATOR.join(parts[:count]) for count in range(1, len(parts))]
    return max((line for line in lines if len(line) <= room), key=len, default=parts[0][:room])


def of_budget(used: int, budget: int) -> str:
    """Return ``used`` of ``budget`` bytes, with the unit once where it is the same."""
    (amount, unit), whole = format_bytes(used).split(), format_bytes(budget)
    return f"{amount}/{whole}" if whole.endswith(f" {unit}") else f"{amount} {unit}/{whole}"


def _count(rate: float) -> str:
    return f"{rate / 1000:.3g}k" if rate >= 10_000 else f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"
