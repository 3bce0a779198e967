"""Loops of one's own with accelerate: what its ``prepare`` returns trains within a budget."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.arguments import checked
from lt_offload.compat.hugging_face import optimizers_of
from lt_offload.errors import ConfigError, OffloadError
from lt_offload.hf.report import read_record
from lt_offload.hf.training import Training, unwrapped
from lt_offload.machine.driver import find_device
from lt_offload.machine.replaced import Replaced
from lt_offload.model.compiled import around_calls
from lt_offload.model.tiles import tiled
from lt_offload.schema.plan import PlannerName
from lt_offload.strategy.first.planning import settings_of

Loops = list["Loop"]
_open: ContextVar[tuple[Mapping[str, Any], Loops] | None] = ContextVar("lt_offload_accelerated", default=None)
"""The options of the innermost context that is open here, and the loops that have begun in it."""
_UNFREEZE = "an optimizer holds the weights that train when it is made: unfreeze them before"


@checked
def accelerated(
    *,
    memory: str | int | float | None = None,
    host_memory: str | int | float | None = None,
    planner: PlannerName = "auto",
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
    report_dir: str | Path | None = None,
    sample_batch: Any = None,
) -> AbstractContextManager[None]:
    """Let the model that ``Accelerator.prepare`` gets within the context train inside ``memory``, with plain numbers.

    The loop stays as it is: ``accumulate``, ``backward``, ``clip_grad_norm_``, ``save_state`` and ``load_state``. If it
    runs within the context, that gives complete weights back on the host at its end. A loop that comes later gives them
    back by ``accelerator.end_training()`` or ``free_memory()``. A model of which nothing trains goes to the device, as
    always. For Trainers there is ``hf_trainer``.

    With ``Accelerator(cpu=True)``, or without a GPU, the same plan runs on an emulated device of ``memory`` bytes.

    Args:
        memory: device memory that training may occupy, such as ``"10GB"``, ``"10GiB"`` or bytes; None: what is free.
        host_memory: RAM that training may take; None: what is free.
        planner: which planner to use; ``"auto"`` simulates several and takes the fastest.
        micro_batches: parts of a batch that go through each block in turn, see ``lt_offload.micro_batched_reference``.
        tile_tokens: tokens at a time in the parts of blocks that treat each token on its own, for long sequences, with
            the numbers that ``lt_offload.tile_tokens`` defines; None: all tokens.
        blocks: name of the ``nn.ModuleList`` or ``nn.Sequential`` that holds the layers; None: found by structure.
        host_update: allow optimizer updates on the host.
        activation_offload: allow activations to travel to the host and back.
        recompute: allow activations to be computed again.
        chunked_loss: let the output projection and the loss take a few tokens at a time wherever they can, with the
            sums of ``lt_offload.chunked_loss_reference``; by default only where nothing else fits.
        gradient_reserve: for ``planner="memferry"``: the part of all gradient bytes that the device may hold.
        plan: path of a saved plan to replay instead of planning.
        solver_time_limit: seconds that planning may take.
        report_dir: folder for profile.json and plan.json; None: they are not kept.
        sample_batch: keyword arguments of the model of the largest shape that will come: a step of them runs on trial,
            to be planned for. None: the first training step shows what to plan, and so does each that is larger than
            there is room for.

    Raises:
        ConfigError: if a setting cannot be used as given.
        UnsupportedError: by ``prepare``, naming what cannot be honoured.
    """
    options = locals()
    settings_of(options)  # refuses what cannot be used as given here, and not within the loop
    return _opened(options)


@contextmanager
def _opened(options: Mapping[str, Any]) -> Iterator[None]:
    loops: Loops = []
    before = _open.set((options, loops))
    try:
        with ExitStack() as replaced:
            for attribute in _REPLACED:
                replaced.enter_context(attribute.active())
            yield
    finally:
        _open.reset(before)
        for loop in loops:
            if loop.began:
                loop.close()


def _offloading(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepared(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        own, begin = vars(accelerator), functools.partial(prepare, accelerator)
        opened, loop = _open.get(), own.get(_LOOP)
        # A Trainer's accelerator is its own affair, and a loop that has a model goes on as it was.
        if opened is not None and (loop.model is None if loop is not None else "prepare_model" not in own):
            options, loops = opened
            if loop is None:
                limits.check("accelerate", limits.Setup(trainer=accelerator))
                loops.append(Loop(accelerator, options))
                begin = own.get(prepare.__name__, begin)
            elif loop not in loops:
                loop.restart(options)
                loops.append(loop)
        return begin(*args, **kwargs)

    return prepared


def _required(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def checked(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        if _open.get() is not None and accelerator._models and "prepare_model" not in vars(accelerator):
            raise ConfigError(
                "accelerator.prepare() got the model before accelerated() began, which offloads what is prepared in "
                "it: call prepare() within the context"
            )
        backward(accelerator, *args, **kwargs)

    return checked


_LOOP = "offmate"
"""The attribute of an accelerator that holds its loop."""
_REPLACED = [
    Replaced(lambda: import_module("accelerate").Accelerator, name, make)
    for name, make in (
        ("prepare", _offloading),
        ("prepare_model", _offloading),
        ("prepare_optimizer", _offloading),
        ("backward", _required),
    )
]
_running: dict[int, Loop] = {}
"""The loop whose model is called, by thread: contexts of the engine are a thread's, and open and close in turn."""


