"""A run's progress in one line: on a terminal one that is drawn anew, elsewhere one from time to time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.types import STEP_OUTPUT
from rich.console import RenderableType
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from lt_offload.compat.lightning import adds_up
from lt_offload.finetune.terminal import TERMINAL
from lt_offload.strategy.metrics import logs_after
from lt_offload.units import format_bytes

_SMOOTHED = 20
"""Records in the mean that is shown as the loss, and steps whose median time is that of the steps left."""
_LEAST_SECONDS = 0.1
"""Least time between two drawings on a terminal."""
_SEPARATOR = "  "
_BAR = 16
_WIDE = 100
"""Least columns of a terminal with room for a bar."""


class ProgressLine(ProgressBar):
    """A line with step, loss (mean of the last 20 records), ETA, tokens/s, peaks of memory and RAM against budgets.

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
        self._line: RenderableType | None = None
        """The line as it was drawn last; None: nothing is drawn."""
        self._begin()

    def _begin(self) -> None:
        self._losses: deque[float] = deque(maxlen=_SMOOTHED)
        # The median leaves planning and validation out, each in the time of one step.
        self._step_seconds: deque[float] = deque(maxlen=_SMOOTHED)
        self._step_end: float | None = None
        self._tokens_per_s: float | None = None
        self._total: int | None = None
        """Steps of the training; None: not known."""
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
        self._stop(keep=False)
        self._begin()
        self._total = steps_of(trainer)
        self._show(trainer, ["training ..."], plain=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Show the step that has ended."""
        if adds_up(trainer):
            return
        now = self.clock()
        if self._step_end is not None:
            self._step_seconds.append(now - self._step_end)
        self._step_end = now
        if logs_after(trainer, trainer.global_step):
            loss, rate = (trainer.callback_metrics.get(name) for name in ("train_loss", "tokens_per_s"))
            self._losses += [] if loss is None else [float(loss)]
            self._tokens_per_s = None if rate is None else float(rate)
        self._show(trainer, self._parts(trainer), done=trainer.global_step == self._total)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the last line where it is."""
        self._stop()

    # -- validation --------------------------------------------------------------------------------------------------

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
        self._show(trainer, [f"validating{when}", f"batch {batch_idx + 1}{of}"], plain=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the held-out loss of a validation within training."""
        self.reset_dataloader_idx_tracker()
        if trainer.sanity_checking or trainer.state.fn != "fit":
            self._stop(keep=False)
            return
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None:
            self._write(f"step {trainer.global_step}: held-out loss {float(loss):.4f}")
        self._show(trainer, self._parts(trainer), plain=False, done=True)

    # -- the line ----------------------------------------------------------------------------------------------------

    def _parts(self, trainer: Trainer) -> list[str]:
        """Return the parts of the line, the most important first."""
        step, total = trainer.global_step, self._total
        parts = [f"step {step}" if total is None else f"step {step}/{total}"]
        if self._losses:
            of = f" (mean of {len(self._losses)})" if len(self._losses) > 1 else ""
            parts.append(f"loss {sum(self._losses) / len(self._losses):.4f}{of}")
        if self._step_seconds and total is not None and step < total:
            parts.append(f"eta {timedelta(seconds=math.ceil(median(self._step_seconds) * (total - step)))}")
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

    def _show(self, trainer: Trainer, parts: Sequence[str], *, plain: bool = True, done: bool = False) -> None:
        """Draw the line of ``parts``; write a ``plain`` one only if the last one is old, or this one is ``done``."""
        if not self._enabled:
            return
        now = self.clock()
        if not TERMINAL.draws:
            if plain and (done or now - self._written >= self.seconds):
                self._written = now
                self._write(_SEPARATOR.join(parts))
        elif done or now - self._drawn >= _LEAST_SECONDS:
            self._drawn, width = now, TERMINAL.console.width
            room = width - (_BAR + 1 if width >= _WIDE else 0)
            self._line = Text(fitted(parts, room), no_wrap=True, overflow="crop")
            if room < width:
                bar = Bar(total=self._total, completed=trainer.global_step, width=_BAR)
                text, self._line = self._line, Table.grid(padding=(0, 1))
                self._line.add_row(bar, text)
            TERMINAL.draw(self._line, below=True)

    def _write(self, line: str) -> None:
        """Write a line that stays, above the one that is drawn anew."""
        if self._enabled:
            TERMINAL.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _stop(self, *, keep: bool = True) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        if keep and self._enabled and TERMINAL.draws:
            # A message about something else may stand in the place of the last step's line.
            TERMINAL.draw(line, below=True)
        TERMINAL.clear(keep=keep)


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
