"""The life of a training's plan under a Trainer, of Lightning's or of transformers'.

Before the first step there is no plan, and there is none after a change that a plan cannot follow: a larger batch, or
other weights that train. Then the coming step is watched: it trains, and is measured on its way. When its backward
comes to the first block there is a profile and a plan, whose engine goes on with that backward. A step that cannot be
watched, or that is to be planned for with a larger batch than its own, is run on trial before.
"""

from __future__ import annotations

import gc
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.compat.torch import DisableTorchDispatch
from lt_offload.distributed.merge import largest
from lt_offload.errors import OffloadError, OverBudget, PlanError, UnsupportedError, because
from lt_offload.execute.engine import Engine
from lt_offload.execute.installed import install
from lt_offload.execute.training.passes import Passes
from lt_offload.execute.updates.window import CarriedWindow
from lt_offload.execute.user_code.logits import LossInBlock
from lt_offload.model.batch import Size, shape
from lt_offload.model.blocks import Structure, as_called, find_blocks
from lt_offload.model.optimizers import with_more
from lt_offload.model.parts import check_micro_batches, extent
from lt_offload.model.tiles import check_tile_tokens
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.batch.choose import choose_parts
from lt_offload.plan.orders import compared
from lt_offload.profiling.hardware import free_memory
from lt_offload.schema.explain import brief
from lt_offload.schema.files import from_json
from lt_offload.schema.plan import PLAN_SCHEMA, Plan
from lt_offload.schema.profile import Profile
from lt_offload.strategy import replay
from lt_offload.strategy.first.survey import FirstIteration, early_loss
from lt_offload.strategy.replan import LEAST_S, Replanning, follow, planning
from lt_offload.strategy.replay import Before
from lt_offload.strategy.several.processes import Processes
from lt_offload.units import Budget, format_bytes

Measure = Callable[..., Profile]
"""A function of the parts of a batch, and perhaps of an optimizer other than the training's, that returns a profile."""
_BUSY = 0.1
"""Scatter of measurements above which the user is told."""


@dataclass(frozen=True, slots=True)
class Carried:
    """The state that an engine leaves for the engine of the next plan."""

    window: CarriedWindow
    memory: int
    """Bytes of the device."""
    plan: Plan
    change: str
    """The reason for another plan."""


