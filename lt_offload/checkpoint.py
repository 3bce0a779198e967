"""Checkpoint files that are complete or absent, without a second copy in RAM. Knows files and tensors only.

A checkpoint of fp32 AdamW training takes twelve bytes per parameter, as much RAM as training itself. Lightning's own
file code serialises it into memory first; here tensors go straight from their storages to a partial file next to the
target, which replaces the target once it is on disk, and loading maps the file. The format is Lightning's: any Trainer
reads these files, and the other way round.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.foreign import reading

if TYPE_CHECKING:
    from lightning.pytorch.plugins import TorchCheckpointIO as _Base
else:
    _Base = object


def save(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint`` to the local file ``path``, whose previous contents stay until the new ones are on disk."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        torch.save(checkpoint, partial)
        _flush(partial)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush(target.parent)  # the renaming, too, survives a power cut


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


def _flush(path: Path) -> None:
    """Wait until what was written to a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AtomicCheckpointIO(_Base):
    """A Lightning ``CheckpointIO`` over :func:`save` and :func:`load`; remote paths are left to Lightning's own.

    Free of Lightning: ``bind`` puts it on the ``TorchCheckpointIO`` of a namespace.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint file."""
        local = _local(path)
        if local is None or storage_options is not None:  # Lightning explains that it takes no storage_options
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            save(checkpoint, local)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint file; tensors of a local one are on the host, whatever ``map_location`` says."""
        local = _local(path)
        if local is None:
            return super().load_checkpoint(path, map_location, weights_only)
        return load(local, weights_only=weights_only)


def _local(path: str | Path) -> Path | None:
    """Return ``path`` as a local path, None if it is on a remote file system."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    system, bare = url_to_fs(str(path))
    return Path(bare) if isinstance(system, LocalFileSystem) else None
