"""The life of a training under a Trainer: when it is planned, which engine there is, what is put back.

There is no plan before the micro-batches of the first update have come: all callbacks before them have been called by
then. A Trainer fetches the batches of an update before it begins, so that a larger one than was planned for, and
weights that were frozen meanwhile, are seen in time: between two updates another engine takes over.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.errors import PlanError, because
from lt_offload.execute.engine import Engine
from lt_offload.hf import batches, head, others, report
from lt_offload.hf.planning import profile_and_plan
from lt_offload.hf.settings import HFSettings
from lt_offload.hf.step import kept
from lt_offload.model.batch import Size, shape
from lt_offload.model.blocks import find_blocks
from lt_offload.plan import Settings
from lt_offload.profiling.hardware import free_memory
from lt_offload.schema.explain import brief, headline
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.session import installed, streamed
from lt_offload.strategy.checkpoint.interrupts import Interrupts
from lt_offload.strategy.replay import Before, record

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_UNFREEZE = (
    "a Trainer's own optimizer holds the weights that train when train() is called: unfreeze them before, or give all "
    "in optimizers="
)


class Run:
    """Carries out the training of a Trainer.

    Args:
        trainer: whose constructor has not been called yet.
        settings: of the context that it is made in.
    """

    def __init__(self, trainer: Any, settings: HFSettings) -> None:
        self.trainer, self.settings = trainer, settings
        self.profile: Profile | None = None
        self.plan: Plan | None = None
        self.engine: Engine | None = None
        """While something is trained or evaluated."""
        self.model: nn.Module
        self.optimizer: Optimizer
        self._loader: Any = None
        self._size = Size(0, 0, False)
        """The size of the largest batch that the plan has room for."""
        self._planned: Any = None
        """The batch that the plan was made for."""
        self.interrupts = Interrupts()
        self._others: list[nn.Module] = []
        """Models beside the one that is trained."""
        self.before = Before()
        """The run that this one goes on with, until there is a plan."""
        self._speed = report.Speed()
        self._beside_open = False
        self._around = ExitStack()
        """Ends what surrounds a training."""
        self._installed = ExitStack()
        """Ends what an engine has put in place."""

    # -- the accelerator ---------------------------------------------------------------------------------------------

    def adapt(self, accelerator: Any) -> None:
        """Let ``accelerator``, which is the Trainer's own, move neither model nor optimizer, and clip as we do."""
        for name in ("prepare_model", "prepare_optimizer"):
            vars(accelerator)[name] = self._in_place(getattr(accelerator, name))
        clip_norm, clip_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_

        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
            # Without a plan nothing is trained by the engine, and gradients are where torch looks for them.
            if self.engine is None or self.engine.plan is None:
                found: Tensor = clip_norm(parameters, max_norm, norm_type)
                return found
            return self.engine.clip_grad_norm_(max_norm, norm_type, parameters=list(_listed(parameters)))

        def clip_grad_value_(parameters: Any, value: float) -> None:
            if self.engine is None or self.engine.plan is None:
                clip_value(parameters, value)
            else:
                self.engine.clip_grad_value_(value)

        vars(accelerator).update(clip_grad_norm_=clip_grad_norm_, clip_grad_value_=clip_grad_value_)

    def _in_place(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``prepare`` of an accelerator, which moves what it is given unless it is told not to."""

        def prepared(thing: Any, device_placement: bool | None = None, **options: Any) -> Any:
            found = prepare(thing, device_placement=False, **options)
            if isinstance(found, nn.Module) and options.get("evaluation_mode") and thing is not self.trainer.model:
                # A reference that is to follow the model is computed with: on a GPU, as in plain PyTorch.
                follows = getattr(self.trainer.args, "sync_ref_model", False)
                self._others.append(found if follows else others.at_home(found))
            return found

        return prepared

    @property
    def device(self) -> torch.device:
        """Where blocks run."""
        device: torch.device = self.trainer.args.device
        return device

    @property
    def _budget(self) -> int:
        return self.settings.device.resolved(lambda: free_memory(self.device))

    # -- training ----------------------------------------------------------------------------------------------------

    @contextmanager
    def training(self) -> Iterator[None]:
        """Enclose a training, whatever becomes of it."""
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
        self.plan = self.profile = None
        self._size = Size(0, 0, False)
        self.model, self._loader = self.trainer.accelerator.unwrap_model(model), loader
        self.optimizer = self._innermost_optimizer()
        self._around.enter_context(self._beside(self.model))

    def _innermost_optimizer(self) -> Optimizer:
        """Return the optimizer itself: accelerate wraps it, and others may have wrapped it before."""
        found: Any = self.trainer.optimizer
        while hasattr(found, "optimizer"):
            found = found.optimizer
        optimizer: Optimizer = found
        return optimizer

    def goes_on(self, checkpoint: Path) -> None:
        """Take note of the run whose ``checkpoint`` is about to be loaded, and train what that trained."""
        self.before = report.read_record(checkpoint)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        self.before.train_as_before(model, [self._innermost_optimizer()], _UNFREEZE)

    def save_record(self, checkpoint: Path) -> None:
        """Note in the folder of a checkpoint how this run trains."""
        if self.plan is not None:
            found = record(self.model, self.profile, self.plan, self.planning)
            report.save_record(checkpoint, found)

    @property
    def planning(self) -> Settings:
        """The settings of plans."""
        return self.settings.planning(self.trainer.args.gradient_accumulation_steps)

    def expect(self, coming: Sequence[Any]) -> None:
        """Plan for the micro-batches of the update that is ``coming``, unless the present plan serves."""
        if not coming:
            return
        largest = max(coming, key=Size.of)
        self._speed.trains(coming)
        if self.plan is None:
            self._plan_for(batches.largest(self.trainer, self._loader, largest, self.settings.sample_batch))
            return
        assert self.engine is not None
        change = self.engine.handover.changed(self.optimizer)
        if change is None and all(map(self._size.covers, coming)):
            return
        why = change or f"a batch of {shape(largest)} comes, and none as large was planned for"
        if self.settings.plan is not None:
            raise PlanError(f"{why}; leave plan={str(self.settings.plan)!r} out")
        report.say(f"{why}: the run is planned again")
        with because(why):
            self._plan_for(max([largest, self._planned], key=Size.of))

    def show_gradients(self) -> None:
        """Show what the update will use, if a callback looks at it before or after; it is brought to the host."""
        assert self.engine is not None
        before, after = map(self._overridden, ("on_pre_optimizer_step", "on_optimizer_step"))
        self.engine.keeps_gradients = after
        if before:
            self.engine.window_gradients.show_clipped()

    def _overridden(self, hook: str) -> bool:
        """Return whether a callback that is no library's has ``hook``."""
        methods = (getattr(callback, hook, None) for callback in self.trainer.callback_handler.callbacks)
        return any(not getattr(method, "__module__", "").startswith("transformers.") for method in methods)

    def _plan_for(self, batch: Any) -> None:
        """Measure a step with ``batch``, plan, and let the engine of that plan take over."""
        again = self.plan is not None
        self.before.warn_of_frozen(self.model)
        self._close()
        gc.collect()  # or what refers to itself in the old engine would seem to hold weights
        with kept(self.trainer):
            self.profile, self.plan, structure = profile_and_plan(self, batch, self._budget)
        self.before = Before()
        self._size = self._size.beside(Size.of(batch))
        self._planned = batches.on_host(batch)
        report.save_plan(self)
        report.say(headline(self.plan) if again else brief(self.plan))
        self.engine = self._installed.enter_context(
            installed(self.model, self.optimizer, self.plan, structure, self.device)
        )
        self._speed.restart()

    def _close(self) -> None:
        self.engine = None
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
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        structure = find_blocks(model, self.settings.blocks)
        with self._beside(model), streamed(model, budget or self._budget, structure, self.device) as engine:
            self.engine = engine
            try:
                yield engine
            finally:
                self.engine = None

    def inference(self) -> AbstractContextManager[None]:
        """Return what holds the memory of a step of an evaluation against the budget."""
        return self.engine.inference() if self.engine is not None else nullcontext()

    # -- records -----------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Return what the last iterations took."""
        if self.engine is None or self.engine.plan is None or not self.engine.recorder.iterations:
            return {}
        return report.figures(self.engine, self._speed, self.trainer.args.world_size)


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
