"""Metrics of a recipe's training: speed in real tokens, memory, learning rate, utilisation. For any strategy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lt_offload.compat.lightning import adds_up, flush_metrics
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.processes import total
from lt_offload.machine.driver import beside_bytes
from lt_offload.profiling.flops import product_flops_per_token
from lt_offload.strategy.metrics import Metrics, RunClock, logs_after, tokens_in


def peak_of(device: torch.device, precision: str, dtype: torch.dtype, count: int = 1) -> float | None:
    """Return the rated peak of ``count`` devices like ``device``; None where it is not known, as for a CPU.

    ``precision`` is the Trainer's, e.g. ``bf16-mixed``, and ``dtype`` that of the weights.
    """
    computes: Any = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else dtype
    if device.type != "cuda":
        return None
    with warnings.catch_warnings():  # of cards that Lightning has no figure for
        warnings.simplefilter("ignore")
        flops = get_available_flops(device, computes)
    return None if flops is None else float(flops) * count


class RunMetrics(Metrics, Callback):
    """A callback that logs figures of training and warns of losses that are not finite; replaces offmate's own.

    Every ``log_every_n_steps`` steps, as means since the last record, without validation, samples and checkpoints:
    ``tokens_per_s`` (real tokens: padding is none), ``trained_tokens_per_s`` (those with a loss), ``samples_per_s``,
    ``wall_step_s`` (from the start of a step to the start of the next); ``lr``; ``mfu`` where the device's rated peak
    is known. With the offmate strategy those of its engine, too: ``step_s``, ``step_vs_plan``, ``device_peak_gb``,
    ``host_peak_gb``, ``grad_norm``; with another one on a GPU ``device_peak_gb``, too. Tokens and samples
    are those of all processes, and so is the rated peak; times and memory are those of the first process.

    Tokens are counted where the batch is, and read when the loss is, so that a step waits for nothing more.
    """

    def __init__(self, clock: RunClock) -> None:
        super().__init__(clock)
        self.peaks: dict[str, int] = {}
        """``device_peak_bytes`` and ``host_peak_bytes`` over the run, where they are measured."""
        self.tokens = self.trained = 0
        """Totals of all records so far."""
        self.flops_per_token: float | None = None
        self.peak: float | None = None
        self._counts: Tensor | None = None
        self._met = 0.0
        """Seconds that the strategy has waited at the beginning of batches so far."""
        self._lr = 0.0
        self._seen = [0, 0.0]  # steps and seconds at the last record
        self._batches = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute the FLOPs of a token, and look the device's peak up."""
        self.flops_per_token = product_flops_per_token(pl_module)
        dtype = next((p.dtype for p in pl_module.parameters() if p.is_floating_point()), torch.float32)
        self.peak = peak_of(trainer.strategy.root_device, str(trainer.precision), dtype, trainer.world_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch losses."""
        self._watch_loss(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Enter the phase of checkpoints, up to the next step or validation."""
        self.clock.enter("checkpoints")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step, or its next micro-batch."""
        self.clock.enter("steps")
        self._lr = float(trainer.optimizers[0].param_groups[0]["lr"])
        counts = _count(batch)
        self._counts = counts if self._counts is None else self._counts + counts

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step or micro-batch, and log."""
        engine: Any = getattr(trainer.strategy, "engine", None)
        self.clock.enter("between")
        self._note_loss(trainer, outputs)
        # Two ways to say that no update has come of this batch: Lightning's accumulation, and the engine's.
        if adds_up(trainer) or (engine is not None and engine.added):
            return
        self.clock.end_step()
        stats = None if engine is None or engine.plan is None else engine.stats
        if stats is not None:
            met = getattr(trainer.strategy, "waited_s", 0.0)
            self.clock.waited.append(stats.waited_s + met - self._met)
            self._met = met
            for name in ("device_peak_bytes", "host_peak_bytes"):
                self.peaks[name] = max(self.peaks.get(name, 0), getattr(stats, name))
        if not logs_after(trainer, trainer.global_step):
            return
        self._check_loss(trainer)
        self._log_rates(trainer)
        self._log("lr", self._lr, dtype=torch.float64)  # as it is in the optimizer, not rounded
        if stats is not None:
            self._log_engine(engine)
        elif trainer.strategy.root_device.type == "cuda":
            device = trainer.strategy.root_device
            peak = torch.cuda.max_memory_reserved(device) + beside_bytes(device)[0]  # as a system monitor shows it
            self.peaks["device_peak_bytes"] = peak
            self._log("device_peak_gb", peak / 1e9)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the tokens, and check the losses, since the last record."""
        self._take_counts(trainer)
        self._check_loss(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Hand the figures of a finished step to the loggers if a callback has left before the Trainer could do so.

        An interrupted run has saved that step, and would never log it: a resumed one does not take it again.
        """
        done: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if trainer.training and len(self.clock.steps) and done.processed > done.completed:
            flush_metrics(trainer)
        super().on_exception(trainer, pl_module, exception)

    def _remedies(self, trainer: Any) -> list[str]:
        module = trainer.lightning_module
        clip = [] if trainer.gradient_clip_val else ["--trainer.gradient_clip_val 1"]
        wide = [] if getattr(module, "model_dtype", "float32") == "float32" else ["--model.dtype float32"]
        full = ["--trainer.precision 32-true"] if "16-mixed" in str(trainer.precision) else []
        return [f"a lower --model.lr (it is {getattr(module, 'lr', self._lr):g})", *clip, *wide, *full]

    def _log_rates(self, trainer: Trainer) -> None:
        tokens, trained, samples = self._take_counts(trainer)
        steps, seconds = len(self.clock.steps), self.clock.training
        done, spent = steps - self._seen[0], seconds - self._seen[1]
        self._seen = [steps, seconds]
        if spent <= 0 or not done:
            return
        if tokens:
            self._log("tokens_per_s", tokens / spent, prog_bar=True)
            self._log("trained_tokens_per_s", trained / spent)
            if self.peak and self.flops_per_token:
                self._log("mfu", self.flops_per_token * tokens / spent / self.peak)
        if samples:
            self._log("samples_per_s", samples / spent)
        self._log("wall_step_s", spent / done)

    def _take_counts(self, trainer: Trainer) -> tuple[int, int, int]:
        """Return the counts of all processes since the last call."""
        if self._counts is None:
            return 0, 0, 0
        tokens, trained, samples = (int(count) for count in total(trainer, self._counts).tolist())
        self._counts = None
        self.tokens, self.trained = self.tokens + tokens, self.trained + trained
        return tokens, trained, samples


def _count(batch: Any) -> Tensor:
    """Return real tokens, trained tokens and samples of ``batch``, on its device."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return torch.tensor([tokens_in(batch)] * 2 + [0])
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    whole = torch.full((), ids.numel(), device=ids.device)
    real = whole if mask is None or mask.shape != ids.shape else (mask != 0).sum()
    # A model predicts each token from those before it, so that the first one of a row is never a target.
    trained = whole if labels is None or labels.shape != ids.shape else (labels[:, 1:] != IGNORED).sum()
    return torch.stack((real, trained, torch.full_like(whole, len(ids))))
