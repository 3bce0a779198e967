"""A training run's log of itself: speed, memory, gradient norm. Works with any strategy.

The callback is written without Lightning; ``namespaces.bind`` puts it on the ``Callback`` of a namespace.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lt_offload.compat.lightning import adds_up
from lt_offload.compat.torch import tree_leaves
from lt_offload.strategy.namespaces import bind

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object


class LossCheck:
    """A check that losses are finite, made on their device so that no step waits, and read with the metrics."""

    def __init__(self) -> None:
        self._first: int | Tensor = 0
        self._is_finite: bool | Tensor = True

    @property
    def first(self) -> int:
        """The first step with a loss that was not finite, counted from 1; 0: none."""
        return int(self._first)

    @property
    def is_finite(self) -> bool:
        """True if the last loss was finite."""
        return bool(self._is_finite)

    @torch.no_grad()
    def note(self, outputs: Any, step: int) -> None:
        """Take note of the loss of ``step`` in ``outputs``, as Lightning hands them to callbacks."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        # Read at once, as it costs nothing here; on a GPU reading would make every step wait for its kernels.
        if loss.device.type == "cpu":
            self._is_finite = math.isfinite(loss)
            self._first = self._first or (0 if self._is_finite else step)
            return
        finite = loss.detach().reshape(()).isfinite()
        before = self._first if isinstance(self._first, Tensor) else torch.zeros_like(finite, dtype=torch.int64)
        self._is_finite, self._first = finite, torch.where(finite | (before > 0), before, step)


