"""The strategy ``"offmate"``: calls of profiling, plan and execute from the hooks of a Trainer's life.

The class is written without Lightning; :func:`strategy_class` puts it on the ``Strategy`` of a namespace. A Trainer of
one namespace takes an object that was made for the other, too: the class counts as a virtual subclass of that other
base, and the object gets the right class when the Trainer gives it an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.arguments import checked
from lt_offload.compat.lightning import adds_up, loaded_checkpoint, skips_backward, trainer_of
from lt_offload.compat.torch import tree_leaves
from lt_offload.errors import ConfigError, InfeasibleError, OffloadError, OverBudget, ProcessError
from lt_offload.execute.memory.groups import move_rest
from lt_offload.execute.updates.window import CarriedWindow
from lt_offload.execute.user_code.step_hooks import StepHooks
from lt_offload.model.batch import Size, is_padded
from lt_offload.model.calls import plainly, switched_off
from lt_offload.model.parts import extent
from lt_offload.model.tiles import tiled
from lt_offload.profiling.hardware import check_host_memory, check_memory
from lt_offload.report.perfetto import save_perfetto
from lt_offload.schema.explain import headline
from lt_offload.schema.plan import Plan, PlannerName
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from lt_offload.strategy import metrics, replay, windows
from lt_offload.strategy.batch_size import BatchSize, choose, size_of_the_run, spare_optimizer
from lt_offload.strategy.checkpoint import resume
from lt_offload.strategy.checkpoint.data_order import repeatable
from lt_offload.strategy.checkpoint.hooks import Checkpoints
from lt_offload.strategy.first import sample
from lt_offload.strategy.namespaces import STRATEGY_NAME, bind, introduce, named, namespace_of
from lt_offload.strategy.replan import follow, steps_left
from lt_offload.strategy.replay import Before
from lt_offload.strategy.several.facts import facts
from lt_offload.units import format_bytes, is_count

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class OffmateStrategy(Checkpoints):
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
            and schedules are made; ``"auto"``: the smallest update with practically the highest throughput, as one
            batch or as several (``accumulate_grad_batches``), or that of the run whose checkpoint is resumed. With
            ``accumulate_grad_batches`` above 1 it is the best split of the samples per update that both settings say.
            None: as it is.
        max_batch_size: samples per update, of all processes, that ``batch_size="auto"`` may choose at most; None: as
            many as there are data, and 1024 in each process.
        micro_batches: parts of a batch that go through each block in turn, before the next block begins: weights travel
            once for all and temporary tensors are those of one part. The sums of gradients are those that
            ``lt_offload.micro_batched_reference`` defines. ``"auto"``: the number with which an iteration is fastest,
            chosen together with ``batch_size="auto"``.
        tile_tokens: tokens at a time in the parts of blocks that treat each token on its own, for long sequences, with
            the numbers that ``lt_offload.tile_tokens`` defines; None: all tokens.
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

    @checked
    def __init__(
        self,
        *,
        memory: str | int | float | None = None,
        host_memory: str | int | float | None = None,
        planner: PlannerName = "auto",
        batch_size: int | Literal["auto"] | None = None,
        max_batch_size: int | None = None,
        micro_batches: int | Literal["auto"] = 1,
        tile_tokens: int | None = None,
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
        super().__init__(locals())
        if batch_size not in (None, "auto") and not is_count(batch_size):
            raise ConfigError(f"batch_size={batch_size!r} must be at least 1, 'auto', or None for the datamodule's")
        if max_batch_size is not None and not is_count(max_batch_size):
            raise ConfigError(f"max_batch_size={max_batch_size!r} must be at least 1, or None: samples per update")
        if max_batch_size is not None and batch_size != "auto":
            raise ConfigError(
                f"max_batch_size={max_batch_size} bounds what batch_size='auto' chooses, and batch_size={batch_size!r} "
                "chooses nothing; set batch_size='auto' or leave max_batch_size out"
            )
        self.planner: PlannerName = planner
        self.memory, self.host_memory = self.settings.device.nbytes, self.settings.host.nbytes
        self.batch_size, self.max_batch_size, self.async_checkpoint = batch_size, max_batch_size, async_checkpoint
        self.trace: Trace | None = None
        """The last iteration, once training has ended; the one before it if its batch was smaller than others."""
        self._signature: object = None
        self._padded = False
        """True if the present batch has padding."""
        self._step, self._how = ExitStack(), dict[str, Any]()
        """What encloses an iteration, and the arguments with which that begins."""
        self._micro_batch = ExitStack()  # encloses one that no update follows, until its backward has ended
        self._undo = ExitStack()  # what ``teardown`` puts back

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
        self._undo.callback(resume.add(trainer, self.namespace).stop_listening)
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
            part = None if self.host_memory is None else self.host_memory // self.num_processes
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
        self._undo.enter_context(tiled(self.model, self.tile_tokens, self.blocks))
        if windows.fitting(trainer):
            self.trace = None
            self._forget_plan(Before.of(loaded_checkpoint(trainer).get(replay.KEY)))
            if self.batch_size == "auto":
                self._set_batch_size(trainer)
            self.setup_optimizers(trainer)
            limits.check("optimizer", limits.Setup(model=self.model, optimizers=self.optimizers))
        self.setup_precision_plugin()
        if windows.fitting(trainer):
            self._prepare_training(trainer)
        else:
            with self._in_memory(self._evaluation):
                self._install(None, self._budget)

    def _set_batch_size(self, trainer: Any) -> None:
        """Set the batch size of a run with ``batch_size="auto"``; where it is chosen, that makes profile and plan."""
        size = BatchSize(trainer, "auto")
        choices = windows.choices_of(trainer, size.value)
        known = size_of_the_run(trainer, self.plan_path)
        if known is None:
            settings = self.settings.within(lambda: self._budget)
            with spare_optimizer(trainer) as optimizer:
                self.profile, plan = self.of_first(lambda: choose(trainer, optimizer, size, settings))
            self.plan, known = plan, (plan.batch_size, plan.accumulate)
        else:
            windows.check_bound(trainer, math.prod(known), "the checkpoint or the plan has")
        size.value, accumulate = known
        if choices.samples is None:  # the next run of the Trainer chooses anew
            self._undo.callback(setattr, trainer, "accumulate_grad_batches", trainer.accumulate_grad_batches)
        windows.split(trainer, choices, size.value, accumulate)
        self.settings = windows.settings_from_trainer(self.settings, trainer)

    def _prepare_training(self, trainer: Any) -> None:
        """Warn, switch off what disturbs, and install an engine: for evaluation, or for training if there is a plan."""
        optimizer = self._optimizer
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
            self._begin()
            return
        try:
            self._install(None, self._budget)
        except (ConfigError, OverBudget) as error:
            self._plan_early(error)

    def _plan_early(self, why: OffloadError) -> None:
        """Plan before training, as not even forwards fit without a plan: an error then mostly names enough memory.

        A step that needs objects of later hooks is planned with its first batch: there is no engine until then. Raises
        the ``OffloadError`` of planning, or ``why``.
        """
        self._close_engine()
        move_rest(self._module, self._structure(), torch.device("cpu"))
        try:
            early = sample.SampleBatch.early(self._trainer)
            self._plan_with(partial(sample.measure, self._trainer, early), *self._ready())
        except ProcessError as error:
            raise error from why  # it says what others found, which have left
        except Exception as error:
            self._close_engine()
            if isinstance(error, OffloadError):
                error.__suppress_context__ = True  # a second traceback, of ``why``, would say nothing more
                raise

    def _begin(self) -> None:
        super()._begin()
        self.check_copies()

    def _install(self, plan: Plan | None, budget: int) -> None:
        super()._install(plan, budget)
        windows.prepare(self._trainer, self.present)

    def _replan(self) -> None:
        """Correct profile and plan by the first measured iterations; called between two iterations."""
        engine, replanning = self.engine, self._replanning
        if engine is None or replanning is None or not replanning.due(engine):
            return
        corrected = replanning.correct(engine, steps_left(self._trainer), self._trainer.global_step)
        if replanning.over:
            self._replanning = None
        if corrected is None:
            return
        plan, takes_over = corrected
        self.profile, self.plan, engine.plan = replanning.profile, plan, plan
        if takes_over:
            del engine  # or this frame would keep the old engine, with its weights, beside the new one
            self._take_over(plan)
        self._save_plan()

    def _take_over(self, plan: Plan) -> None:
        """Go on with ``plan``: weights and states are complete on the host in between."""
        self.say(headline(plan))
        window = self._leave()
        self._install(plan, plan.budget_bytes)
        self.present.handover.enter_window(window)

    def _leave(self) -> CarriedWindow:
        # Files that are being written are read from the old engine's host copies.
        self.finish_saves()
        return super()._leave()

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch after looking for padding in it, as the look would wait for the device there."""
        self._padded = is_padded(batch)
        return super().batch_to_device(batch, *args, **kwargs)

    # -- training and evaluation -------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Remember the shapes of the batch; hooks of users, which may freeze and unfreeze weights, have run by now."""
        self._signature = tuple((t.shape, t.dtype) for t in tree_leaves(batch) if isinstance(t, Tensor))
        self.begins_batch(self._trainer, batch_idx)
        self.comes(batch, batch_idx, self._padded)
        if self.plan is not None:
            self._keep_trace(batch)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one planned iteration: the closure's forward and backward contain every update."""
        self._plan_on_trial()
        trainer = self._trainer
        norm = metrics.logs_after(trainer, trainer.global_step + 1)
        self._micro_batch.close()
        self._replan()
        with ExitStack() as self._step:
            self._iterate(self._step, grad_norm=norm)
            if self._watches:
                # When the closure of the step has returned.
                self._step.callback(StepHooks(self._optimizer, self._begin_step).remove)
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step; a micro-batch without an update stays open until its backward has ended."""
        self._plan_on_trial()
        if self._replanning is not None:
            self._replanning.saw(args)
        with ExitStack() as opened:
            if skips_backward(self._trainer):
                self._iterate(opened)
            elif adds_up(self._trainer):
                self._micro_batch.close()  # of a step that returned no loss
                self._iterate(opened, last=False)
            if self._watches:
                with self._watch().forward((args, kwargs)) as returned:
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
        with self._micro_batch, self._watched.backward() if self._watched is not None else nullcontext():
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
            with self._in_memory(self._evaluation), self._streaming():
                return super().validation_step(*args, **kwargs)
        except OverBudget as error:
            if windows.fitting(self._trainer) and self.plan is None:
                self._plan_early(error)
            self._streaming()  # without an engine, raises the error that says why
            raise

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Stream the forward."""
        with self._in_memory(self._evaluation), self._streaming():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Stream the forward; what the loop keeps is on the host, also where the device is emulated."""
        with self._in_memory(self._evaluation), self._streaming():
            return self._on_host(super().predict_step(*args, **kwargs))

    def _iterate(self, step: ExitStack, **how: Any) -> None:
        """Begin an iteration, which ``step`` encloses, or be ready to begin it when there is a plan."""
        self._how = {"signature": self._signature, **how}
        if self.plan is not None and self.engine is not None:
            step.enter_context(self.engine.iteration(**self._how))

    def _goes_on(self) -> None:
        self._step.enter_context(self.present.iteration(**self._how))

    # -- afterwards --------------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Keep the record of the last iteration: the first process's, and the traces of the others."""
        self.ends_training()
        if self.plan is None or self.engine is None or self.engine.stats.iterations == 0:
            return
        if self.trace is None:
            self.trace = self.engine.trace()
        folder = self._folder()
        if folder is None:
            return
        if not self.is_global_zero:
            self.trace.save(folder / f"trace.{self.global_rank}.json")
            return
        self.trace.save(folder / "trace.json")
        save_perfetto(self.trace, folder / "trace.perfetto.json")

    def _keep_trace(self, batch: Any) -> None:
        """Keep the record of the iteration before the last one, if the last ``batch`` is smaller than the plan's."""
        engine, plan = self.engine, self.plan
        if engine is None or plan is None or extent(batch)[0] >= plan.batch_size or not engine.stats.iterations:
            return
        if self.trace is None and steps_left(self._trainer) <= 1:
            self.trace = engine.trace()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes, and leave."""
        self.fail_with(exception)
        self.give_back(exception)

    def give_back(self, exception: BaseException) -> None:
        """Leave the iteration and give the model back; a second error must not hide the first.

        Lightning calls ``teardown`` only if all that hear of the first error go on: a callback, a checkpoint that finds
        the disk full, a logger. One of several processes ends anyway, and stays until ``teardown``.
        """
        self._failed = True
        try:
            if self.engine is not None:
                self._micro_batch.pop_all()  # there is nothing to end
                try:
                    self.engine.abort(exception)
                finally:
                    self._unfinished = self.engine.unfinished()
            if not self.is_distributed:
                self._release()
        except Exception as second:
            rank_zero_warn(f"offmate: leaving the interrupted iteration failed, too: {second}")

    def teardown(self) -> None:
        """Give the model back with complete host weights and release the device."""
        # From the last to the first, each whatever becomes of the others.
        with ExitStack() as leaving:
            leaving.callback(self.leave_processes)
            leaving.callback(super().teardown)
            self._release()

    def _release(self) -> None:
        with ExitStack() as leaving:
            leaving.callback(self._undo.close)
            leaving.callback(self._close_engine)
            self.finish_saves()

    # -- helpers -----------------------------------------------------------------------------------------------------

    @property
    def _module(self) -> LightningModule:
        module = self.lightning_module
        assert module is not None
        return module

    @property
    def _evaluation(self) -> str:
        return f"an evaluation of {type(self._module).__name__}"

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    @property
    def _optimizer(self) -> Optimizer:
        (optimizer,) = self.optimizers
        return optimizer

    @property
    def _callbacks(self) -> Sequence[Any]:
        return self._trainer.callbacks  # type: ignore[no-any-return]

    @property
    def _updates_done(self) -> int:
        return int(self._trainer.global_step)

    def show(self, text: str) -> None:
        """Show ``text`` to the user, once for all processes."""
        rank_zero_info(text)

    def _folder(self) -> Path | None:
        if self.report_dir is not None:
            return Path(self.broadcast(str(self.report_dir)))
        # The logger's folder is the first process's, too: all processes ask for it.
        trainer = self._trainer
        kept = trainer.loggers and not trainer.fast_dev_run and trainer.log_dir
        return Path(trainer.log_dir) if kept else None

    def _wants_larger(self, size: Size) -> bool:
        return sample.wants_larger(self._trainer, size)

    def _trial(self, batch: Any, number: int) -> tuple[Size, Callable[..., Profile]]:
        chosen = sample.SampleBatch.of(self._trainer, batch, number)
        return Size.of(chosen.batch), partial(sample.measure, self._trainer, chosen)

    def _streaming(self) -> AbstractContextManager[None]:
        if self._watched is not None:  # its step had no loss
            self._close_engine()
            self._install(None, self._budget)
        if self.engine is None:
            raise InfeasibleError(
                f"memory={format_bytes(self._budget)} is too small for a validation before training; set "
                "num_sanity_val_steps=0, and the first batch says which memory is enough"
            )
        return self.engine.inference()


# -- one class per namespace -----------------------------------------------------------------------------------------

_PUBLIC = "lt_offload.strategy.lightning"
"""The module in which a saved config finds the classes, which serve every namespace."""


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
