"""The strategy ``"offmate"``: calls of profiling, plan and execute from the hooks of a Trainer's life.

The class is written without Lightning; :func:`strategy_class` puts it on the ``Strategy`` of a namespace. A Trainer of
one namespace takes an object that was made for the other, too: the class counts as a virtual subclass of that other
base, and the object gets the right class when the Trainer gives it an accelerator.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.compat.lightning import adds_up, loaded_checkpoint, skips_backward, trainer_of
from lt_offload.compat.torch import tree_leaves
from lt_offload.errors import ConfigError, InfeasibleError, OverBudget
from lt_offload.execute import open_device
from lt_offload.execute.device.base import Device
from lt_offload.execute.engine import Engine
from lt_offload.execute.updates.window import CarriedWindow
from lt_offload.model.batch import Size, is_padded
from lt_offload.model.blocks import Structure, as_called, find_blocks
from lt_offload.model.calls import plainly, switched_off
from lt_offload.model.parts import check_micro_batches
from lt_offload.plan import Settings
from lt_offload.profiling.hardware import check_host_memory, check_memory, free_memory
from lt_offload.schema.explain import brief, headline
from lt_offload.schema.plan import Plan, PlannerName
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from lt_offload.strategy import metrics, replay, windows
from lt_offload.strategy.batch_size import BatchSize, choose, size_of_the_run, spare_optimizer
from lt_offload.strategy.checkpoint import resume
from lt_offload.strategy.checkpoint.data_order import repeatable
from lt_offload.strategy.checkpoint.hooks import Checkpoints
from lt_offload.strategy.first.growing import Growth
from lt_offload.strategy.first.planning import FirstPlanning
from lt_offload.strategy.first.survey import Carried, following
from lt_offload.strategy.namespaces import STRATEGY_NAME, bind, introduce, named, namespace_of
from lt_offload.strategy.records import Records
from lt_offload.strategy.replan import Replanning, follow, steps_left
from lt_offload.strategy.replay import Before
from lt_offload.strategy.several.facts import facts
from lt_offload.suggest import naming_options
from lt_offload.units import Budget, format_bytes

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class OffmateStrategy(FirstPlanning, Records, Checkpoints):
    """Trains inside a device memory budget by planning one iteration, with the same numbers as plain training.

    On ``accelerator="cuda"`` blocks run on the GPU; on ``accelerator="cpu"`` the same plan runs on an emulated device
    of ``memory`` bytes. What is not supported is refused before training, see ``lt_offload.limits``.

    Updates of one iteration overlap the next forward. Hooks and callbacks may read and write weights and optimizer
    states between iterations all the same: whatever they touch is completed first, and that alone.

    Args:
        memory: device memory that training may occupy, such as ``"10GB"``, ``"10GiB"`` or bytes; None: what is free.
        host_memory: RAM that training may take; None: what is free.
        planner: which planner to use; ``"auto"`` simulates several and takes the fastest.
        batch_size: set as ``batch_size`` of the datamodule (or of the module, if that makes the loader) before loaders
            and schedules are made; ``"auto"``: the size with the highest throughput, at most the number of samples, or
            that of the run whose checkpoint is resumed (with ``accumulate_grad_batches`` above 1 the best split of the
            samples per update that both settings say); None: as it is.
        micro_batches: parts of a batch that go through each block in turn, before the next block begins: weights travel
            once for all and temporary tensors are those of one part. The sums of gradients are those that
            ``lt_offload.micro_batched_reference`` defines. ``"auto"``: the number with which an iteration is fastest.
        blocks: name of the ``nn.ModuleList`` or ``nn.Sequential`` that holds the model's layers, its path or the end of
            it (``"h"``); None: it is found by structure.
        host_update: allow optimizer updates on the host.
        activation_offload: allow activations to travel to the host and back.
        recompute: allow activations to be computed again.
        chunked_loss: let the output projection and the loss take a few tokens at a time wherever they can, with the
            sums of ``lt_offload.chunked_loss_reference``; by default only where nothing else fits.
        gradient_reserve: for ``planner="memferry"``: the part of all gradient bytes, 0 to 1, that the device may hold;
            None: as much as fits.
        plan: path of a saved plan to replay instead of planning.
        solver_time_limit: seconds that planning may take.
        async_checkpoint: write checkpoints while training goes on, as ``plugins=[AsyncCheckpointIO()]`` does, too.
            Weights and states that training changes before they are written are copied first, as far as
            ``host_memory`` allows; beyond that training waits.
        report_dir: folder for profile.json, plan.json and trace.json; None: the logger's folder, if there is one.

    Raises:
        ConfigError: if an option cannot be used as given.
    """

    strategy_name = STRATEGY_NAME
    namespace = "lightning.pytorch"

    @naming_options
    def __init__(
        self,
        *,
        memory: str | int | float | None = None,
        host_memory: str | int | float | None = None,
        planner: PlannerName = "auto",
        batch_size: int | Literal["auto"] | None = None,
        micro_batches: int | Literal["auto"] = 1,
        blocks: str | None = None,
        host_update: bool = True,
        activation_offload: bool = True,
        recompute: bool = True,
        chunked_loss: bool = False,
        gradient_reserve: float | None = None,
        plan: str | Path | None = None,
        solver_time_limit: float = 30.0,
        async_checkpoint: bool = False,
        report_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        if batch_size not in (None, "auto") and (not isinstance(batch_size, int) or batch_size < 1):
            raise ConfigError(f"batch_size={batch_size!r} must be at least 1, 'auto', or None for the datamodule's")
        check_micro_batches(micro_batches, auto=True)
        if micro_batches != 1 and batch_size == "auto":
            raise ConfigError(
                f"micro_batches={micro_batches!r} cannot be combined with batch_size='auto', which plans for whole "
                "batches in each block; give batch_size as a number, or set micro_batches=1"
            )
        self.planner: PlannerName = planner
        self.settings = Settings(
            memory=Budget.of(memory),
            host_memory=Budget.of(host_memory, setting="host_memory"),
            planner=planner,
            host_update=host_update,
            activation_offload=activation_offload,
            recompute=recompute,
            chunked_loss=chunked_loss,
            gradient_reserve=gradient_reserve,
            time_limit=solver_time_limit,
        )
        """The settings of plans; budgets that the user left out are not resolved yet."""
        self.memory, self.host_memory = self.settings.device.nbytes, self.settings.host.nbytes
        self.batch_size, self.micro_batches = batch_size, micro_batches
        self.blocks, self.plan_path = blocks, plan
        self.async_checkpoint = async_checkpoint
        self.report_dir = report_dir
        self.explain = False  # whether the whole plan is shown before training, and not just one paragraph about it
        self.profile: Profile | None = None
        """The profile of the first batch, made together with ``plan``; ``batch_size="auto"`` makes both earlier."""
        self.plan: Plan | None = None
        self.trace: Trace | None = None
        """The last iteration, once training has ended; the one before it if its batch was smaller than others."""
        self.engine: Engine | None = None
        """The engine, present between ``setup`` and ``teardown``."""
        self._device: Device | None = None
        self._replanning: Replanning | None = None
        """The correction of the plan by the first iterations, present until it is over."""
        self._signature: object = None
        self._first: tuple[Any, int] | None = None
        """The first batch of training and its number, until it is planned."""
        self.run_before = Before()
        self._micro_batch = ExitStack()  # encloses one that no update follows, until its backward has ended
        self._aside = self._padded = False
        self._growth = Growth()
        self._step, self._how, self._survey, self._carried = ExitStack(), {}, None, None
        self._undo = ExitStack()  # what ``teardown`` puts back
        self._watch = ExitStack()  # holds the budget between iterations, too

    @property
    def accelerator(self) -> Any:
        """The accelerator, set by the Trainer before anything else."""
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        # The same attributes over another base: its hooks, and the types its Trainer asks for, are then right.
        namespace = namespace_of(accelerator) or self.namespace
        if type(self) in named_classes(self.namespace):
            self.__class__ = strategy_class(namespace)
        elif namespace != self.namespace:
            raise ConfigError(
                f"{type(self).__name__} derives from lt_offload.OffmateStrategy, which is a strategy of "
                f"{self.namespace}; import Trainer from {self.namespace}, or derive from "
                f"lt_offload.strategy.offmate.strategy_class({namespace!r})"
            )
        self._accelerator = accelerator

    # -- before training ---------------------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Take the module, and give its Trainer the callbacks that every run has: exact resuming, metrics."""
        super().connect(model)
        trainer = trainer_of(model)
        if trainer is None or trainer.barebones:
            return
        resume.add(trainer, self.namespace)
        metrics.add(trainer, self.namespace)

    def process_dataloader(self, dataloader: object) -> object:
        """Let the epochs of training loaders begin again, so that a resumed run has the order of the first one."""
        trainer = self._trainer
        return repeatable(dataloader) if windows.fitting(trainer) and trainer.training else dataloader

    def setup_environment(self) -> None:
        """Refuse unsupported settings of the Trainer, before anything is downloaded or loaded."""
        trainer = self._trainer
        # First what every process refuses by itself: to meet the others may take as long as they are late.
        limits.check("trainer", limits.Setup(trainer=trainer), training=windows.fitting(trainer))
        self.open_processes()
        self.check_checkpoint_io()
        check_memory(self.memory, self.root_device)
        check_host_memory(self.host_memory)
        if windows.fitting(trainer):
            part = self.part_of_ram(self.host_memory)
            self.settings = replace(windows.settings_from_trainer(self.settings, trainer), host_memory=part)
            if self.plan_path is not None:
                each = {"processes": self.world_size, "machines": self.num_nodes}
                replay.load_plan(self.plan_path, self._budget, self.settings, micro_batches=self.micro_batches, **each)
        if self.batch_size is not None and windows.fitting(trainer):
            size = BatchSize(trainer, self.batch_size)
            if self.batch_size != "auto":
                size.value = self.batch_size
        super().setup_environment()
        self.warm_up_exchange()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make models on the host, whatever the device."""
        with torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Move metrics only: weights go to the device block by block, and the engine moves the other tensors."""
        from torchmetrics import Metric

        for module in self._module.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        """Make optimizers, and install an engine: one without a plan, until the first batch has come."""
        assert self.accelerator is not None and self.model is not None
        self._unfinished, self._failed = None, False
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.same_start()
        limits.check("model", limits.Setup(model=self.model, blocks=self.blocks), training=windows.fitting(trainer))
        if windows.fitting(trainer):
            self.profile = self.plan = self.trace = self._first = self._replanning = None
            self.run_before = Before.of(loaded_checkpoint(trainer).get(replay.KEY))
            self._growth = Growth(self.run_before.shown)
            if self.batch_size == "auto":
                self._set_batch_size(trainer)
            self.setup_optimizers(trainer)
            limits.check("optimizer", limits.Setup(model=self.model, optimizers=self.optimizers))
        self.setup_precision_plugin()
        if windows.fitting(trainer):
            self._prepare_training(trainer)
        else:
            self._install(None, None, self._budget)

    def _set_batch_size(self, trainer: Any) -> None:
        """Set the batch size of a run with ``batch_size="auto"``; where it is chosen, that makes profile and plan."""
        size = BatchSize(trainer, "auto")
        effective = windows.effective_batch(trainer, size.value)
        known = size_of_the_run(trainer, self.plan_path)
        if known is None:
            settings = self.settings.within(lambda: self._budget)
            with spare_optimizer(trainer) as optimizer:
                choice = self.of_first(lambda: choose(trainer, optimizer, size, settings, effective))
            self.profile, self.plan, known = choice.profile, choice.plan, choice.batch_size
        size.value = known
        if effective is not None:
            windows.split(trainer, effective, known)
            self.settings = windows.settings_from_trainer(self.settings, trainer)

    def _prepare_training(self, trainer: Any) -> None:
        """Warn, switch off what disturbs, and install an engine: for evaluation, or for training if there is a plan."""
        (optimizer,) = self.optimizers
        if limits.unknown_optimizer(optimizer):
            rank_zero_warn(
                f"offmate: {type(optimizer).__name__} is assumed to update each tensor on its own, from that tensor's "
                "gradient alone; if it does not, results differ from plain training"
            )
        for sentence in switched_off(self._module):
            rank_zero_info(f"offmate: {sentence}")
        self.compare(lambda: facts(self, trainer, self._structure()))
        self._undo.enter_context(plainly(self._module))
        self._undo.enter_context(self.meeting(trainer))
        self._undo.enter_context(windows.clipping(trainer, lambda: self.engine))
        if self.profile is not None:
            self._replanning = follow(self.settings, self.profile)
            self._begin(optimizer)
            return
        try:
            self._install(None, None, self._budget)
        except (ConfigError, OverBudget) as error:
            self._plan_early(trainer, error)

    def _begin(self, optimizer: Optimizer) -> None:
        """Explain the plan, and install its engine."""
        assert self.profile is not None and self.plan is not None
        self._save_plan(self._folder(self._trainer))
        rank_zero_info(self.plan.explain() if self.explain else brief(self.plan))
        if self._replanning is not None and self.profile.scatter > _BUSY:
            rank_zero_info(
                f"offmate: repeated measurements differ by {self.profile.scatter:.0%} either way: the machine is busy "
                "with something else; the first iterations will correct what is predicted"
            )
        self._install(optimizer, self.plan, self.plan.budget_bytes)
        self.check_copies()

    def _open_device(self, budget: int, threads: int, context: int = 0) -> Device:
        return open_device(budget, str(self.root_device), host_threads=threads or None, context=context)

    def _install(self, optimizer: Optimizer | None, plan: Plan | None, budget: int) -> None:
        threads, context = (plan.host_threads, plan.context_bytes) if plan is not None else (0, 0)
        survey = self._survey.leave() if self._survey is not None else None
        if survey is None:
            self._device = self._open_device(budget, threads, context)
        assert self._device is not None
        self._device.expect(context)
        profile = self.profile if plan is not None else None
        structure = self._structure() if profile is None else as_called(self._module, profile.blocks)
        self.engine = Engine(
            self._module, optimizer, plan, self._device, structure=structure, others=self.ranks, survey=survey
        )
        self.engine.install()
        windows.prepare(self._trainer, self.engine)
        if survey is None:
            self._watch.enter_context(self._device.between())

    def _replan(self) -> None:
        """Correct profile and plan by the first measured iterations; called between two iterations."""
        engine, replanning = self.engine, self._replanning
        if engine is None or replanning is None or not replanning.due(engine):
            return
        correction = replanning.correct(engine, steps_left(self._trainer), self._trainer.global_step)
        if replanning.over:
            self._replanning = None
        if correction is None:
            return
        self.profile, self.plan = correction.profile, correction.plan
        engine.plan = correction.plan
        if correction.takes_over:
            del engine  # or this frame would keep the old engine, with its weights, beside the new one
            self._take_over(correction.plan)
        self._save_plan(self._folder(self._trainer))

    def _follow_changes(self, batch: Any) -> None:
        """Plan again if other tensors train than before, or if a batch is larger; called between two passes."""
        engine, (optimizer,) = self.engine, self.optimizers
        change = engine.handover.changed(optimizer) if engine is not None else None
        if change is not None:
            self._growth = Growth()
        change = change or self._outgrown(batch)
        if engine is None or change is None:
            return
        replay.check_no_plan(self.plan_path, change)
        limits.check("optimizer", limits.Setup(model=self.model, optimizers=self.optimizers))
        # The budget of the run, and not what is free now, part of which this run has given back itself.
        memory = engine.device.budget
        rank_zero_info(f"offmate: {change}: the run is planned again")
        del engine
        window = self._leave()
        for param, gradient in window.rest.items():
            param.grad = gradient
        assert self.plan is not None
        self._carried = Carried(replace(window, rest={}), memory, self.plan, change)
        self.plan = None

    def _leave(self) -> CarriedWindow:
        """Close the engine, and return the window that another one goes on with."""
        assert self.engine is not None
        # Files that are being written are read from the old engine's host copies.
        self.finish_saves()
        window = self.engine.handover.leave_window(self.optimizers[0])
        self._close_engine()
        gc.collect()  # or what refers to itself in the old engine would seem to hold weights
        return window

    def _take_over(self, plan: Plan) -> None:
        """Go on with ``plan``: weights and states are complete on the host in between."""
        rank_zero_info(f"offmate: {headline(plan)}")
        window = self._leave()
        self._install(self.optimizers[0], plan, plan.budget_bytes)
        assert self.engine is not None
        self.engine.handover.enter_window(window)

    def _close_engine(self) -> None:
        engine, device = self.engine, self._device
        survey, self._survey = self._survey, None
        self.engine = self._device = None
        self._watch.close()
        try:
            if engine is not None:
                engine.close()
            if survey is not None:
                survey.close() if engine is None else survey.survey.close()
        finally:
            if device is not None:
                device.close()

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch after looking for padding in it, as the look would wait for the device there."""
        self._padded = is_padded(batch)
        return super().batch_to_device(batch, *args, **kwargs)

    # -- training and evaluation -------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Remember the shapes of the batch; hooks of users, which may freeze and unfreeze weights, have run by now."""
        self._signature = tuple((t.shape, t.dtype) for t in tree_leaves(batch) if isinstance(t, Tensor))
        self.begins_batch(self._trainer, batch_idx)
        if self.plan is not None:
            self._follow_changes(batch)
            self._keep_trace(batch)
        if self.plan is None:
            self._first = batch, batch_idx  # the module may have said that the rest of the epoch is skipped
            self._coming = Size.of(batch, self._padded)
            # A window that has begun goes on in steps that count, with the sums of gradients that are carried over.
            begun = self._carried is not None and self._carried.window.added > 0
            self._aside = not (begun or self._surveyable())

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one planned iteration: the closure's forward and backward contain every update."""
        self._plan_first_batch()
        trainer = self._trainer
        norm = metrics.logs_after(trainer, trainer.global_step + 1)
        self._micro_batch.close()
        self._replan()
        with ExitStack() as self._step:
            self._iterate(self._step, grad_norm=norm)
            if self._surveys:
                self._step.enter_context(following(self.optimizers[0], self._begin_step))
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step; a micro-batch without an update stays open until its backward has ended."""
        self._plan_first_batch()
        if self._replanning is not None:
            self._replanning.saw(args)
        with ExitStack() as opened:
            if skips_backward(self._trainer):
                self._iterate(opened)
            elif adds_up(self._trainer):
                self._micro_batch.close()  # of a step that returned no loss
                self._iterate(opened, last=False)
            if self._surveys:
                with self._begin_survey().forward((args, kwargs)) as returned:
                    outputs = super().training_step(*args, **kwargs)
                    returned(outputs)
            else:
                outputs = super().training_step(*args, **kwargs)
            # Its backward is called later, by the loop, and ends it (``backward``).
            self._micro_batch = opened.pop_all()
            if adds_up(self._trainer):
                self._step = self._micro_batch
        return outputs

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward, and end a micro-batch without an update."""
        self.divide(closure_loss)
        with self._micro_batch, self._survey.backward() if self._survey is not None else nullcontext():
            loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
            self._plan_unreached()
        return loss

    def on_train_start(self) -> None:
        """Warn of windows that are shorter than expected."""
        super().on_train_start()
        windows.warn_of_short_ones(self._trainer)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Stream the forward; if the sanity check lacks memory, planning for training says how much is needed."""
        try:
            with self._streaming():
                return super().validation_step(*args, **kwargs)
        except OverBudget as error:
            if windows.fitting(self._trainer) and self.plan is None:
                self._plan_early(self._trainer, error)
            self._streaming()  # without an engine, raises the error that says why
            raise

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Stream the forward."""
        with self._streaming():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Stream the forward."""
        with self._streaming():
            return super().predict_step(*args, **kwargs)

    # -- afterwards --------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Leave the iteration; a second error must not hide the first."""
        self._failed = True
        self.fail_with(exception)
        if self.engine is not None:
            try:
                self._micro_batch.pop_all()  # there is nothing to end
                self.engine.abort()
            except Exception as second:
                rank_zero_warn(f"offmate: leaving the interrupted iteration failed, too: {second}")
            self._unfinished = self.engine.unfinished()

    def teardown(self) -> None:
        """Give the model back with complete host weights and release the device."""
        # From the last to the first, each whatever becomes of the others.
        with ExitStack() as leaving:
            leaving.callback(self.leave_processes)
            leaving.callback(super().teardown)
            leaving.callback(self._undo.close)
            leaving.callback(self._close_engine)
            self.finish_saves()

    # -- helpers -----------------------------------------------------------------------------------------------------

    @property
    def _module(self) -> LightningModule:
        module = self.lightning_module
        assert module is not None
        return module

    def _structure(self) -> Structure:
        return find_blocks(self._module, self.blocks)

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    @property
    def _budget(self) -> int:
        """Device bytes that may be taken now."""
        return self.settings.device.resolved(lambda: self.part_of_memory(free_memory(self.root_device)))

    def _streaming(self) -> AbstractContextManager[None]:
        if self._survey is not None:  # its step had no loss
            self._close_engine()
            self._install(None, None, self._budget)
        if self.engine is None:
            raise InfeasibleError(
                f"memory={format_bytes(self._budget)} is too small for a validation before training; set "
                "num_sanity_val_steps=0, and the first batch says which memory is enough"
            )
        return self.engine.inference()


# -- one class per namespace -----------------------------------------------------------------------------------------

_PUBLIC = "lt_offload.strategy.lightning"
"""The module in which a saved config finds the classes, which serve every namespace."""
_BUSY = 0.1
"""Scatter of measurements above which the user is told."""


def strategy_class(namespace: str) -> type[Any]:
    """Return the strategy's class for a Lightning namespace."""
    return named_classes(namespace)[0]


def named_classes(namespace: str) -> tuple[type[Any], type[Any]]:
    """Return the strategy's class for a Lightning namespace, and the same under its name in the registry.

    A command line looks through the subclasses of ``Strategy`` that exist, and takes options (``.memory``) only for a
    class: hence one with the name that the registry has, too. Its objects become those of the other.
    """
    if namespace not in named:
        strategy = bind(OffmateStrategy, namespace, "strategies.Strategy", module=_PUBLIC)
        registered = type(STRATEGY_NAME, (strategy,), {"__module__": _PUBLIC, "__doc__": strategy.__doc__})
        named[namespace] = strategy, registered
        introduce()
    return named[namespace]
