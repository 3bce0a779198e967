"""Methods of an offloaded Trainer, in a class in front of the user's.

Each method calls the Trainer's own one within a context; all decisions are in ``run.py``.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lt_offload import limits
from lt_offload.errors import ConfigError
from lt_offload.model.forms.adapters import writes_pieces

if TYPE_CHECKING:
    from lt_offload.hf.run import Run


class Offloaded:
    """The methods of an offloaded Trainer that differ from the Trainer's."""

    offmate: Run
    """The training of this Trainer."""
    args: Any
    model: Any
    accelerator: Any
    control: Any
    state: Any

    @property
    def _theirs(self) -> Any:
        return super()

    # -- where the model is ------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse what cannot be honoured, and let the accelerator leave the model and the optimizer where they are."""
        limits.check("hf", limits.Setup(trainer=self))
        self._theirs.create_accelerator_and_postprocess()
        self.offmate.adapt(self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model on the host: its weights go to the device block by block."""

    # -- training ----------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train inside the budget; raises ``ConfigError`` if no checkpoint of it could be saved."""
        if writes_pieces(self.model) and self.args.save_strategy != "no":
            raise ConfigError(
                f"save_strategy={str(self.args.save_strategy.value)!r}: checkpoints of a model with stored weights "
                "cannot be saved, only those of adapters; train adapters (peft), or set save_strategy='no' and call "
                "lt_offload.open_weights(model) after the training"
            )
        with self.offmate.training():
            return self._theirs.train(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Take note of the optimizer, and that a first batch is to come."""
        model, loader = self._theirs._prepare_for_training(*args, **kwargs)
        self.offmate.begin(model)
        return model, loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Take note of the micro-batches of the coming update."""
        batches, items = self._theirs.get_batch_samples(*args, **kwargs)
        self.offmate.expect(batches)
        return batches, items

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a training step, profiled if no plan serves it."""
        with self.offmate.step(inputs):
            return self._theirs.training_step(model, inputs, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Save and stop here, at the end of an update, after Ctrl-C or a SIGTERM."""
        interrupts = self.offmate.interrupts
        received = interrupts.received
        if received is not None:
            self.control.should_save = self.control.should_training_stop = True
        self._theirs._maybe_log_save_evaluate(*args, **kwargs)
        if received is not None:
            step = self.state.global_step
            self.offmate.say(
                f"stopped after step {step}; train(resume_from_checkpoint=True) goes on from checkpoint-{step}"
            )
            interrupts.remove()
            # Whoever handled it before the training decides what becomes of the process.
            signal.raise_signal(received)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Let callbacks that look at gradients before the update, which come next, find them clipped."""
        norm = self._theirs._get_grad_norm(*args, **kwargs)
        self.offmate.show_gradients()
        return norm

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Say beside the states how the run trains: which weights, and by which plan."""
        self._theirs._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            self.offmate.save_record(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Train the weights that the run of the checkpoint has trained, and go on by its plan."""
        if checkpoint is not None:
            self.offmate.goes_on(Path(checkpoint))
        self._theirs._load_optimizer_and_scheduler(checkpoint)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Stream the model, also where nothing is trained."""
        with self.offmate.streamed(getattr(dataloader, "dataset", None), kwargs.get("prediction_loss_only")):
            return self._theirs.evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Hold what a step of the evaluation takes against the budget."""
        with self.offmate.inference():
            return self.offmate.kept(self._theirs.prediction_step(*args, **kwargs))

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Stream the model where TRL's data are completed by it, before there is any training."""
        with self.offmate.streamed():
            return self._theirs._precompute_ref_logps(*args, **kwargs)

    # -- records -----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the engine's metrics, too."""
        if "loss" in logs:
            logs.update(self.offmate.figures())
        self._theirs.log(logs, *args, **kwargs)
