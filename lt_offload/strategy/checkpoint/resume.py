"""Checkpoints from which training goes on as if it had never stopped, one of them at Ctrl-C and SIGTERM.

The callback is written without Lightning; :func:`resume_class` puts it on the ``Callback`` of a namespace.
"""

from __future__ import annotations

import copy
import signal
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DistributedSampler

from lt_offload.compat.lightning import (
    adds_up,
    combined_loader,
    data_fetcher,
    in_turn,
    is_training_done,
    take_up_states,
)
from lt_offload.strategy.checkpoint import files as files
from lt_offload.strategy.checkpoint import progress, random_state
from lt_offload.strategy.checkpoint.data_order import Repeatable, loader_parts
from lt_offload.strategy.checkpoint.interrupts import Interrupts
from lt_offload.strategy.namespaces import bind

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object

KEY = "exact_resume"
"""The callback's key in a checkpoint."""
FILE = "interrupted.ckpt"
"""The checkpoint of an interrupted run, beside those of its ModelCheckpoint."""
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes by signal, as shells count them: 128 and the signal's number."""


class ExactResume(_Base):
    """Makes every checkpoint one from which training goes on as if it had never stopped, and writes one at Ctrl-C.

    The offmate strategy gives one to its Trainer by itself; recipes list it. With another strategy it keeps the random
    states all the same, but the order of a plain DataLoader only from one epoch to the next.

    Args:
        random_states: keep the states of all generators in checkpoints and set them when training goes on: Python's,
            NumPy's, torch's on the host and on all CUDA devices, those of loaders, samplers, data sets and modules.
            The batches of the epoch that training has seen are fetched again, so that the others come in the order of
            the first run. If false, a resumed run has other dropout masks than an uninterrupted one.
        on_interrupt: at the first Ctrl-C or SIGTERM, end the iteration, all of its micro-batches, write
            ``interrupted.ckpt`` beside the checkpoints of the first ModelCheckpoint, and leave as Lightning does: with
            ``KeyboardInterrupt`` handled (exit code 1; ``lt-finetune``: 130), or with ``SIGTERMException`` (exit code
            143). A second one does not wait. Does nothing where checkpointing is off (``enable_checkpointing=False``).
            Several processes all leave after the same iteration, whichever of them the signal has come to.
    """

    namespace = "lightning.pytorch"

    def __init__(self, *, random_states: bool = True, on_interrupt: bool = True) -> None:
        super().__init__()
        self.random_states = random_states
        self.on_interrupt = on_interrupt
        self._interrupts = Interrupts()
        self._listens = False
        self._loaded: dict[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None
        """The random states after the training batch before the present validation."""

    # -- before training ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that checkpoints can be written, and remove the partial ones of killed runs."""
        if stage == "fit" and not trainer.fast_dev_run and trainer.is_global_zero:
            for folder in _folders(trainer):
                files.prepare(folder)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Set the loops to the saved moment; keep random states until training begins, as hooks before it draw, too."""
        # A copy: one tensor that is a page of the file would keep all of it mapped, and on the disk if it is removed.
        self._loaded = copy.deepcopy(checkpoint.get(KEY)) if trainer.state.fn == "fit" else None
        if self._loaded is not None:
            progress.rewrite(checkpoint["loops"]["fit_loop"], self._loaded["moment"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on where the checkpoint was made."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._resume(trainer, pl_module, loaded)
        self._listens = bool(self.on_interrupt and trainer.checkpoint_callbacks and not trainer.fast_dev_run)
        if self._listens:
            self._interrupts.install()

    def on_planning_start(self) -> None:
        """Let a signal end the run at once: nothing has been updated by the first step."""
        self._interrupts.at_once = True

    def on_planning_end(self) -> None:
        """Wait for the end of the iteration again."""
        self._interrupts.at_once = False

    def _resume(self, trainer: Any, pl_module: Any, loaded: dict[str, Any]) -> None:
        before, states = loaded["processes"], None
        if before != trainer.world_size:
            _share_anew(trainer, before, draws=self.random_states)
        elif self.random_states and (states := loaded["random"][trainer.global_rank]) is not None:
            _warn_of_workers(_loaders(trainer), trainer.current_epoch)
            _take_up_data(trainer, loaded["loaders"], midway=progress.is_midway(trainer))
            for name in random_state.restore(_generators(trainer, pl_module), states):
                rank_zero_warn(f"the generator {name} is only in the checkpoint or only in this run; it stays as it is")
        progress.go_on(trainer, loaded["moment"])
        self._before_validation = states

    # -- training ----------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the checkpoint after a signal, unless the epoch ends here."""
        due = progress.moment(trainer) == "validation due"
        self._before_validation = _states(trainer, pl_module) if due and self.random_states else None
        # Where the epoch ends ``on_train_epoch_end`` follows, and writes one that begins with the next.
        if due or not is_training_done(trainer):
            self._leave_if_asked(trainer)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Write the checkpoint in the middle of a validation, which begins again when the run is resumed."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._leave_if_asked(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the checkpoint between two epochs."""
        progress.end_epoch(trainer)
        for loader in _repeatable(trainer):
            loader.forget()
        self._leave_if_asked(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the signals back."""
        self.stop_listening()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the signals back."""
        self.stop_listening()

    def stop_listening(self) -> None:
        """Give the signals back."""
        self._interrupts.remove()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the random states and the moment of the epoch."""
        moment = progress.moment(trainer)
        states = None
        if self.random_states:
            validating = moment == "validation running"
            # A validation that runs is done again, and has to draw what it drew: the states before it are what counts.
            states = self._before_validation if validating else _states(trainer, pl_module)
        # Taken from the loops' states, where a stock Trainer would find no loader for them.
        counts = checkpoint["loops"]["fit_loop"]["state_dict"]
        loaders = [] if _mixed(trainer) else list(counts.pop("combined_loader", []))
        checkpoint[KEY] = {
            "moment": moment,
            "random": _of_all_processes(trainer, states),
            "loaders": loaders,
            "processes": trainer.world_size,
        }

    def _leave_if_asked(self, trainer: Any) -> None:
        """Leave after a signal, unless gradients of earlier batches wait for an update: they are not saved."""
        if adds_up(trainer):
            return
        if (received := self._received(trainer)) is not None:
            self._leave(trainer, received)

    def leave_before_start(self, trainer: Any) -> None:
        """Leave after a signal in ``on_train_start``; a run that goes on from a checkpoint needs no other one."""
        if (received := self._received(trainer)) is not None:
            self._leave(trainer, received, saves=not progress.has_begun(trainer))

    def _received(self, trainer: Any) -> signal.Signals | None:
        """Return the signal that has come to this process, or to another of the run; all of them ask together."""
        received = self._interrupts.received
        if not self._listens or trainer.world_size == 1:
            return received
        number = torch.tensor(0 if received is None else received.value, device=trainer.strategy.root_device)
        number = trainer.strategy.reduce(number, reduce_op="max")
        return signal.Signals(int(number)) if number else None

    def _leave(self, trainer: Any, number: signal.Signals, *, saves: bool = True) -> NoReturn:
        if saves:
            path = trainer.strategy.broadcast(_folders(trainer)[0] / FILE)
            trainer.save_checkpoint(path)
            getattr(trainer.strategy, "finish_saves", lambda: None)()
            rank_zero_info(f"{number.name}: step {trainer.global_step} is saved in {path}")
        if trainer.world_size == 1:
            self._interrupts.pass_on()
        else:  # Lightning's handler would send the signal to processes that know of it and may have left
            self._interrupts.remove()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise import_module(f"{self.namespace}.utilities.exceptions").SIGTERMException(EXIT_CODES[number])


def add(trainer: Any, namespace: str) -> ExactResume:
    """Give ``trainer`` an ``ExactResume`` unless it has one; behind all other callbacks, whose changes it must see."""
    own = [callback for callback in trainer.callbacks if isinstance(callback, ExactResume)]
    for callback in own:
        trainer.callbacks.remove(callback)
    own = own or [resume_class(namespace)()]
    trainer.callbacks.extend(own)
    return own[0]


def resume_class(namespace: str) -> type[Any]:
    """Return the callback's class for a Lightning namespace."""
    return bind(ExactResume, namespace, "callbacks.Callback", module="lt_offload.strategy.lightning")


# -- random states and data -------------------------------------------------------------------------------------------


def _states(trainer: Any, pl_module: Any) -> dict[str, Any]:
    return random_state.capture(_generators(trainer, pl_module))


def _of_all_processes(trainer: Any, states: dict[str, Any] | None) -> list[dict[str, Any] | None]:
    """Return the states of all processes, for the one that writes the checkpoint."""
    every = [states] * trainer.world_size
    if trainer.world_size > 1 and states is not None:
        trainer.strategy.barrier("of a checkpoint")  # without it, the next line hangs if a process does not come
        torch.distributed.all_gather_object(every, states)
    return every


def _generators(trainer: Any, pl_module: Any) -> dict[str, Any]:
    owners: dict[str, object] = {f"module.{name}": module for name, module in pl_module.named_modules()}
    owners["datamodule"] = trainer.datamodule
    for index, loader in enumerate(_loaders(trainer)):
        owners |= {f"{index}.{name}": part for name, part in loader_parts(loader).items()}
    return random_state.generators(owners, trainer.strategy.root_device if trainer.world_size > 1 else None)


def _loaders(trainer: Any) -> list[Any]:
    combined = combined_loader(trainer.fit_loop)
    return [] if combined is None else list(combined.flattened)


def _warn_of_workers(loaders: list[Any], epoch: int) -> None:
    """Warn that workers which live through all epochs have random states that no checkpoint holds."""
    if epoch > 0 and any(getattr(loader, "persistent_workers", False) for loader in loaders):
        rank_zero_warn(
            "a DataLoader has persistent_workers=True: what its workers draw at random (not the order of the data) "
            f"goes on from epoch to epoch, is in no checkpoint, and begins anew in epoch {epoch}; with "
            "persistent_workers=False this run would go on exactly"
        )


def _repeatable(trainer: Any) -> list[Repeatable]:
    return [loader for loader in _loaders(trainer) if isinstance(loader, Repeatable)]


def _mixed(trainer: Any) -> bool:
    """Return whether there are loaders that save their position themselves; Lightning then restores all together."""
    return any(hasattr(loader, "state_dict") and not isinstance(loader, Repeatable) for loader in _loaders(trainer))


def _take_up_data(trainer: Any, states: list[Any], *, midway: bool) -> None:
    """Bring the loaders to the batch that comes next in the epoch of the checkpoint; nothing if that has ended."""
    fit_loop = trainer.fit_loop
    fetcher, repeated, mixed = data_fetcher(fit_loop), _repeatable(trainer), _mixed(trainer)
    # Of loaders that were made before, when a schedule counted the steps.
    if take_up_states(fit_loop) and midway:
        iter(fetcher)
    if not midway:
        for loader in repeated:
            loader.forget()
        return
    if not mixed and len(states) != len(repeated):
        rank_zero_warn(
            f"the checkpoint holds the order of {len(states)} training dataloaders, this run has {len(repeated)} whose "
            "order can be set: its epoch begins at the first batch again"
        )
        return
    if states and not mixed:
        for loader, state in zip(repeated, states, strict=True):
            loader.load_state_dict(state)
        iter(fetcher)
    seen = fit_loop.epoch_loop.batch_progress.current.ready
    if mixed and not in_turn(fit_loop):
        # Those that save their position themselves are there already: only the others have batches to drop.
        _begin_epoch(trainer)
        if repeated and fetcher.length is None:
            rank_zero_warn(
                "a training dataloader that keeps its position itself has no length, so that a batch of every loader "
                "was fetched ahead: the others give the first batch of the epoch once more before they go on; give it "
                "a __len__"
            )
        for loader in repeated:
            loader.drop(seen)
    elif repeated:
        _drop(trainer, seen)


def _share_anew(trainer: Any, before: int, *, draws: bool) -> None:
    """Go on in the epoch of a checkpoint of ``before`` processes, whose batches are not those of these.

    A loader with ``moved`` shares out the rest of the epoch itself. A sampler of ``torch.distributed`` deals one order
    to any number of processes: the batches of the run before are fetched and dropped.
    ``draws``: the random states are kept, and with them the order of data.
    """
    fit_loop, now = trainer.fit_loop, trainer.world_size
    kept = take_up_states(fit_loop)
    loaders = _loaders(trainer)
    seen = fit_loop.epoch_loop.batch_progress.current.ready
    own = next((loader.moved for loader in loaders if hasattr(loader, "moved")), None)
    ours = draws and own is None and not _mixed(trainer)
    skipped, twice = divmod(seen * before, now)
    # Whether batches are left is a question of these counts.
    progress.move(trainer, skipped - seen if ours else own or 0)
    midway = progress.is_midway(trainer)
    if kept and midway:
        iter(data_fetcher(fit_loop))  # as where as many processes go on
    if own is not None:  # it has said what it means
        return
    said = f"the checkpoint is of {before} process{'es' * (before > 1)}, this run has {now}: random numbers begin anew"
    # Loaders that keep their position themselves, streams among them, decide what comes next.
    if not ours or not midway:
        rank_zero_warn(said)
        return
    repeated = _repeatable(trainer)
    if before > 1 and len(repeated) == len(loaders) and all(map(_is_dealt, loaders)):
        again = f", but the last {twice} batches, which do not go up in {now}, come again" if twice else ""
        rank_zero_warn(f"{said}; the epoch goes on behind the {seen * before} batches that it has given{again}")
        _drop(trainer, skipped)
        return
    rank_zero_warn(
        f"{said}, and so does the order of this epoch, of which {seen * before} batches were trained on: samples may "
        "come twice in it, or not at all. Resume with as many processes, or from a checkpoint of an epoch's end"
    )


def _is_dealt(loader: Any) -> bool:
    """Return whether the order of ``loader`` is the same for any number of processes, which take samples in turn."""
    return isinstance(getattr(loader, "sampler", None), DistributedSampler)


def _drop(trainer: Any, count: int) -> None:
    fetcher = data_fetcher(trainer.fit_loop)
    _begin_epoch(trainer)
    for _ in range(count):
        next(fetcher)
    fetcher.fetched -= count  # Lightning adds them itself


def _begin_epoch(trainer: Any) -> None:
    """Tell samplers the epoch: Lightning does it too late, and that of a new run to loaders that it made before."""
    for loader in _loaders(trainer):
        if isinstance(sampler := getattr(loader, "sampler", None), DistributedSampler):
            sampler.set_epoch(trainer.fit_loop.epoch_progress.current.processed)


def _folders(trainer: Any) -> list[Path]:
    """Return the local folders into which checkpoints of this run go."""
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    local = [path for folder in folders if folder is not None and (path := files.local(folder)) is not None]
    return list(dict.fromkeys(local)) or [Path(trainer.default_root_dir) / "checkpoints"]
