"""Samples of the model at each validation: the data module's ``sample_prompt``, continued, in ``samples.jsonl``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng

from lt_offload.finetune.run.metrics import RunClock
from lt_offload.finetune.terminal import status
from lt_offload.report.runs import SAMPLES, RunSample, without_later

TOKENS = 24
"""Tokens of a sample during training; each takes one pass of the model, in which streamed weights travel once."""
TOKENS_AT_END = 64


class Samples(Callback):
    """A callback that lets the model continue ``sample_prompt``, one or several, at each validation and at the end.

    The most likely token is taken each time. Nothing about training changes: random states and the modes of modules are
    put back. All processes take part, and the first one writes.
    """

    def __init__(self, clock: RunClock, folder: Path | None = None) -> None:
        self.clock = clock
        self.folder = folder
        self.written: list[RunSample] = []
        """Samples of this part of the run."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read every prompt, so that one that cannot be used is an error before training."""
        data: Any = getattr(trainer, "datamodule", None)
        for prompt in prompts(data):
            data.prompt(prompt)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget samples of steps that a resumed run takes again."""
        if self.folder is None or not trainer.is_global_zero:
            return
        if trainer.global_step and (self.folder / SAMPLES).exists():
            without_later(self.folder / SAMPLES, trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write samples; before training, too, if the sanity check is complete."""
        if trainer.state.fn != TrainerFn.FITTING or not is_whole(trainer):
            return
        loss = trainer.callback_metrics.get("val_loss")
        self._write(trainer, pl_module, TOKENS, None if loss is None else float(loss))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write longer samples while the engine still streams the weights."""
        loss = next((sample.val_loss for sample in self.written if sample.step == trainer.global_step), None)
        self._write(trainer, pl_module, TOKENS_AT_END, loss)

    def _write(self, trainer: Trainer, pl_module: LightningModule, tokens: int, loss: float | None) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        wanted = prompts(data)
        if not wanted:
            return
        before = self.clock.enter("samples")
        what = "writing a sample" if len(wanted) == 1 else f"writing {len(wanted)} samples"
        if trainer.is_global_zero:
            status(what)
        # Modes are put back one by one: train() on the whole would wake up dropout in
        # what a user keeps in evaluation mode.
        modes = [(module, module.training) for module in pl_module.modules()]
        pl_module.eval()
        try:
            with isolate_rng(), torch.no_grad():
                asked = [trainer.strategy.batch_to_device(data.prompt(one, max_new_tokens=tokens)) for one in wanted]
                answers: list[Any] = [trainer.strategy.predict_step(batch, 0) for batch in asked]
                texts = [str(data.tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers]
        finally:
            for module, mode in modes:
                module.training = mode
            self.clock.enter(before)
        made = [
            RunSample(step=trainer.global_step, val_loss=loss, prompt=prompt, text=text)
            for prompt, text in zip(wanted, texts, strict=True)
        ]
        self.written = [sample for sample in self.written if sample.step != trainer.global_step] + made
        if self.folder is not None and trainer.is_global_zero:
            with (self.folder / SAMPLES).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in made)


def is_whole(trainer: Trainer) -> bool:
    """Return whether the validation that has ended saw every batch: one before training may be a check of a few."""
    return not trainer.sanity_checking or trainer.num_sanity_val_steps == math.inf


def prompts(data: Any) -> list[str]:
    """Return the sample prompts of a data module, none if it has none."""
    setting = getattr(data, "sample_prompt", None)
    return [setting] if isinstance(setting, str) else list(setting or ())
