"""A training with accelerate: an accelerator that leaves weights where they are, and steps that show what to plan."""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lt_offload.errors import ConfigError
from lt_offload.execute.engine import Engine
from lt_offload.execute.training.passes import Passes
from lt_offload.hf import report
from lt_offload.hf.step import at_backward
from lt_offload.machine.dispatch import DISPATCH_MODES
from lt_offload.machine.driver import current
from lt_offload.model.batch import Size
from lt_offload.model.calls import plainly
from lt_offload.profiling.hardware import check_host_memory, check_memory
from lt_offload.replacing import save_text
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.session import installed, prepare
from lt_offload.strategy.first.planning import Planning
from lt_offload.strategy.first.survey import FirstIteration
from lt_offload.strategy.replay import load_plan, record


class Training(Planning):
    """The training of a model by an optimizer that accelerate wraps, with the ``options`` of its context."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.settings = replace(self.settings, delayed=True)
        self.model: Any = None
        self._sample_batch = options["sample_batch"]

    @property
    def _module(self) -> Any:
        return self.model

    def show(self, text: str) -> None:
        """Print ``text`` for the user, as the Trainer prints its losses."""
        print(text, file=sys.stderr, flush=True)

    def _trial(self, batch: Any, number: int) -> tuple[Size, Callable[..., Profile]]:
        batch = batch if self._sample_batch is None else self._sample_batch
        return Size.of(batch), partial(self.profiled, batch, structure=self._structure())

    def _wants_larger(self, size: Size) -> bool:
        wanted = self._sample_batch
        return wanted is not None and self.plan_path is None and size.ratio(Size.of(wanted)) > 1

    @abstractmethod
    def _without_backward(self) -> ConfigError:
        """Return the error of a step in which no backward was seen."""

    def _stepped(self, error: BaseException | None) -> None:
        """Be told that the backward of a step that was watched is over, or has failed with ``error``."""

    # -- the accelerator ---------------------------------------------------------------------------------------------

    def adapt(self, accelerator: Any) -> None:
        """Let ``accelerator`` move neither models that train nor their optimizers, and clip as we do."""
        for name in ("prepare_model", "prepare_optimizer"):
            vars(accelerator)[name] = self._in_place(getattr(accelerator, name))
        clip_norm, clip_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_

        def clipping(parameters: Any) -> tuple[list[Tensor], Engine | None]:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            # The engine clips complete sums of all weights. Those of some, or of a window that goes on, are where torch
            # looks for them; so are all where there is no plan, and nothing is trained by the engine.
            engine = self.engine if accelerator.sync_gradients else None
            trained = {parameter for parameter in self.model.parameters() if parameter.requires_grad}
            all_of_plan = engine is not None and engine.plan is not None and trained <= set(listed)
            if all_of_plan:
                accelerator.unscale_gradients()
            return listed, engine if all_of_plan else None

        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
            listed, engine = clipping(parameters)
            norm: Tensor = (
                clip_norm(listed, max_norm, norm_type)
                if engine is None
                else engine.clip_grad_norm_(max_norm, norm_type, parameters=listed)
            )
            return norm

        def clip_grad_value_(parameters: Any, value: float) -> None:
            listed, engine = clipping(parameters)
            if engine is None:
                clip_value(listed, value)
            else:
                engine.clip_grad_value_(value)

        vars(accelerator).update(clip_grad_norm_=clip_grad_norm_, clip_grad_value_=clip_grad_value_)

    def _in_place(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``prepare`` of an accelerator without its move to the device."""

        def prepared(thing: Any, device_placement: bool | None = None, **options: Any) -> Any:
            ready = prepare(thing, device_placement=device_placement if self._moves(thing) else False, **options)
            self._prepared(ready, evaluates=options.get("evaluation_mode", False))
            return ready

        return prepared

    def _moves(self, thing: Any) -> bool:
        """Return whether a model or an optimizer is the accelerator's to move."""
        return False

    def _prepared(self, ready: Any, *, evaluates: bool) -> None:
        """Take note of a model or optimizer that the accelerator has prepared; ``evaluates``: only to compute with."""

    # -- a step ------------------------------------------------------------------------------------------------------

    def _enter(self, batch: Any, around: ExitStack) -> FirstIteration | None:
        """Begin a training step on ``batch``; return what watches it, if there is no plan that serves.

        ``around`` ends the watching, which goes on until a backward has run.
        """
        if self.plan is None and self.profile is None:
            check_memory(self.settings.device.nbytes, self.root_device)
            check_host_memory(self.settings.host.nbytes)
            prepare(self.model, self._optimizer, blocks=self.blocks, accelerator=str(self.root_device))
            if self.plan_path is not None:
                load_plan(self.plan_path, self._budget, micro_batches=self.micro_batches)
        self.comes(batch)
        self._plan_on_trial()
        if not self._watches:
            return None
        first = self._watch()
        forward = around.enter_context(ExitStack())
        returned = forward.enter_context(first.forward(batch))
        height = DISPATCH_MODES.size()

        def run(loss: Tensor, backward: Callable[[], None]) -> None:
            try:
                # Modes that the step has put on top since are the user's.
                with DISPATCH_MODES.cut(height):
                    returned(loss)
                    forward.close()
                with first.backward():
                    backward()
                self._plan_unreached()
            except BaseException as error:
                self._stepped(error)
                raise
            self._stepped(None)

        around.enter_context(at_backward(run))
        return first

    def _watch(self) -> FirstIteration:
        first = super()._watch()
        self._installed.enter_context(current(self.root_device))
        self._installed.enter_context(plainly(self.model))
        return first

    def _plan_watched(self, known: Profile | None, first: FirstIteration) -> Passes:
        if not first.over:
            raise self._without_backward()
        return super()._plan_watched(known, first)

    def _replayed(self, path: str | Path, profile: Profile, budget: int) -> Plan:
        return load_plan(path, budget)  # the first batch may be smaller than the one that it was made for

    def _begin(self) -> None:
        self._replanning = None  # nothing corrects a plan outside Lightning, and nothing must promise that
        super()._begin()

    def _install(self, plan: Plan | None, budget: int) -> None:
        if plan is None:
            super()._install(plan, budget)
            return
        first, structure = self._watched, self._structure()
        context = installed(self.model, self._optimizer, plan, structure, self.root_device, first)
        self.engine = self._installed.enter_context(context)
        self._watched = None

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_record(self, checkpoint: Path) -> None:
        """Note in the folder of a checkpoint how this run trains."""
        if self.plan is not None:
            about = record(self.model, self.profile, self.plan, self.settings, self.growth.sizes)
            save_text(checkpoint / report.RECORD, json.dumps(about))


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer within accelerate's wrapper, and within those that others may have put before."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner: Optimizer = optimizer
    return inner