class Loop(Training):
    """A loop with an ``accelerator``, with the context's ``options``."""

    def __init__(self, accelerator: Any, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._accelerator = accelerator
        self._thread = 0
        """The thread that the model is prepared in."""
        self._done = 0
        """Updates by plans that are over."""
        self.began = False
        """True once a model that was prepared has been called."""
        self._step = ExitStack()
        """Ends the step that is watched."""
        self._watching = False
        self._around = ExitStack()
        """Lets calls of the model begin nothing any more."""
        self._beside: Loop | None = None
        """The loop beside which this one was refused; in a notebook nobody may have a name for it any more."""
        self.adapt(accelerator)
        for name in ("end_training", "free_memory"):
            vars(accelerator)[name] = self._closing(getattr(accelerator, name))
        accelerator.backward = self._called_before(accelerator.backward)
        vars(accelerator)[_LOOP] = self
        accelerator.register_save_state_pre_hook(lambda _models, _weights, folder: self._save(folder))
        accelerator.register_load_state_pre_hook(lambda _models, folder: self._load(folder))

    def restart(self, options: Mapping[str, Any]) -> None:
        """Go by the ``options`` of another context, in which the accelerator gets its next model."""
        super().__init__(options)

    # -- known by the accelerator ------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device that blocks run on."""
        return find_device(str(self._accelerator.device))  # that of an Accelerator has no number

    @property
    def _optimizer(self) -> Optimizer:
        own = {id(parameter) for parameter in self.model.parameters()}
        optimizers = [unwrapped(one) for one in optimizers_of(self._accelerator)]
        suitable = [
            one
            for one in dict.fromkeys(optimizers)
            if own & {id(p) for group in one.param_groups for p in group["params"]}
        ]
        if len(suitable) != 1:
            raise ConfigError(
                f"{len(suitable)} optimizers that accelerator.prepare() got have weights of "
                f"{type(self.model).__name__}, which is called with gradients; give it one optimizer, "
                "and call accelerator.free_memory() before it gets another"
            )
        return suitable[0]

    @property
    def _callbacks(self) -> Sequence[Any]:
        return ()

    @property
    def _updates_done(self) -> int:
        return self._done

    def _close_engine(self) -> None:
        if self.engine is not None and self.engine.plan is not None:
            self._done += self.engine.recorder.iterations
        super()._close_engine()

    def _folder(self) -> Path | None:
        return None if self.report_dir is None else Path(self.report_dir)

    def _without_backward(self) -> ConfigError:
        return ConfigError(
            f"{type(self.model).__name__} was called with gradients, and no backward of a loss followed when it was to "
            "show what to plan; call accelerator.backward(loss), and the model under torch.no_grad() where nothing is "
            "learned"
        )

    # -- the optimizer -----------------------------------------------------------------------------------------------

    def _let_clear(self, optimizer: Any) -> None:
        """Let ``optimizer.zero_grad(set_to_none=False)`` clear gradients, too, of which none is left to be zeroed."""
        zero_grad, zeroed = optimizer.zero_grad, set[nn.Parameter]()

        def check(*_: Any) -> None:
            if self._trains and any(parameter.grad is None for parameter in zeroed):
                raise ConfigError(
                    "zero_grad(set_to_none=False) was called, and a weight that had a gradient has none in this step, "
                    "which would be of zeros; use set_to_none=True"
                )

        def cleared(set_to_none: bool | None = None) -> None:
            if set_to_none is False and self._trains and self._accelerator.sync_gradients:
                if not zeroed:
                    unwrapped(optimizer).register_step_pre_hook(check)
                groups = optimizer.param_groups
                zeroed.update(p for group in groups for p in group["params"] if p.grad is not None)
                set_to_none = True
            zero_grad(set_to_none)

        optimizer.zero_grad = cleared

    @property
    def _trains(self) -> bool:
        return self.engine is not None and self.engine.plan is not None

    # -- the models --------------------------------------------------------------------------------------------------

    def _moves(self, thing: Any) -> bool:
        return isinstance(thing, nn.Module) and not any(p.requires_grad for p in thing.parameters())

    def _prepared(self, ready: Any, *, evaluates: bool) -> None:
        if isinstance(ready, Optimizer):
            self._let_clear(ready)
        if evaluates or not isinstance(ready, nn.Module) or self._moves(ready) or ready is self.model:
            return
        model = ready
        if self.model is not None:
            raise limits.SEVERAL_TRAIN.error(f"{type(model).__name__} beside {type(self.model).__name__}")
        self._around.enter_context(tiled(model, self.tile_tokens, self.blocks))  # may refuse it
        self._around.callback(around_calls(model, self._called))
        self.model, self._thread = model, threading.get_ident()
        self.settings = replace(self.settings, accumulate=self._accelerator.gradient_accumulation_steps)
        self._forget_plan(self.run_before)

    @contextmanager
    def _called(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Enclose a call of the model, for which there is an engine or a step that is watched."""
        if not self.began:
            if threading.get_ident() != self._thread:
                raise ConfigError(
                    f"{type(self.model).__name__} is called in another thread than accelerator.prepare() was: call "
                    "both in one"
                )
            if (other := _running.setdefault(self._thread, self)) is not self:
                self._beside = other
                raise limits.SEVERAL_TRAIN.error(f"{type(self.model).__name__} beside {type(other.model).__name__}")
            self.began = True
        # A GPU's own error names no setting, and passes through no context of the engine, which a loop keeps open.
        with self._in_memory(f"a call of {type(self.model).__name__}"):
            if not torch.is_grad_enabled():
                self._stream()
            elif not self._watching:
                self._step, self._watching = ExitStack(), True  # a step on trial calls the model, too
                watched = None
                try:
                    watched = self._enter(kwargs or args, self._step)
                finally:
                    self._watching = watched is not None
            yield

    def _stream(self) -> None:
        if self.engine is None and self._watched is None:
            self._install(None, self._budget)

    def _called_before(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def checked(*args: Any, **kwargs: Any) -> None:
            if self.model is None:  # given back, and trained plainly
                return backward(*args, **kwargs)
            if not self.began:
                raise ConfigError(
                    f"{type(self.model).__name__} was not called before accelerator.backward(): call what "
                    "accelerator.prepare() returned, and no part or method of it"
                )
            with self._in_memory(f"a backward of {type(self.model).__name__}"):
                return backward(*args, **kwargs)

        return checked

    def _stepped(self, error: BaseException | None) -> None:
        self._watching = False
        self._step.close()
        if isinstance(error, OffloadError) and self.plan is None:
            self.close()  # there is no plan, and perhaps another try with other settings

    # -- its end -----------------------------------------------------------------------------------------------------

    def _closing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def closed(*args: Any, **kwargs: Any) -> Any:
            if self._beside is not None:
                self._beside.close()
                self._beside = None
            self.close()
            return original(*args, **kwargs)

        return closed

    def close(self) -> None:
        """Give the weights back on the host, and be ready for another model."""
        with ExitStack() as undo:
            undo.callback(self._around.close)
            undo.callback(self._close_engine)
            self._step.close()
        if self.began:
            del _running[self._thread]
        self._watching, self.began, self.model, self._done = False, False, None, 0

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, folder: str) -> None:
        if self._accelerator.is_main_process:
            self.save_record(Path(folder))

    def _load(self, folder: str) -> None:
        before = read_record(Path(folder), self.say)
        if self.plan is None and self.model is not None:
            self._forget_plan(before)
            self.run_before.train_as_before(self.model, [self._optimizer], _UNFREEZE)