class Growth:
    """The sizes of batches that there is room for: a step with each of them, or a larger one, was profiled."""

    def __init__(self, sizes: Iterable[Size] = ()) -> None:
        self.sizes = [*sizes]
        """Profiled sizes; two of them need not cover a batch that is as long as the one and padded as the other."""

    def add(self, size: Size, profile: Profile, before: Profile | None) -> Profile:
        """Return the profile to plan for, with room for all batches so far.

        ``before`` is the one that was planned for until now, perhaps in an earlier run.
        """
        kinds = [one and (one.fingerprint, one.parts, one.tile_tokens) for one in (before, profile)]
        if not self.sizes or before is None or kinds[0] != kinds[1]:
            self.sizes = [size]
            return profile
        self.sizes.append(size)
        return largest([before, profile])

    def outgrown(self, plan: Plan, batch: object, padded: bool | None = None) -> str | None:
        """Return the reason why ``plan`` may have no room for ``batch``; None if it should have."""
        size, predicted = Size.of(batch, padded), plan.predicted
        ratio = min((known.ratio(size) for known in self.sizes), default=1.0)
        if ratio <= 1 or (
            math.isfinite(ratio)
            and predicted.device_peak_bytes * ratio <= plan.budget_bytes
            and predicted.host_peak_bytes * ratio <= plan.host_budget_bytes
        ):
            return None
        return f"a batch of {shape(batch)} comes, and none as large was planned for"


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Return the settings of plans among the ``options`` of a strategy or ``hf_trainer``, all checked."""
    check_micro_batches(options["micro_batches"], auto=True)
    check_tile_tokens(options["tile_tokens"])
    budgets = {name: Budget.of(options[name], setting=name) for name in ("memory", "host_memory")}
    return Settings.among({**options, **budgets})


class Planning(Processes):
    """A training with its plan, its engine, and the changes from one to another."""

    model: Any
    settings: Settings
    """The settings of plans; budgets that the user left out are not resolved yet."""
    explain = False
    """True if the whole plan is shown before training, and not just one paragraph about it."""
    _aside = False
    """True if the coming step is measured on trial."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = settings_of(options)
        self.micro_batches: int | Literal["auto"] = options["micro_batches"]
        self.tile_tokens: int | None = options["tile_tokens"]
        self.blocks: str | None = options["blocks"]
        self.plan_path: str | Path | None = options["plan"]
        self.report_dir: str | Path | None = options["report_dir"]
        self.engine: Engine | None = None
        """The engine while something is trained or evaluated."""
        self._installed = ExitStack()
        """Removes the engine, and what is around it."""
        self._forget_plan(Before())

    def _forget_plan(self, before: Before) -> None:
        """Begin a training, which goes on with the run ``before``."""
        self.profile: Profile | None = None
        """The profile of the first batch, made together with ``plan``; ``batch_size="auto"`` makes both earlier."""
        self.plan: Plan | None = None
        self.run_before = before
        """The run that this one goes on with, until there is a plan."""
        self.growth = Growth(before.shown)
        self._first: tuple[Any, int] | None = None
        """The batch of the coming step and its number, where there is no plan."""
        self._coming = Size(0, 0, False)
        self._watched: FirstIteration | None = None
        """The step that is watched, from its forward until there is a plan."""
        self._elsewhere: Structure | None = None
        """Candidates for the model's blocks, after a step has called none of the layers that were taken for them."""
        self._carried: Carried | None = None
        """The window and budget that the coming step takes over, if there was a plan before it."""
        self._replanning: Replanning | None = None
        """The correction of the plan by the first iterations, present until it is over."""

    # -- known by the Trainer ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _module(self) -> Any:
        """The model."""

    @property
    @abstractmethod
    def _optimizer(self) -> Optimizer:
        """The optimizer of the training."""

    @property
    @abstractmethod
    def _callbacks(self) -> Sequence[Any]:
        """The Trainer's callbacks."""

    @property
    @abstractmethod
    def _updates_done(self) -> int:
        """Number of updates so far."""

    @abstractmethod
    def show(self, text: str) -> None:
        """Show ``text`` to the user."""

    @abstractmethod
    def _folder(self) -> Path | None:
        """Return the folder for records, None if the run keeps nothing."""

    @abstractmethod
    def _wants_larger(self, size: Size) -> bool:
        """Return whether a batch is given that is larger than ``size``, and is to be planned for."""

    @abstractmethod
    def _trial(self, batch: Any, number: int) -> tuple[Size, Callable[..., Profile]]:
        """Return the size of the batch to plan for, and a function that measures a step with it on trial."""

    def profiled(self, batch: Any, parts: int, optimizer: Optimizer, known: Mapping[str, Any], **how: Any) -> Profile:
        """Return the profile of a step with ``batch`` in so many ``parts``, run on trial.

        ``known``: earlier measurements of the machine. ``how``: further arguments of :func:`lt_offload.profile`.
        """
        from lt_offload.profiling.measure import profile

        device = self.root_device
        loss = partial(early_loss, tokens=math.prod(extent(batch)), budget=self._budget, device=device)
        options = {"optimizer": optimizer, "micro_batches": parts, "loss": loss, **known, **how}
        return profile(self._module, batch, device=device, **options)

    def _goes_on(self) -> None:
        """Be in the iteration of the step that was watched; the plan's engine has taken over."""

    def say(self, sentence: str) -> None:
        """Say ``sentence`` to the user."""
        self.show(f"offmate: {sentence}")

    @property
    def present(self) -> Engine:
        """The engine that is installed."""
        assert self.engine is not None
        return self.engine

    @property
    def _budget(self) -> int:
        # Emulated devices of a machine share its RAM.
        parts = self.num_processes if self.root_device.type == "cpu" else 1
        return self.settings.device.resolved(lambda: free_memory(self.root_device) // parts)

    @contextmanager
    def _in_memory(self, what: str, or_else: str = "") -> Iterator[None]:
        """Let errors for want of device memory say ``what`` needs it, with the setting and its value.

        ``or_else``: other settings that help.
        """
        try:
            yield
        except (OverBudget, torch.OutOfMemoryError) as error:
            memory = format_bytes(self.engine.device.budget if self.engine is not None else self._budget)
            raise OverBudget(
                f"{what} needs more than memory={memory}: set {or_else}memory= to more ({error})"
            ) from error

    def _on_host(self, outputs: Any) -> Any:
        """Return ``outputs``, which a Trainer is about to keep in RAM: an emulated device does not count them."""
        if self.root_device.type != "cpu":
            return outputs
        with DisableTorchDispatch():  # what is made from device memory would be counted there
            return apply_to_collection(outputs, Tensor, torch.clone)

    def _structure(self) -> Structure:
        """Return the candidates for the model's blocks, or the blocks themselves once a step has called them."""
        if self.profile is not None:
            return as_called(self._module, self.profile.blocks)
        return self._elsewhere or find_blocks(self._module, self.blocks)

    # -- before a step -----------------------------------------------------------------------------------------------

    def comes(self, batch: Any, number: int = 0, padded: bool | None = None) -> None:
        """Take note of the ``batch`` of the coming step, for which there may have to be another plan."""
        if self.plan is not None and (change := self._outdated(batch, padded)) is not None:
            self._give_up(self.plan, change)
        if self.plan is None:
            self._first, self._coming = (batch, number), Size.of(batch, padded)
            # A window that has begun goes on in steps that count, with the sums of gradients that are carried over.
            begun = self._carried is not None and self._carried.window.added > 0
            # Rows that are padded are of another size in each process; all have to plan at the same moment.
            self._aside = not (begun or all(self.together(self._watchable)))

    def _watchable(self) -> bool:
        """Return whether the coming step may run before there is a plan, and count."""
        # A step that calls other layers trains without a plan: nobody adds up its gradients to those of others.
        adds_up = self.is_distributed or self.settings.accumulate > 1
        structure = self._structure()
        one_list = structure.other is None or structure.other() is None
        # A step of a run that goes on elsewhere does not show what larger batches take: nobody has a profile of them.
        followed = self.profile is not None and bool(self.growth.sizes)
        return (one_list or not adds_up) and (followed or not self._wants_larger(self._coming))

    def _outdated(self, batch: Any, padded: bool | None) -> str | None:
        """Return the reason why the present plan may not serve ``batch``; None if it should."""
        assert self.plan is not None
        if self.engine is not None and (change := self.engine.handover.changed(self._optimizer)) is not None:
            self.growth = Growth()
            return change
        if self.plan_path is not None or self.is_distributed:
            return None
        return self.growth.outgrown(self.plan, batch, padded)

    def _give_up(self, plan: Plan, change: str) -> None:
        """Leave the engine of ``plan`` between two passes, and keep what the next one needs to go on."""
        if self.plan_path is not None:
            raise PlanError(
                f"plan={str(self.plan_path)!r} cannot be carried out any more: {change}; leave plan out, so that the "
                "run is planned again when that happens"
            )
        limits.check("optimizer", limits.Setup(model=self.model, optimizers=[self._optimizer]))
        # The budget of the run, and not what is free now, part of which this run has given back itself.
        memory = self.present.device.budget
        self.say(f"{change}: the run is planned again")
        self.present.handover.take_in()
        window = self._leave()
        for param, gradient in window.rest.items():
            param.grad = gradient
        self._carried = Carried(replace(window, rest={}), memory, plan, change)
        self.plan = None

    def _leave(self) -> CarriedWindow:
        """Close the engine, and return the window that another one goes on with."""
        window = self.present.handover.leave_window(self._optimizer)
        self._close_engine()
        gc.collect()  # or what refers to itself in the old engine would seem to hold weights
        return window

    def _ready(self) -> tuple[Profile | None, int]:
        """Be ready for a step that shows what to plan, whose hooks before it have all been called by now.

        Returns an earlier profile of the machine, and the bytes of the device.
        """
        self._first = None
        # Again: hooks that have run since may have frozen weights, or changed the optimizer.
        limits.check("optimizer", limits.Setup(model=self.model, optimizers=[self._optimizer]))
        if self.engine is not None:
            self.engine.handover.take_in()
        self._close_engine()
        if self.profile is not None or self._aside:
            gc.collect()
        self.run_before.warn_of_frozen(self._module)
        budget = min(self.together(lambda: self._budget)) if self._carried is None else self._carried.memory
        if self.profile is not None:
            return self.profile, budget
        # That of the run that this one continues, if it holds for all processes: measuring the machine anew would take
        # RAM that the states of a resumed run have by now.
        before, machines = self.run_before, {"processes": self.num_processes, "machines": self.num_nodes}
        each = self.together(lambda: before.measured(self.root_device, **machines))
        return each[0] if None not in each else None, budget

    # -- the step that shows what to plan ----------------------------------------------------------------------------

    @property
    def _watches(self) -> bool:
        return self.plan is None and self._first is not None and not self._aside

    def _plan_on_trial(self) -> None:
        """Measure a step on trial, if the coming one cannot be watched, and plan."""
        if self._first is None or self._watches:
            return
        first, ready = self._first, self._ready()
        size, trial = self._trial(*first)
        # Shorter batches with padding have room beside a larger one that the user has named.
        self.growth = Growth([size if size == self._coming else replace(size, padded=True)])
        self._plan_with(trial, *ready)

    def _plan_with(self, trial: Callable[..., Profile], known: Profile | None, budget: int) -> None:
        """Measure a step by ``trial``, plan, and let the engine of that plan take over."""

        def measure(parts: int, optimizer: Optimizer | None = None) -> Profile:
            used = optimizer or self._optimizer
            machine = replay.as_measured(known if optimizer is None else self.profile, used)
            return trial(parts, used, machine)

        self._plan_by(measure, known, budget)

    def _watch(self) -> FirstIteration:
        """Be ready for a step without a plan, whose hooks before it have all been called by now."""
        assert self._first is not None
        tokens = math.prod(extent(self._first[0]))
        known, budget = self._ready()
        structure = self._structure()
        parts, loss = self._order_of_sums(structure, tokens, budget)
        self._watched = FirstIteration(
            self.root_device,
            self.settings,
            self._module,
            structure,
            self._optimizer,
            known,
            partial(self._plan_watched, known),
            parts=parts,
            loss=loss,
            budget=budget,
            say=self.say,
        )
        return self._watched

    def _order_of_sums(self, structure: Structure, tokens: int, budget: int) -> tuple[int, LossInBlock | None]:
        """Return the order of sums in a step without a plan: that of the run's plan, as far as it is known.

        That is: the parts of the batch, which go through each block in turn, and what computes the output projection
        and the loss together; None: the model's own loss takes all logits.
        """
        before, plan = self.run_before, self._carried.plan if self._carried is not None else None
        if self.plan_path is not None:
            plan = Plan.load(self.plan_path)
        elif plan is None and before.plan is not None:
            with suppress(PlanError):  # the run is planned again, and says why
                plan = from_json(Plan, before.plan, source="the checkpoint's plan", schema=PLAN_SCHEMA)
        # Where the number of parts is yet to be chosen, the step has one.
        parts = plan.parts if plan is not None else before.micro_batches or 1
        if plan is not None and plan.chunk_tokens:
            loss = LossInBlock.early(structure, plan.chunk_tokens)
        elif self.settings.chunked_loss:
            loss = LossInBlock.early(structure, None)
        else:
            loss = early_loss(structure, tokens, budget, self.root_device)
        return parts if self.micro_batches == "auto" else self.micro_batches, loss

    def _plan_watched(self, known: Profile | None, first: FirstIteration) -> Passes:
        """Plan for the step whose backward has come to the first block, and let the plan's engine go on with that."""

        def measured(parts: int, optimizer: Optimizer | None = None) -> Profile:
            profile = first.measured(self._updates_done + 1, parts, optimizer)
            # With room for larger batches before it.
            return self.growth.add(self._coming, profile, known) if optimizer is None else profile

        self._plan_by(measured, known, first.device.budget)
        self._goes_on()
        first.planned(self.present.passes)
        return self.present.passes

    def _plan_unreached(self) -> None:
        """Plan for a step whose backward is over and has come to no block, as where all of them are frozen."""
        if self._watched is not None and self._watched.elsewhere is None:
            self._watched.plan()

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _plan_by(self, measure: Measure, known: Profile | None, budget: int) -> None:
        """Plan for a step that ``measure`` profiles, and let the engine of that plan take over."""
        carried, self._carried = self._carried, None
        with planning(self._callbacks), because(carried.change) if carried is not None else nullcontext():
            self._choose_plan(measure, known, budget)
            self._warn_of_unfreezing(measure, budget)
            self._begin()
        self._watched, self.run_before = None, Before()
        if carried is not None:
            self.present.handover.enter_window(carried.window)

    def _choose_plan(self, measure: Measure, known: Profile | None, budget: int) -> None:
        """Measure a training step and make its plan, or take the saved one."""

        def profiled(parts: int) -> Profile:
            new = self.one_profile(partial(measure, parts), known=None if known is None else known.hardware)
            return new if known is None else replace(new, contention=known.contention)

        count, path, settings = self.micro_batches, self.plan_path, replace(self.settings, memory=budget)
        if path is not None:
            # In the plan's own number of parts, which the setting may leave open.
            count = replay.load_plan(path, budget, micro_batches=count).parts
        elif count == "auto":
            count = self.run_before.micro_batches or count
        self.profile = profile = profiled(1 if count == "auto" else count)
        self.run_before.warn_of_changes(profile)
        if path is not None:
            self.plan = self._replayed(path, profile, budget)
            return
        self.plan = self.run_before.own_plan(profile, self.settings, budget)
        if self.plan is not None:
            self._replanning = follow(self.settings, profile)
            return
        in_ram = " (in RAM, beside host_memory: the device is emulated)" if self.root_device.type == "cpu" else ""
        self.say(f"planning for {format_bytes(budget)}, {settings.solver_time_limit:g} s at most{in_ram}")
        if count == "auto":
            self.profile, plan = choose_parts(lambda parts: profile if parts == 1 else profiled(parts), settings)
            self._replanning = follow(self.settings, self.profile)
        else:
            plan = self._make_plan(profile, settings)
        self.plan = self.of_first(partial(compared, plan, self.profile, settings))

    def _replayed(self, path: str | Path, profile: Profile, budget: int) -> Plan:
        return replay.replay(path, profile, budget)

    def _make_plan(self, profile: Profile, settings: Settings) -> Plan:
        self._replanning = follow(settings, profile)
        return self.of_first(partial(make_plan, profile, settings))

    def _warn_of_unfreezing(self, measure: Measure, budget: int) -> None:
        """Plan once more with all weights that a callback may unfreeze, and warn if that will not fit."""
        before = self.profile
        assert before is not None
        callbacks = [type(callback) for callback in self._callbacks] if self.plan_path is None else []
        names = [kind.__name__ for kind in callbacks if any(base.__name__ == "BaseFinetuning" for base in kind.__mro__)]
        parameters: Iterator[nn.Parameter] = self._module.parameters() if names else iter(())
        frozen = [p for p in parameters if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
        if not frozen:
            return
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            everything = partial(measure, before.parts, with_more(self._optimizer, frozen))
            profile = replace(self.one_profile(everything, known=before.hardware), contention=before.contention)
            # Only whether there is one matters, and the first one is found at once.
            settings = replace(
                self.settings, memory=budget, solver_time_limit=min(self.settings.solver_time_limit, LEAST_S)
            )
            self.of_first(partial(make_plan, profile, settings))
        except OffloadError as error:
            rank_zero_warn(
                f"offmate: {names[0]} may unfreeze {len(frozen)} weights while this run trains; once all of them "
                f"train, it ends: {error}"
            )
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    # -- the engine --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Explain the plan, and install its engine."""
        assert self.profile is not None and self.plan is not None
        self._save_plan()
        self.show(self.plan.explain() if self.explain else brief(self.plan))
        if self._replanning is not None and self.profile.scatter > _BUSY:
            self.say(
                f"repeated measurements differ by {self.profile.scatter:.0%} either way: the machine is busy with "
                "something else; the first iterations will correct what is predicted"
            )
        self._install(self.plan, self.plan.budget_bytes)

    def _install(self, plan: Plan | None, budget: int) -> None:
        """Install an engine for ``plan``, or one that only streams forwards; from the step that is watched, if any."""
        self.engine, self._installed = install(
            self._module,
            None if plan is None else self._optimizer,
            plan,
            # Another module than the one that was trained may be evaluated.
            find_blocks(self._module, self.blocks) if plan is None else self._structure(),
            self.root_device,
            budget=budget,
            first=self._watched,
            others=self.ranks,
        )
        self._watched = None

    def _close_engine(self) -> None:
        watched, self._watched, self.engine = self._watched, None, None
        try:
            if watched is not None:
                self._elsewhere = watched.elsewhere or self._elsewhere
                watched.close()
        finally:
            self._installed.close()

    def _save_plan(self) -> None:
        folder = self._folder()
        if folder is not None and self.profile is not None and self.plan is not None and self.is_global_zero:
            self.profile.save(folder / "profile.json")
            self.plan.save(folder / "plan.json")

    def _begin_step(self) -> None:
        """Begin the optimizer's step, for which there may be an engine by now; refuses sums that nobody has planned."""
        if self.plan is not None and self.engine is not None:
            self.engine.passes.step.begin()
        elif self._carried is not None and self._carried.window.added:
            raise UnsupportedError(
                f"{self._carried.change} after {self._carried.window.added} micro-batches, and no training_step of the "
                "window has returned a loss since; change weights at the beginning of a window"
            )
