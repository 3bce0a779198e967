"""The life of a training under a Trainer: when it is planned, which engine runs, what is put back.

The first training step counts and is profiled: when its backward comes to the first block, the plan's engine takes
over. A later step is profiled, too, if its batch is larger than planned for, or if weights were frozen before it. A
step that has to be measured on trial instead runs before an update begins, with the largest of its micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.errors import because
from lt_offload.execute import open_device
from lt_offload.execute.engine import Engine
from lt_offload.execute.training.passes import Passes
from lt_offload.execute.updates.window import CarriedWindow
from lt_offload.hf import batches, evaluation, head, others, report
from lt_offload.hf.planning import plan_aside, prepared, profile_and_plan, saved_plan
from lt_offload.hf.settings import HFSettings
from lt_offload.hf.step import at_backward, kept, without_backward
from lt_offload.machine.dispatch import DISPATCH_MODES
from lt_offload.machine.driver import current
from lt_offload.model.batch import Size
from lt_offload.model.blocks import Structure, as_called, find_blocks
from lt_offload.model.calls import plainly
from lt_offload.plan import Settings
from lt_offload.profiling.hardware import free_memory
from lt_offload.schema.explain import brief, headline
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.session import installed, streamed
from lt_offload.strategy.checkpoint.interrupts import Interrupts
from lt_offload.strategy.first.growing import Growth
from lt_offload.strategy.first.survey import FirstIteration, one_list, order_of_sums
from lt_offload.strategy.replay import Before, check_no_plan, record

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_UNFREEZE = (
    "a Trainer's own optimizer holds the weights that train when train() is called: unfreeze them before, or give all "
    "in optimizers="
)


class Run:
    """The training of a ``trainer``, whose constructor has not been called yet, with the context's ``settings``."""

    def __init__(self, trainer: Any, settings: HFSettings) -> None:
        self.trainer, self.settings = trainer, settings
        self.profile: Profile | None = None
        self.plan: Plan | None = None
        self.engine: Engine | None = None
        """The engine while something is trained or evaluated."""
        self.model: nn.Module
        self.optimizer: Optimizer
        self.evaluated = 0
        """Bytes of the device that evaluations while training take."""
        self._loader: Any = None
        self._structure: Structure | None = None
        """The candidates for the model's blocks; None before the first batch."""
        self._aside = False
        """True if steps are measured on trial, and not while they train."""
        self._first: FirstIteration | None = None
        """The step that is being profiled, until there is a plan."""
        self.growth = Growth()
        self._planned: Any = None
        """The batch that was measured on trial."""
        self.interrupts = Interrupts()
        self._others: list[nn.Module] = []
        """Models beside the one that is trained."""
        self.before = Before()
        """The run that this one goes on with, until there is a plan."""
        self._speed = report.Speed()
        self._beside_open = False
        self._around = ExitStack()
        """Undoes the surroundings of a training."""
        self._installed = ExitStack()
        """Undoes the installation of an engine."""

    # -- the accelerator ---------------------------------------------------------------------------------------------

    def adapt(self, accelerator: Any) -> None:
        """Let ``accelerator``, which is the Trainer's own, move neither model nor optimizer, and clip as we do."""
        for name in ("prepare_model", "prepare_optimizer"):
            vars(accelerator)[name] = self._in_place(getattr(accelerator, name))
        clip_norm, clip_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_

        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
            # Without a plan nothing is trained by the engine, and gradients are where torch looks for them.
            if self.engine is None or self.engine.plan is None:
                norm: Tensor = clip_norm(parameters, max_norm, norm_type)
                return norm
            return self.engine.clip_grad_norm_(max_norm, norm_type, parameters=list(_listed(parameters)))

        def clip_grad_value_(parameters: Any, value: float) -> None:
            if self.engine is None or self.engine.plan is None:
                clip_value(parameters, value)
            else:
                self.engine.clip_grad_value_(value)

        vars(accelerator).update(clip_grad_norm_=clip_grad_norm_, clip_grad_value_=clip_grad_value_)

    def _in_place(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``prepare`` of an accelerator without its move to the device."""

        def prepared(thing: Any, device_placement: bool | None = None, **options: Any) -> Any:
            ready = prepare(thing, device_placement=False, **options)
            if isinstance(ready, nn.Module) and options.get("evaluation_mode") and thing is not self.trainer.model:
                # A reference that is to follow the model is computed with: on a GPU, as in plain PyTorch.
                follows = getattr(self.trainer.args, "sync_ref_model", False)
                self._others.append(ready if follows else others.at_home(ready))
            return ready

        return prepared

    @property
    def device(self) -> torch.device:
        """The device that blocks run on."""
        device: torch.device = self.trainer.args.device
        return device

    @property
    def budget(self) -> int:
        """Device bytes that may be taken now."""
        return self.settings.device.resolved(lambda: free_memory(self.device))

    # -- training ----------------------------------------------------------------------------------------------------

    @contextmanager
    def training(self) -> Iterator[None]:
        """Enclose a training, also one that fails."""
        self.before = Before()
        try:
            self.interrupts.install()
            yield
            if self.engine is not None:
                report.save_report(self, self.engine)
        finally:
            self.interrupts.remove()
            self._close()
            self._around.close()

    def begin(self, model: nn.Module, loader: Any) -> None:
        """Take model, optimizer and data of a training that begins."""
        # A Trainer may train more than once, with another model or optimizer.
        self._close()
        self._around.close()
        self.plan = self.profile = self._structure = None
        self.growth, self.evaluated = Growth(self.before.shown), 0
        self.model, self._loader = self.trainer.accelerator.unwrap_model(model), loader
        self.optimizer = self._innermost_optimizer()
        self._around.enter_context(self._beside(self.model))

    def _innermost_optimizer(self) -> Optimizer:
        """Return the optimizer itself: accelerate wraps it, and others may have wrapped it before."""
        wrapper: Any = self.trainer.optimizer
        while hasattr(wrapper, "optimizer"):
            wrapper = wrapper.optimizer
        optimizer: Optimizer = wrapper
        return optimizer

    def goes_on(self, checkpoint: Path) -> None:
        """Take note of the run whose ``checkpoint`` is about to be loaded, and train what that trained."""
        self.before = report.read_record(checkpoint)
        self.growth = Growth(self.before.shown)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        self.before.train_as_before(model, [self._innermost_optimizer()], _UNFREEZE)

    def save_record(self, checkpoint: Path) -> None:
        """Note in the folder of a checkpoint how this run trains."""
        if self.plan is not None:
            about = record(self.model, self.profile, self.plan, self.planning, self.growth.sizes)
            report.save_record(checkpoint, about)

    @property
    def planning(self) -> Settings:
        """The settings of plans."""
        return self.settings.planning(self.trainer.args.gradient_accumulation_steps)

    def known(self) -> Profile | None:
        """Return an earlier profile: measuring the machine anew takes RAM that a resumed run's states have by now."""
        return self.profile or self.before.measured(self.device, processes=1, machines=1)

    def expect(self, coming: Sequence[Any]) -> None:
        """Be ready for the micro-batches of the ``coming`` update; the first of them may be profiled to plan."""
        if not coming:
            return
        self._speed.trains(coming)
        if self._structure is None:
            self._prepare(coming[0])
        if not self._aside:
            return
        largest = max(coming, key=Size.of)
        if self.plan is None:
            self._plan_aside(batches.largest(self.trainer, self._loader, largest, self.settings.sample_batch))
        elif (why := self._outdated(coming)) is not None:
            with because(why):
                self._plan_aside(max([largest, self._planned], key=Size.of), why)

    def _prepare(self, first: Any) -> None:
        """Find the blocks and how to plan, before the first training step; its ``first`` batch has come."""
        structure, settings = prepared(self), self.settings
        self._structure = structure
        larger = settings.sample_batch is not None and Size.of(first).ratio(Size.of(settings.sample_batch)) > 1
        # A step that calls other layers trains without a plan, by which nobody adds up micro-batches.
        alone = one_list(structure) or self.planning.accumulate == 1
        self._aside = (larger and settings.plan is None) or not alone
        if settings.plan is None:
            self.evaluated = evaluation.device_bytes(self)
        else:
            saved_plan(self)  # refused before anything is trained

    def _outdated(self, coming: Sequence[Any]) -> str | None:
        """Return the reason why the present plan does not serve the ``coming`` micro-batches; None if it does."""
        assert self.engine is not None and self.plan is not None
        change = self.engine.handover.changed(self.optimizer)
        if self.settings.plan is not None:
            if change is not None:
                check_no_plan(self.settings.plan, change)
            return None
        if change is not None:
            self.growth = Growth()
        return change or next(filter(None, (self.growth.outgrown(self.plan, batch) for batch in coming)), None)

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Enclose a training step on ``batch``; it is profiled if there is no plan that serves.

        Raises:
            ConfigError: if it is profiled and has no backward.
        """
        why = self._outdated([batch]) if self.plan is not None and not self._aside else None
        if self._aside or (self.plan is not None and why is None):
            yield
            return
        first = self._begin_survey(batch, why)
        with ExitStack() as forward:
            returned = forward.enter_context(first.forward(batch))
            height = DISPATCH_MODES.size()

            def run(loss: Tensor, backward: Callable[[], None]) -> None:
                # Modes that the step has put on top since are the user's.
                with DISPATCH_MODES.cut(height):
                    returned(loss)
                    forward.close()
                with first.backward():
                    backward()
                if self._first is not None and first.elsewhere is None:
                    first.plan()  # it has come to no block, as where all of them are frozen

            with at_backward(run):
                yield
        if first.elsewhere is not None:  # it has trained without a plan
            self._structure = first.elsewhere
        elif self._first is not None:
            raise without_backward(self.trainer)

    def show_gradients(self) -> None:
        """Show what the update will use, if a callback looks at it before or after; it is brought to the host."""
        if self.engine is None:
            return
        before, after = map(self._overridden, ("on_pre_optimizer_step", "on_optimizer_step"))
        self.engine.keeps_gradients = after
        if before:
            self.engine.window_gradients.show_clipped()

    def _overridden(self, hook: str) -> bool:
        """Return whether a callback that is no library's has ``hook``."""
        methods = (getattr(callback, hook, None) for callback in self.trainer.callback_handler.callbacks)
        return any(not getattr(method, "__module__", "").startswith("transformers.") for method in methods)

    def _leave(self, why: str | None) -> CarriedWindow | None:
        """Close the engine, if there is one; return the window that the next engine continues."""
        engine, window = self.engine, None
        if engine is not None:
            report.say(f"{why}: the run is planned again")
            engine.handover.take_in()
            window = engine.handover.leave_window(self.optimizer)
        del engine
        self._close()
        gc.collect()  # or what refers to itself in the old engine would seem to hold weights
        self.before.warn_of_frozen(self.model)
        limits.check("optimizer", limits.Setup(model=self.model, optimizers=[self.optimizer]))
        return window

    def _plan_aside(self, batch: Any, why: str | None = None) -> None:
        """Measure a step with ``batch`` on trial, plan, and let the engine of that plan take over."""
        assert self._structure is not None
        window, size = self._leave(why), Size.of(batch)
        with kept(self.trainer):
            self.profile, plan, structure = plan_aside(self, self._structure, batch)
        self._planned = batches.on_host(batch)
        self.growth.sizes = [size]
        self._install(plan, structure, window)

    def _begin_survey(self, batch: Any, why: str | None) -> FirstIteration:
        """Be ready for a step without a plan, for the reason ``why`` if there was one."""
        window, size, known, budget = self._leave(why), Size.of(batch), self.known(), self.budget
        if window is not None:
            for param, gradient in window.rest.items():
                param.grad = gradient
            window = replace(window, rest={})

        def plan(first: FirstIteration) -> Passes:
            if not first.over:
                raise without_backward(self.trainer)

            def measured(parts: int) -> Profile:
                return self.growth.add(size, first.measured(self.trainer.state.global_step + 1, parts), known)

            with because(why) if why is not None else nullcontext():
                if self.settings.plan is None:
                    self.profile, plan, structure = profile_and_plan(self, measured, known, budget)
                else:
                    plan, structure = saved_plan(self), first.step.reached().structure
            passes = self._install(plan, structure, window, first).passes
            first.planned(passes)
            return passes

        assert self._structure is not None
        self._installed.enter_context(current(self.device))
        self._installed.enter_context(plainly(self.model))
        self._first = FirstIteration(
            self.device,
            self.planning,
            self.model,
            self._structure if self.profile is None else as_called(self.model, self.profile.blocks),
            self.optimizer,
            known,
            plan,
            order=order_of_sums(self.planning, self.settings.micro_batches, self.settings.plan, self.before, self.plan),
            open_device=lambda threads: open_device(budget, str(self.device), host_threads=threads or None),
            say=report.say,
        )
        return self._first

    def _install(
        self, plan: Plan, structure: Structure, window: CarriedWindow | None, first: FirstIteration | None = None
    ) -> Engine:
        """Let the engine of ``plan`` take over, in a ``window`` that has begun; from a ``first`` step that counts."""
        again, self.plan = self.plan is not None, plan
        self.before = Before()
        report.save_plan(self)
        report.say(headline(plan) if again else brief(plan))
        self.engine = self._installed.enter_context(
            installed(self.model, self.optimizer, plan, structure, self.device, first)
        )
        self._first = None
        if window is not None:
            self.engine.handover.enter_window(window)
        self._speed.restart()
        return self.engine

    def _close(self) -> None:
        first, self._first, self.engine = self._first, None, None
        try:
            if first is not None:
                first.close()
        finally:
            self._installed.close()

    @contextmanager
    def _beside(self, model: nn.Module) -> Iterator[None]:
        """Let the other models run where ``model`` does, and losses call their heads."""
        if self._beside_open:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(head.called(model, self.device))
            for other in self._others:
                stack.enter_context(others.computing(other, self.device))
            self._beside_open = True
            try:
                yield
            finally:
                self._beside_open = False

    # -- evaluation --------------------------------------------------------------------------------------------------

    @contextmanager
    def streamed(self, budget: int | None = None) -> Iterator[Engine]:
        """Enclose an evaluation; where nothing is trained, there is an engine for it alone, with ``budget`` bytes."""
        if self.engine is not None:
            yield self.engine
            return
        if self._first is not None:  # its step is over, and has trained without a plan
            self._close()
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        structure = find_blocks(model, self.settings.blocks)
        with self._beside(model), streamed(model, budget or self.budget, structure, self.device) as engine:
            self.engine = engine
            try:
                yield engine
            finally:
                self.engine = None

    def inference(self) -> AbstractContextManager[None]:
        """Return a context that holds the memory of an evaluation's step against the budget."""
        return self.engine.inference() if self.engine is not None else nullcontext()

    # -- records -----------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Return the metrics of the last iterations."""
        if self.engine is None or self.engine.plan is None or not self.engine.recorder.iterations:
            return {}
        return report.figures(self.engine, self._speed, self.trainer.args.world_size)


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
