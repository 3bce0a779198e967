"""Checkpoint files that are complete or absent, without a second copy in RAM.

A checkpoint of fp32 AdamW training takes twelve bytes per parameter, as much RAM as training itself. Lightning's own
file code serialises it into memory first; here tensors go straight from their storages to a partial file next to the
target, which replaces the target once it is on disk, and loading maps the file. The format is Lightning's: any Trainer
reads these files, and the other way round.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lt_offload.errors import CheckpointError
from lt_offload.strategy.checkpoint.foreign import reading
from lt_offload.strategy.namespaces import bind
from lt_offload.units import format_bytes

if TYPE_CHECKING:
    from lightning.pytorch.plugins import TorchCheckpointIO as _Base
else:
    _Base = object


_SUFFIX = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LITTLE = 1 << 20
"""Bytes: a disk with less room than this is taken for full where torch's writer fails."""


def prepare(folder: Path) -> None:
    """Make sure that ``folder`` can be made and written to, and remove what killed runs have left of checkpoints there.

    Raises:
        CheckpointError: if no file can be written there.
    """
    probe = folder / f".{os.getpid()}{_SUFFIX}"
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        for path in absent:  # whoever saves something makes them
            path.rmdir()
    except OSError as error:
        raise CheckpointError(_explained(folder / "*", error)) from error
    for leftover in folder.glob(f".*{_SUFFIX}"):
        with leftover.open("rb") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # a run that lives is writing it
            leftover.unlink(missing_ok=True)


def save(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint`` to the local file ``path``, whose previous contents stay until the new ones are on disk.

    Raises:
        CheckpointError: if the disk is full or the folder cannot be written; nothing is left of the new file.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}{_SUFFIX}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_room(checkpoint, target)
        try:
            with _locked(partial):
                torch.save(checkpoint, partial)
                _flush(partial)
                partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _flush(target.parent)  # the renaming, too, survives a power cut
    except OSError as error:
        raise CheckpointError(_explained(target, error)) from error
    except RuntimeError as error:  # torch's writer does not say why it failed
        if shutil.disk_usage(target.parent).free > _LITTLE:
            raise
        raise CheckpointError(_explained(target, OSError(errno.ENOSPC, ""))) from error


def load(path: str | Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the checkpoint in the local file ``path``; its tensors are pages of the file until they are written to.

    Args:
        path: a file of :func:`save`, of a stock Trainer, or of an old one (those are read into RAM).
        weights_only: as for ``torch.load``.

    Raises:
        FileNotFoundError: if there is no such file.
        ConfigError: if it cannot be read.
    """
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {source}")
    with reading(source):
        mapped = zipfile.is_zipfile(source)
        checkpoint: dict[str, Any] = torch.load(source, map_location="cpu", mmap=mapped, weights_only=weights_only)
    return checkpoint


def newest(folder: Path) -> Path | None:
    """Return the newest file in ``folder`` that training can go on from, None if there is none."""
    paths = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((path for path in paths if is_complete(path)), None)


def is_complete(path: Path) -> bool:
    """Return whether ``path`` is a whole file with everything that training needs, not weights alone."""
    if not zipfile.is_zipfile(path):  # its table of contents is at the end
        return False
    try:
        checkpoint = load(path, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError):
        return False
    return {"state_dict", "optimizer_states", "lr_schedulers", "loops"} <= checkpoint.keys()


def load_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any], unchanged: Set[nn.Parameter]) -> None:
    """Load ``saved`` into ``optimizer``, in host memory of its own and in the dtypes in which it was saved.

    ``Optimizer.load_state_dict`` casts states to the dtype of their parameter, which truncates the fp32 states of bf16
    weights; and it keeps tensors that are pages of the checkpoint file.

    Args:
        optimizer: over parameters whose ``data`` is on the host.
        saved: from ``optimizer.state_dict()``.
        unchanged: parameters of the dtype that they had when ``saved`` was made; states of others are cast.
    """
    optimizer.load_state_dict(dict(saved))
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        state = optimizer.state[parameter] if index in saved["state"] else {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                source = saved["state"][index][key] if parameter in unchanged else value
                state[key] = torch.empty_like(source, device="cpu").copy_(source)


def _check_room(checkpoint: dict[str, Any], target: Path) -> None:
    """Raise before anything is written if ``checkpoint`` cannot fit beside the file that it replaces."""
    storages = {}
    for leaf in tree_leaves(checkpoint):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    needed, free = sum(storages.values()), shutil.disk_usage(target.parent).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"it takes {format_bytes(needed)}")


def _explained(target: Path, error: OSError) -> str:
    """Return one sentence on why ``target`` was not written, and the way out."""
    folder = next(parent for parent in target.parents if parent.exists())
    way_out = "choose another folder with dirpath= of ModelCheckpoint or trainer.default_root_dir"
    if error.errno in _FULL:
        size = f"{error.strerror}, " if error.strerror and "takes" in error.strerror else ""
        free = format_bytes(shutil.disk_usage(folder).free)
        return f"checkpoint {target} was not written, the disk is full ({size}{free} are free); make room, or {way_out}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"checkpoint {target} cannot be written, {folder} is read-only ({error.strerror}); {way_out}"
    return f"checkpoint {target} cannot be written: {error.strerror or error}; {way_out}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Make ``path`` and hold a lock on it: the mark of a process that lives and writes it."""
    while True:
        with path.open("ab") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield
                return
        # another process took the new file for a leftover before it was locked


def _flush(path: Path) -> None:
    """Wait until what was written to a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AtomicCheckpointIO(_Base):
    """A Lightning ``CheckpointIO`` over :func:`save` and :func:`load`; remote paths are left to Lightning's own.

    Written without Lightning; ``namespaces.bind`` puts it on the ``TorchCheckpointIO`` of a namespace.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint file."""
        local_path = local(path)
        if local_path is None or storage_options is not None:  # Lightning explains that it takes no storage_options
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            save(checkpoint, local_path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint file; tensors of a local one are on the host, whatever ``map_location`` says."""
        local_path = local(path)
        if local_path is None:
            return super().load_checkpoint(path, map_location, weights_only)
        return load(local_path, weights_only=weights_only)


def atomic(io: Any, namespace: str) -> Any:
    """Return ``io`` if it writes files itself, an :class:`AtomicCheckpointIO` if it is None, or with one within."""
    if io is not None and getattr(io, "checkpoint_io", io) is not None:
        return io
    ours = bind(AtomicCheckpointIO, namespace, "plugins.TorchCheckpointIO")()
    if io is None:
        return ours
    io.checkpoint_io = ours  # a wrapper around none
    return io


def local(path: str | Path) -> Path | None:
    """Return ``path`` as a local path, None if it is on a remote file system."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    system, bare = url_to_fs(str(path))
    return Path(bare) if isinstance(system, LocalFileSystem) else None