class RunClock:
    """A clock that divides the time of a run into phases, with a few readings per step.

    The phases are ``start`` (from the settings to the first step), ``steps``, ``between`` (the next batch, logging),
    ``validation``, ``samples`` and ``checkpoints``. Every moment belongs to one of them.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("start", "steps", "between", "validation", "samples", "checkpoints"), 0.0)
        self.steps = array("d")
        """Seconds of each step, and before it since the one before, without validation, samples and checkpoints."""
        self.waited = array("d")
        """Seconds of each step, and before it, of waiting for other processes; where there is an engine."""
        self._mark = time.perf_counter()
        self._phase = "start"
        self._step = 0.0

    def enter(self, phase: str) -> str:
        """End the present phase, begin ``phase``, and return the one that has ended; ``ended`` counts no more."""
        now = time.perf_counter()
        spent, self._mark = now - self._mark, now
        if self._phase in self.seconds:
            self.seconds[self._phase] += spent
        if self._phase in ("steps", "between"):
            self._step += spent
        before, self._phase = self._phase, phase
        return before

    def end_step(self) -> None:
        """Note the step that has just ended; micro-batches before the last one of a step are no steps."""
        self.steps.append(self._step)
        self._step = 0.0

    @property
    def training(self) -> float:
        """Seconds so far that count for rates: steps and the gaps between them."""
        running = time.perf_counter() - self._mark if self._phase in ("steps", "between") else 0.0
        return self.seconds["steps"] + self.seconds["between"] + running


class Metrics(_Base):
    """A callback that logs figures of the training step; the offmate strategy adds it to its Trainer by itself.

    Every step: ``tokens_per_s`` (of all processes, padding included, validation excluded). Every ``log_every_n_steps``
    steps, where the strategy has an engine: ``step_s``, ``step_vs_plan`` (measured over predicted time),
    ``device_peak_gb``, ``host_peak_gb`` and ``grad_norm``. Only the gradient norm is read back from the device.

    Then, too, and at the end of training, it warns of the first loss that is not finite.
    """

    log: Callable[..., None]
    """The module's ``log``, put here by the Trainer."""

    def __init__(self, clock: RunClock | None = None) -> None:
        self.clock = clock or RunClock()
        self._left: list[str] = []
        """Phases of the clock that go on after the present one."""
        self._tokens = 0
        self._since = 0.0
        self.loss = LossCheck()
        self._begun = 0
        self._warned = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock."""
        self.clock.enter("between")
        self._restart()
        self._watch_loss(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Look at the losses since the last record."""
        self._check_loss(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let the strategy give the model back before checkpoints, which may fail, too, hear of the error."""
        if trainer.world_size == 1:  # checkpoints of several processes are written by all engines together
            getattr(trainer.strategy, "give_back", lambda _: None)(exception)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter the phase of validation."""
        self._left.append(self.clock.enter("validation"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Return to the phase before the validation."""
        # A checkpoint that came before the validation is written: what follows is no part of it.
        before = self._left.pop()
        self.clock.enter("between" if before == "checkpoints" else before)

    def on_planning_start(self) -> None:
        """Enter the start phase again: planning is a part of it, and of no step."""
        self._left.append(self.clock.enter("start"))

    def on_planning_end(self) -> None:
        """Return to the phase before planning."""
        self.clock.enter(self._left.pop())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the figures of a step."""
        self._note_loss(trainer, outputs)
        # Every process has as many batches; of other sizes than here they are no slower.
        self._tokens += trainer.world_size * tokens_in(batch)
        if self._tokens:
            self._log("tokens_per_s", self._tokens / (self.clock.training - self._since), prog_bar=True)
        engine = getattr(trainer.strategy, "engine", None)
        if not logs_after(trainer, trainer.global_step) or (engine is not None and engine.added):
            return
        self._check_loss(trainer)
        self._restart()
        if engine is not None and engine.plan is not None and engine.stats.iterations:
            self._log_engine(engine)

    def _watch_loss(self, trainer: Any) -> None:
        self.loss, self._begun, self._warned = LossCheck(), 0 if trainer is None else trainer.global_step, False

    def _note_loss(self, trainer: Any, outputs: Any) -> None:
        if outputs is not None:
            # An update has been counted by now; a batch without one belongs to the step that is yet to come.
            self.loss.note(outputs, trainer.global_step + adds_up(trainer))

    def _check_loss(self, trainer: Any) -> None:
        if self._warned or not (step := self.loss.first):
            return
        self._warned = True
        what = f"the loss of step {step} is not finite, the first one that is not"
        if step == self._begun + 1:  # nothing has been updated yet: it is not the learning rate
            why = "before anything was updated: look at the model's weights, the batch and the precision"
        else:
            *others, last = self._remedies(trainer)
            ways = f"{', '.join(others)} or {last}" if others else last
            why = f"and what is trained from there on is lost as a rule; begin again with {ways}"
        rank_zero_warn(f"offmate: {what}, {why}")

    def _remedies(self, trainer: Any) -> list[str]:
        """Return remedies for losses that are not finite, the most likely first."""
        clip = [] if trainer.gradient_clip_val else ["clipping (Trainer(gradient_clip_val=1.0))"]
        full = [] if str(trainer.precision).startswith("32") else ["precision='32-true'"]
        return ["a lower learning rate", *clip, *full]

    def _log_engine(self, engine: Any) -> None:
        for name, value in figures(engine).items():
            self._log(name, value)
        if (norm := engine.stats.grad_norm) is not None:
            self._log("grad_norm", norm)

    def _restart(self) -> None:
        self._tokens = 0
        self._since = self.clock.training

    def _log(self, name: str, value: float, *, prog_bar: bool = False, dtype: torch.dtype = torch.float32) -> None:
        # a tensor on the host stays there; a float would become one on the device, to be read back by the progress bar
        metric = torch.tensor(value, dtype=dtype)
        self.log(name, metric, on_step=True, on_epoch=False, prog_bar=prog_bar, batch_size=1)


def figures(engine: Any) -> dict[str, float]:
    """Return the figures of the last iteration of ``engine``, which has a plan."""
    stats, planned = engine.stats, engine.plan.predicted.iteration_s
    versus = {"step_vs_plan": stats.iteration_s / planned} if planned > 0 else {}
    peaks = {"device_peak_gb": stats.device_peak_bytes / 1e9, "host_peak_gb": stats.host_peak_bytes / 1e9}
    return {"step_s": stats.iteration_s, **versus, **peaks}


def logs_after(trainer: Any, step: int) -> bool:
    """Return whether the Trainer's loggers record the metrics of the step after which ``global_step`` is ``step``."""
    return bool(trainer.log_every_n_steps > 0 and step % trainer.log_every_n_steps == 0)


def tokens_in(batch: Any) -> int:
    """Return the number of tokens in ``batch``: of its ``input_ids`` or its first integer matrix; 0 if it has none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor):
        tensors = (t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.ndim >= 2)
        ids = next((t for t in tensors if not t.is_floating_point() and t.dtype != torch.bool), None)
    return 0 if ids is None else ids.numel()


def add(trainer: Any, namespace: str) -> None:
    """Give ``trainer`` the metrics of this module, before its checkpoints, unless it has them."""
    if any(isinstance(callback, Metrics) for callback in trainer.callbacks):
        return
    # Lightning calls checkpoints last: what is logged after a step is there when they look at it.
    checkpoints = {id(callback) for callback in trainer.checkpoint_callbacks}
    before = next((i for i, c in enumerate(trainer.callbacks) if id(c) in checkpoints), len(trainer.callbacks))
    trainer.callbacks.insert(before, bind(Metrics, namespace, "callbacks.Callback")())
