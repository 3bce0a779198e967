"""The strategy's hooks for checkpoints: they choose the files, the moment, and whether training waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lt_offload.errors import ConfigError
from lt_offload.execute.iteration import HALFWAY
from lt_offload.profiling.hardware import available_host_bytes
from lt_offload.strategy.checkpoint import sums
from lt_offload.strategy.checkpoint.archive import NewFile
from lt_offload.strategy.checkpoint.files import AtomicCheckpointIO, load_optimizer_state, local, reading_once
from lt_offload.strategy.checkpoint.foreign import check_checkpoint, check_optimizer, check_weights, loading_state
from lt_offload.strategy.first.planning import Planning
from lt_offload.strategy.namespaces import NAMESPACES, bind
from lt_offload.strategy.replay import KEY, Before, record
from lt_offload.units import format_bytes

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as _Base
else:
    _Base = object

_LATER = "; save after an optimizer step, for example with every_n_train_steps"
_UNFREEZE = (
    "if a callback unfroze them and added them to the optimizer, let it do so again in on_fit_start, before states are "
    "loaded, as Lightning's BaseFinetuning does"
)
_ASYNC = "AsyncCheckpointIO"
_STOCK = {f"{namespace}.plugins.io.async_plugin" for namespace in NAMESPACES}


class Checkpoints(Planning, _Base):
    """The part of the strategy that saves and loads checkpoints."""

    async_checkpoint: bool
    _unfinished: str | None = None
    """The reason why no checkpoint may be written after a run that has failed."""
    _failed = False
    """True if the run has ended with an error."""

    @property
    def checkpoint_io(self) -> Any:
        """The Trainer's plugin if it has one, else files without a second copy in RAM."""
        io: Any = self._checkpoint_io
        if io is None:
            self._checkpoint_io = io = bind(AtomicCheckpointIO, self.namespace, "plugins.TorchCheckpointIO")()
        elif (wrapper := _wrappers(io)[-1:]) and wrapper[0].checkpoint_io is None:
            wrapper[0].checkpoint_io = bind(AtomicCheckpointIO, self.namespace, "plugins.TorchCheckpointIO")()
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def check_checkpoint_io(self) -> None:
        """Raise ``ConfigError`` for plugins that cannot write these checkpoints."""
        top: Any = self.checkpoint_io
        wrappers = _wrappers(top)
        bottom = wrappers[-1].checkpoint_io if wrappers else top
        base = import_module(f"{self.namespace}.plugins").CheckpointIO
        if not isinstance(bottom, base):
            raise ConfigError(
                f"the plugin {type(top).__name__} writes checkpoints with {bottom!r}, which is no CheckpointIO; "
                f"leave that argument out: {type(top).__name__}()"
            )
        if self.async_checkpoint and not isinstance(bottom, AtomicCheckpointIO):
            raise ConfigError(
                f"async_checkpoint=True: checkpoints are written by the plugin {type(bottom).__name__}, which knows "
                "nothing of what training changes meanwhile; leave the plugin out, or async_checkpoint"
            )

    def check_copies(self) -> None:
        """Raise ``ConfigError`` if there is no RAM for a plugin's copies of all weights and states at every save."""
        engine, profile = self.engine, self.profile
        files, _ = self._files()
        names = [type(wrapper).__name__ for wrapper in _wrappers(self.checkpoint_io)]
        if files is not None or engine is None or engine.plan is None or profile is None:
            return
        if not any(base.__name__ == _ASYNC for w in _wrappers(self.checkpoint_io) for base in type(w).__mro__):
            return
        needed = sum(tensor.bytes + tensor.state_bytes for tensor in profile.tensors)
        left = engine.plan.host_budget_bytes - engine.host_bytes
        what = (
            f"the plugin {names[0]} copies all weights and states in RAM at every save, {format_bytes(needed)}: "
            "Lightning's own, and around nothing, AsyncCheckpointIO(), needs no copy"
        )
        if needed > left:
            raise ConfigError(f"{what}; host_memory leaves {format_bytes(max(0, left))}")
        rank_zero_warn(what)

    def _files(self) -> tuple[Any, bool]:
        """Return our own files, None if foreign code wraps them, and whether they are written while training goes on.

        Lightning's wrapper would copy every tensor in RAM and have a thread write the copies.
        """
        io: Any = self.checkpoint_io
        later = self.async_checkpoint
        for wrapper in _wrappers(io):
            # Only Lightning's own class is known to do nothing else; a subclass may do anything with what it is given.
            if type(wrapper).__name__ != _ASYNC or type(wrapper).__module__ not in _STOCK:
                return None, later
            later, io = True, wrapper.checkpoint_io
        return (io if isinstance(io, AtomicCheckpointIO) else None), later

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, complete on the host."""
        self._complete()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the optimizer's state, complete on the host."""
        self._complete()
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the checkpoint, unless it would not be complete; processes with owners write one file together."""
        unfinished = self._unfinished if self.engine is None else self.engine.unfinished()
        # A run that goes on has a complete one soon, and may have one of this name, which this would replace.
        if unfinished is not None and unfinished != HALFWAY and self._module.trainer.interrupted:
            rank_zero_warn(
                f"offmate: {filepath} has the weights of the last update: {unfinished}, and a run that is resumed from "
                "it begins anew behind them"
            )
        elif unfinished is not None:
            advice = "" if unfinished == HALFWAY else _LATER
            rank_zero_warn(f"offmate: {filepath} is not written: {unfinished}{advice}")
            return
        first = self.is_global_zero
        if first and self.profile is not None and self.plan is not None:
            checkpoint[KEY] = record(self._module, self.profile, self.plan, self.settings, self.growth.sizes)
        files, later = self._files()
        path = None if storage_options is not None else local(filepath)
        engine = self.engine
        if files is None or path is None or engine is None or engine.plan is None:
            if first:  # all processes have the same weights and states
                super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        # Every machine has all of it; the processes of the first one write.
        ranks = self.ranks if self.node_rank == 0 and engine.host_copies.have_owners else None
        if ranks is None and not first:
            return
        with engine.at_rest():
            snapshot = engine.host_copies.snapshot(available_host_bytes() // (2 * self.num_processes))
            begin: Any = partial(NewFile, path, checkpoint)
            if ranks is not None:
                from lt_offload.strategy.checkpoint.several import FilePart

                begin = partial(FilePart, ranks.machine, path, checkpoint, engine.host_copies)
            files.save_snapshot(begin, snapshot, later=later)

    def finish_saves(self) -> None:
        """Block until all checkpoints are written; raises ``CheckpointError`` if one could not be.

        After a run that has failed a second error must not hide the first: it is a warning.
        """
        files, _ = self._files()
        if files is None:
            return
        try:
            files.teardown()
        except Exception as error:
            if not self._failed:
                raise
            rank_zero_warn(f"offmate: {error}")

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; refuse files that no Trainer has written, or that are damaged."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        check_checkpoint(checkpoint, checkpoint_path)
        if (file := local(checkpoint_path)) is not None:
            training = self._module.trainer.state.fn == "fit"
            # Without training only weights are needed, and reading the states as well would take most of the time.
            sums.check(file, checkpoint, only=None if training else "state_dict")
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the host copies."""
        check_weights(checkpoint["state_dict"], self._module.state_dict(), strict=strict)
        with self._rewriting(), reading_once(self._module, checkpoint["state_dict"]):
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state into host memory of its own, in the dtypes in which it was saved.

        Weights that the run of the checkpoint trained are unfrozen, others are frozen.
        """
        Before.of(checkpoint.get(KEY)).train_as_before(self._module, self.optimizers, _UNFREEZE)
        saved = {name: t.dtype for name, t in checkpoint["state_dict"].items() if isinstance(t, Tensor)}
        unchanged = {p for name, p in self._module.named_parameters() if saved.get(name) == p.dtype}
        # All are checked before the first one is changed: an error half way would leave a mixture of two states.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            check_optimizer(optimizer, state)
        with self._rewriting():
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                with loading_state(optimizer):
                    load_optimizer_state(optimizer, state, unchanged)

    def _complete(self) -> None:
        """Wait for copies to the host, unless the iteration was left halfway."""
        if self.engine is not None and not self.engine.halfway:
            self.engine.drain()

    @contextmanager
    def _rewriting(self) -> Iterator[None]:
        if self.engine is not None:
            self.engine.drain()
            self.engine.invalidate()
        yield


def _wrappers(io: Any) -> list[Any]:
    wrappers = []
    while hasattr(io, "checkpoint_io"):
        wrappers.append(io)
        io = io.checkpoint_io
    return wrappers
