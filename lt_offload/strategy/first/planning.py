"""The first plan of a run under a Trainer: made within the first step, which trains and is profiled, or before it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.errors import OffloadError, ProcessError, UnsupportedError, because
from lt_offload.execute.device.base import Device
from lt_offload.execute.engine import Engine
from lt_offload.execute.memory.groups import move_rest
from lt_offload.execute.training.passes import Passes
from lt_offload.model.batch import Size
from lt_offload.model.blocks import Structure, as_called
from lt_offload.model.optimizers import with_more
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.orders import choose_parts, compared
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.strategy import replay
from lt_offload.strategy.batch_size import warn_of_change
from lt_offload.strategy.first import sample
from lt_offload.strategy.first.growing import Growth
from lt_offload.strategy.first.sample import SampleBatch
from lt_offload.strategy.first.survey import Carried, FirstIteration, one_list, order_of_sums
from lt_offload.strategy.replan import LEAST_S, Replanning, follow, planning
from lt_offload.strategy.replay import Before
from lt_offload.strategy.several.processes import Processes
from lt_offload.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path


class FirstPlanning(Processes):
    """The part of the strategy that makes the first plan."""

    model: nn.Module | None
    settings: Settings
    plan_path: str | Path | None
    profile: Profile | None
    plan: Plan | None
    engine: Engine | None
    run_before: Before
    """The run that this one goes on with, until there is a plan."""
    _first: tuple[Any, int] | None
    _aside: bool
    """True if the first step is measured on trial."""
    _replanning: Replanning | None
    _device: Device | None
    _watch: ExitStack
    _signature: object

    _step: ExitStack
    """Encloses an iteration."""
    _how: dict[str, Any]
    """Arguments with which the iteration begins."""
    _survey: FirstIteration | None
    """The profiled step, from its forward until there is a plan."""
    _carried: Carried | None
    """The window and budget that step takes over, if there was a plan before it."""
    _padded: bool
    """True if the present batch has padding."""
    _coming: Size
    """Size of the present batch, where there is no plan."""
    _growth: Growth

    if TYPE_CHECKING:
        _module: Any
        _trainer: Any
        micro_batches: Any

        @property
        def _budget(self) -> int: ...
        def _structure(self) -> Structure: ...
        def _close_engine(self) -> None: ...
        def _begin(self, optimizer: Optimizer) -> None: ...
        def _open_device(self, budget: int, threads: int) -> Device: ...

    def _plan_early(self, trainer: Any, why: OffloadError) -> None:
        """Plan before training, as not even forwards fit without a plan: an error then mostly names enough memory.

        A step that needs objects of later hooks is planned with its first batch: there is no engine until then.

        Raises:
            OffloadError: that of planning, or ``why``.
        """
        self._close_engine()
        move_rest(self._module, self._structure(), torch.device("cpu"))
        try:
            self._plan_for(sample.SampleBatch.early(trainer), *self._ready())
        except ProcessError as error:
            raise error from why  # it says what others found, which have left
        except Exception as error:
            self._close_engine()
            if isinstance(error, OffloadError):
                raise

    def _ready(self) -> tuple[Profile | None, int]:
        """Be ready for a step that shows what to plan, whose hooks before it have all been called by now.

        Returns an earlier profile of the machine, and the bytes of the device.
        """
        self._first = None
        # Again: hooks that have run since ``setup`` may have frozen weights, or changed the optimizer.
        limits.check("optimizer", limits.Setup(model=self.model, optimizers=self.optimizers))
        if self.engine is not None:
            self.engine.handover.take_in()
        self._close_engine()
        if self.profile is not None or self._aside:
            gc.collect()  # or what refers to itself in the old engine would seem to hold weights
        self.run_before.warn_of_frozen(self._module)
        budget = min(self.together(lambda: self._budget)) if self._carried is None else self._carried.memory
        return self.profile or self._known_machine(), budget

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """Enclose planning at the first step, or at one after a change: its plan goes on with what that left."""
        carried, self._carried = self._carried, None
        with planning(self._trainer), because(carried.change) if carried is not None else nullcontext():
            yield
        assert self.engine is not None
        self.run_before = Before()
        if carried is not None:
            self.engine.handover.enter_window(carried.window)

    def _plan_first_batch(self) -> None:
        """Measure a step with the first batch on trial, if it does not count, and plan."""
        if self._first is None or self._surveys:
            return
        first, self._growth = self._first, Growth()
        known, budget = self._ready()
        with self._planning():
            self._plan_for(sample.SampleBatch.of(self._trainer, *first), known, budget)

    def _plan_for(self, batch: SampleBatch, known: Profile | None, budget: int) -> None:
        """Measure a step, plan, and be ready for it."""
        (used,) = self.optimizers

        def measure(parts: int, optimizer: Optimizer = used) -> Profile:
            machine = replay.as_measured(known if optimizer is used else self.profile, optimizer)
            return sample.measure(self._trainer, optimizer, batch, **machine, micro_batches=parts)

        self._plan_by(measure, known, budget)
        self._warn_of_unfreezing(measure, budget)
        self._begin(used)

    def _plan_by(self, measure: Callable[[int], Profile], known: Profile | None, budget: int) -> None:
        """Measure a training step and make its plan, or take the saved one.

        Args:
            measure: returns the profile of a step whose batch goes through each block in so many parts.
            known: an earlier profile of the machine.
            budget: bytes of the device.

        Raises:
            ConfigError: if there are fewer samples than ``micro_batches``.
        """

        def profiled(parts: int) -> Profile:
            new = self.one_profile(partial(measure, parts), known=None if known is None else known.hardware)
            return new if known is None else replace(new, contention=known.contention)

        count, path, settings = self.micro_batches, self.plan_path, replace(self.settings, memory=budget)
        if path is not None:
            # In the plan's own number of parts, which the setting may leave open.
            count = replay.load_plan(path, budget, micro_batches=count).parts
        else:
            count = self.run_before.parts(count)
        self.profile = profile = profiled(1 if count == "auto" else count)
        warn_of_change(self.run_before.batch_size, profile.batch_size)
        if path is not None:
            self.plan = replay.replay(path, profile, budget)
            return
        self.plan = self.run_before.own_plan(profile, self.settings, budget)
        if self.plan is not None:
            self._replanning = follow(self.settings, profile)
            return
        in_ram = " (in RAM, beside host_memory: the device is emulated)" if self.root_device.type == "cpu" else ""
        rank_zero_info(f"offmate: planning for {format_bytes(budget)}{in_ram}, {settings.time_limit:g} s at most")
        if count == "auto":
            choice = choose_parts(lambda parts: profile if parts == 1 else profiled(parts), settings)
            self.profile, plan = choice.profile, choice.plan
            self._replanning = follow(self.settings, self.profile)
        else:
            plan = self._make_plan(profile, settings)
        self.plan = self.of_first(partial(compared, plan, self.profile, settings))

    def _make_plan(self, profile: Profile, settings: Settings) -> Plan:
        self._replanning = follow(settings, profile)
        return self.of_first(partial(make_plan, profile, settings))

    def _known_machine(self) -> Profile | None:
        """Return the profile of the run that this one continues, if it holds for all processes."""
        before, machines = self.run_before, {"processes": self.num_processes, "machines": self.num_nodes}
        each = self.together(lambda: before.measured(self.root_device, **machines))
        # The first one's, as the profile that all have then is.
        return each[0] if None not in each else None

    # -- the first step, which shows what to plan --------------------------------------------------------------------

    @property
    def _surveys(self) -> bool:
        """True if the present step is to be profiled."""
        return self.plan is None and self._first is not None and not self._aside

    def _surveyable(self) -> bool:
        """Return whether the coming step may run before there is a plan, and count."""
        # A step that calls other layers trains without a plan: nobody adds up its gradients to those of others.
        adds_up = self.is_distributed or self.settings.accumulate > 1
        return (one_list(self._structure()) or not adds_up) and not sample.wants_larger(self._trainer, self._coming)

    def _outgrown(self, batch: Any) -> str | None:
        """Return the reason why the present plan may have no room for ``batch``; None if it should have."""
        if self.plan is None or self.plan_path is not None or self.is_distributed:
            return None
        return self._growth.outgrown(self.plan, batch, self._padded)

    def _begin_survey(self) -> FirstIteration:
        """Be ready for a step without a plan, whose hooks before it have all been called by now."""
        (optimizer,) = self.optimizers
        structure = self._survey.elsewhere if self._survey is not None else None
        if self.profile is not None:  # candidates that have turned out to be no blocks are called as always
            structure = as_called(self._module, self.profile.blocks)
        known, budget = self._ready()
        before = self._carried.plan if self._carried is not None else None
        self._survey = FirstIteration(
            self.root_device,
            self.settings,
            self._module,
            structure or self._structure(),
            optimizer,
            known,
            partial(self._plan_surveyed, known),
            order=order_of_sums(self.settings, self.micro_batches, self.plan_path, self.run_before, before),
            open_device=lambda threads: self._open_device(budget, threads),
            say=lambda message: rank_zero_info(f"offmate: {message}"),
        )
        self._device = self._survey.device
        self._watch.enter_context(self._survey.watch)
        return self._survey

    def _plan_surveyed(self, known: Profile | None, first: FirstIteration) -> Passes:
        """Plan for the step whose backward has come to the first block, and let the plan's engine go on with that."""
        (optimizer,) = self.optimizers

        def measured(parts: int) -> Profile:
            # With room for larger batches before it.
            return self._growth.add(self._coming, first.measured(self._trainer.global_step + 1, parts), known)

        with self._planning():
            self._plan_by(measured, known, first.device.budget)
            self._warn_of_unfreezing(partial(first.measured, 1), first.device.budget)
            self._begin(optimizer)
            self._survey = None
        assert self.engine is not None
        self._step.enter_context(self.engine.iteration(**self._how))
        first.planned(self.engine.passes)
        return self.engine.passes

    def _warn_of_unfreezing(self, measure: Callable[[int, Optimizer], Profile], budget: int) -> None:
        """Plan once more with all weights that a callback for finetuning may unfreeze, and warn if that will not fit.

        Args:
            measure: returns the profile of a step in so many parts, of all weights that train then.
            budget: bytes of the device.
        """
        before, (optimizer,) = self.profile, self.optimizers
        assert before is not None
        callbacks = [type(callback) for callback in self._trainer.callbacks] if self.plan_path is None else []
        names = [kind.__name__ for kind in callbacks if any(base.__name__ == "BaseFinetuning" for base in kind.__mro__)]
        parameters = self._module.parameters() if names else ()
        frozen = [p for p in parameters if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
        if not frozen:
            return
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            everything = partial(measure, before.parts, with_more(optimizer, frozen))
            profile = replace(self.one_profile(everything, known=before.hardware), contention=before.contention)
            # Only whether there is one matters, and the first one is found at once.
            settings = replace(self.settings, memory=budget, time_limit=min(self.settings.time_limit, LEAST_S))
            self.of_first(partial(make_plan, profile, settings))
        except OffloadError as error:
            rank_zero_warn(
                f"offmate: {names[0]} may unfreeze {len(frozen)} weights while this run trains; once all of them "
                f"train, it ends: {error}"
            )
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _begin_step(self) -> None:
        """Begin the step of the optimizer, for which there may be an engine by now.

        Raises:
            UnsupportedError: if gradients of a window were to be used, and its last step had no loss to plan for.
        """
        if self.plan is not None and self.engine is not None:
            self.engine.passes.begin_step()
        elif self._carried is not None and self._carried.window.added:
            raise UnsupportedError(
                f"{self._carried.change} after {self._carried.window.added} micro-batches, and no training_step of the "
                "window has returned a loss since; change weights at the beginning of a window"
            )

    def _plan_unreached(self) -> None:
        """Plan for a step whose backward is over and has come to no block, as where all of them are frozen."""
        if self._survey is not None and self._survey.elsewhere is None:
            self._survey.plan()

    def _iterate(self, step: ExitStack, **how: Any) -> None:
        """Begin an iteration, which ``step`` encloses, or be ready to begin it when there is a plan."""
        self._how = {"signature": self._signature, **how}
        if self.plan is not None and self.engine is not None:
            step.enter_context(self.engine.iteration(**self._how))
