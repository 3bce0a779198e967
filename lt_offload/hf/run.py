"""The life of a training under a Trainer: which engine runs in its steps and evaluations, what is put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lt_offload.errors import ConfigError
from lt_offload.hf import head, others, report
from lt_offload.hf.step import TrainingStep, aside, without_backward
from lt_offload.hf.training import Training, unwrapped
from lt_offload.machine.replaced import own_attribute
from lt_offload.model.tiles import tiled
from lt_offload.plan.iteration.memory import room_within
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from lt_offload.strategy.checkpoint.interrupts import Interrupts
from lt_offload.strategy.metrics import figures
from lt_offload.strategy.replay import Before

_UNFREEZE = (
    "a Trainer's own optimizer holds the weights that train when train() is called: unfreeze them before, or give all "
    "in optimizers="
)


class Run(Training):
    """The training of a ``trainer``, whose constructor has not been called yet, with the context's ``options``."""

    _beside_open = False

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.trainer = trainer
        self.interrupts = Interrupts()
        self._others: list[nn.Module] = []
        """Models beside the one that is trained."""
        self.trace: Trace | None = None
        """The last iteration of the engine before the present one."""
        self._evaluated: dict[Any, tuple[Any, int]] = {}
        """Data that were evaluated, with the bytes of the device that this took, by what tells them and the way."""
        self._speed = report.Speed()
        self._around = ExitStack()
        """Undoes the surroundings of a training."""

    def _prepared(self, ready: Any, *, evaluates: bool) -> None:
        if evaluates and ready is not self.trainer.model:
            # A reference that is to follow the model is computed with: on a GPU, as in plain PyTorch.
            follows = getattr(self.trainer.args, "sync_ref_model", False)
            self._others.append(ready if follows else others.at_home(ready))

    def _without_backward(self) -> ConfigError:
        return without_backward(self.trainer)

    # -- known by the Trainer ----------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device that blocks run on."""
        device: torch.device = self.trainer.args.device
        return device

    @property
    def _optimizer(self) -> Optimizer:
        return unwrapped(self.trainer.optimizer)

    @property
    def _callbacks(self) -> Sequence[Any]:
        return self.trainer.callback_handler.callbacks  # type: ignore[no-any-return]

    @property
    def _updates_done(self) -> int:
        return int(self.trainer.state.global_step)

    def _folder(self) -> Path | None:
        if self.report_dir is not None:
            return Path(self.report_dir)
        args = self.trainer.args
        return Path(args.output_dir) / report.FOLDER if args.should_save and args.output_dir else None

    def profiled(self, *args: Any, **how: Any) -> Profile:
        """Return the profile of a step on trial, which is the Trainer's own."""
        with aside(self.trainer):
            return super().profiled(*args, run=TrainingStep(self.trainer, self.model), **how)

    # -- training ----------------------------------------------------------------------------------------------------

    @contextmanager
    def training(self) -> Iterator[None]:
        """Enclose a training, also one that fails."""
        self.run_before = Before()
        try:
            self.interrupts.install()
            yield
            if (trace := self._last_trace()) is not None and (folder := self._folder()) is not None:
                report.save_report(folder, trace, self.trainer.state.log_history)
        finally:
            self.interrupts.remove()
            self._close_engine()
            self._around.close()

    def _last_trace(self) -> Trace | None:
        engine = self.engine
        return engine.trace() if engine is not None and engine.recorder.iterations else self.trace

    def begin(self, model: nn.Module) -> None:
        """Take the model of a training that begins."""
        # A Trainer may train more than once, with another model or optimizer.
        self._close_engine()
        self._around.close()
        self._forget_plan(self.run_before)
        self.trace, self._evaluated = None, {}
        self.settings = replace(self.settings, accumulate=self.trainer.args.gradient_accumulation_steps)
        self.model = self.trainer.accelerator.unwrap_model(model)
        self._around.enter_context(tiled(self.model, self.tile_tokens, self.blocks))
        self._around.enter_context(self._beside(self.model))

    def goes_on(self, checkpoint: Path) -> None:
        """Take note of the run whose ``checkpoint`` is about to be loaded, and train what that trained."""
        self._forget_plan(report.read_record(checkpoint, self.say))
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        self.run_before.train_as_before(model, [self._optimizer], _UNFREEZE)

    def expect(self, coming: Sequence[Any]) -> None:
        """Take note of the micro-batches of the ``coming`` update."""
        self._speed.trains(coming)

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Enclose a step on ``batch``, watched if no plan serves; raises ``ConfigError`` if that has no backward."""
        with ExitStack() as around:
            first = self._enter(batch, around)
            yield
        if first is not None and self.plan is None and first.elsewhere is None:
            raise self._without_backward()

    def _install(self, plan: Plan | None, budget: int) -> None:
        super()._install(plan, budget)
        self._speed.restart()

    def show_gradients(self) -> None:
        """Show what the update will use, if a callback looks at it before or after; it is brought to the host."""
        if self.engine is None:
            return
        before, after = map(self._overridden, ("on_pre_optimizer_step", "on_optimizer_step"))
        self.engine.keeps_gradients = after
        if before:
            self.engine.show_clipped()

    def _overridden(self, hook: str) -> bool:
        """Return whether a callback that is no library's has ``hook``."""
        methods = (getattr(callback, hook, None) for callback in self._callbacks)
        return any(not getattr(method, "__module__", "").startswith("transformers.") for method in methods)

    @contextmanager
    def _beside(self, model: nn.Module) -> Iterator[None]:
        """Let the other models run where ``model`` does, and losses call their heads."""
        if self._beside_open:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(head.called(model, self.root_device))
            for other in self._others:
                stack.enter_context(others.computing(other, self.root_device))
            stack.enter_context(own_attribute(self, "_beside_open", True))
            yield

    # -- evaluation --------------------------------------------------------------------------------------------------

    @contextmanager
    def streamed(self, data: Any = None, *way: Any) -> Iterator[None]:
        """Enclose an evaluation of ``data`` in one ``way``: by the engine of the training, or by one for it alone.

        An engine of a plan makes way and comes back afterwards, unless it has room for what the data were seen to take.
        """
        # A Trainer makes new ``datasets`` of columns that the model takes each time: their fingerprint tells them.
        named = getattr(data, "_fingerprint", None)
        key = named or id(data), *way, self.trainer.args.eval_batch_size
        if self.engine is not None and (self.engine.plan is None or self._has_room(key)):
            yield
            return
        plan, window = self.plan, None
        if self.engine is not None:
            self.trace = self._last_trace()
            self.engine.handover.take_in()
            window = self._leave()
        elif self._watched is not None:  # its step is over, and has trained without a plan
            self._close_engine()
        self.model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        try:
            with self._beside(self.model):
                self._install(None, self._budget)
                device = self.present.device
                device.reset_peak()
                before = device.memory()
                try:
                    yield
                    # Kept alive where its identity tells it, which another could have.
                    self._evaluated[key] = None if named else data, int(device.peak_memory() - before)
                finally:
                    self._close_engine()
        finally:  # of one that fails, too: a callback may catch the error, and the training goes on
            if window is not None:
                assert plan is not None
                self._install(plan, plan.budget_bytes)
                self.present.handover.enter_window(window)

    def _has_room(self, key: Any) -> bool:
        """Return whether the plan leaves the memory that such an evaluation has taken before."""
        _, took = self._evaluated.get(key, (None, None))
        assert self.plan is not None and self.profile is not None
        return took is not None and took <= room_within(self.plan.budget_bytes, self.profile) - self.plan.arena_bytes

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Hold an evaluation's step against the budget; an ``OverBudget`` names the settings that help."""
        if self.engine is None:
            yield
            return
        size = self.trainer.args.per_device_eval_batch_size
        smaller = f"a smaller per_device_eval_batch_size (it is {size}), eval_accumulation_steps, or "
        with self._in_memory("an evaluation", smaller), self.engine.inference():
            yield

    def kept(self, outputs: Any) -> Any:
        """Return ``outputs`` of a step as the Trainer keeps them: in RAM, if it was asked to bring them there.

        An emulated device then counts none, and a GPU those of up to ``eval_accumulation_steps`` batches.
        """
        moves = self.engine is not None and self.trainer.args.eval_accumulation_steps is not None
        return self._on_host(outputs) if moves else outputs

    # -- records -----------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Return the metrics of the last iterations."""
        if self.engine is None or self.engine.plan is None or not self.engine.recorder.iterations:
            return {}
        tokens = self.trainer.args.world_size * self._speed.restart()
        return figures(self.engine) | ({"tokens_per_s": tokens} if tokens else {})
