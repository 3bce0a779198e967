"""Checkpoint files, read and written without a second copy in RAM.

A checkpoint of fp32 AdamW training takes twelve bytes per parameter, as much RAM as training itself. Lightning's own
file code serialises it into memory first; here tensors go straight from their storages to the file, and loading maps
the file. The format is Lightning's: any Trainer reads these files, and the other way round.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.compat.torch import version_of
from lt_offload.execute.device.lanes import plain_torch
from lt_offload.execute.memory.snapshots import HostSnapshot
from lt_offload.machine.pages import forget
from lt_offload.model.optimizers import put, tensor_at, tensors_of
from lt_offload.replacing import remove_leftovers
from lt_offload.strategy.checkpoint.archive import NewFile, Reading, explaining
from lt_offload.strategy.checkpoint.foreign import reading
from lt_offload.units import format_bytes

if TYPE_CHECKING:
    from lightning.pytorch.plugins import TorchCheckpointIO as _Base

    from lt_offload.strategy.checkpoint.several import FilePart
else:
    _Base = object


_LITTLE_MEMORY = 16 << 20
"""Bytes that are always copied for a checkpoint that is written later, however little RAM is left."""
_LITTLE = 1 << 20
"""Bytes: pages of smaller tensors stay in RAM."""
_VERSION_AS_LOADED = 1
"""Torch's count of in-place changes of a tensor that was just loaded; a page that was written is not the file's."""


def prepare(folder: Path) -> None:
    """Check that ``folder`` can be written to, or made, else ``CheckpointError``; remove parts that killed runs left.

    Nothing is made, as other runs may begin or end in the same folder.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    # Only a trial shows it: the permissions of a folder on a read-only disk may allow writing.
    with explaining(folder / "*"), tempfile.TemporaryFile(dir=nearest):
        pass
    remove_leftovers(folder)


def save(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint`` to the local file ``path``, whose previous contents stay until the new ones are on disk.

    Raises ``CheckpointError`` if the disk is full or the folder cannot be written; nothing is left of the new file.
    """
    file = NewFile(Path(path), checkpoint)
    file.write(file.records, nullcontext)


def load(path: str | Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the checkpoint in the local file ``path``; its tensors are pages of the file until they are written to.

    It is a file of :func:`save`, of a stock Trainer, or an old one (those are read into RAM); ``weights_only`` as for
    ``torch.load``. Raises ``FileNotFoundError`` if there is no such file, and ``ConfigError`` if it cannot be read.
    """
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {source}")
    with reading(source):
        mapped = zipfile.is_zipfile(source)
        checkpoint: dict[str, Any] = torch.load(source, map_location="cpu", mmap=mapped, weights_only=weights_only)
    return checkpoint


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, None if there is none."""
    # A link may name a file that is not complete yet.
    present = [path for path in folder.glob("*.ckpt") if path.exists()]
    paths = sorted(present, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((path for path in paths if is_complete(path)), None)


def is_complete(path: Path) -> bool:
    """Return whether ``path`` is a whole file with everything that training needs, not weights alone."""
    if not zipfile.is_zipfile(path):  # its table of contents is at the end
        return False
    try:
        # The file may be anybody's: without weights_only, a look at it would run the code in its pickle.
        checkpoint = load(path, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError):
        return False
    return {"state_dict", "optimizer_states", "lr_schedulers", "loops"} <= checkpoint.keys()


@contextmanager
def reading_once(module: nn.Module, saved: Mapping[str, Any]) -> Iterator[None]:
    """Enclose loading ``saved``, the result of :func:`load`, into ``module``: pages that were read leave RAM at once.

    Without this, the process would take all weights twice, as pages of the file and as parameters.
    """
    with ExitStack() as hooks:
        for path, part in module.named_modules():
            own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            names = [f"{path}.{name}" if path else name for name, _ in own]
            forget_those = partial(_forget_named, saved, names)
            hooks.callback(part.register_load_state_dict_post_hook(forget_those).remove)
        yield
    _forget_named(saved, saved.keys())  # of modules that have several names, too


def _forget_named(saved: Mapping[str, Any], names: Iterable[str], *_: object) -> None:
    for name in names:
        if isinstance(tensor := saved.get(name), Tensor):
            _forget(tensor)


def _forget(tensor: Tensor) -> None:
    """Take the pages of a mapped ``tensor`` out of RAM; small tensors, and those that a hook has written to, stay."""
    if tensor.nbytes >= _LITTLE and version_of(tensor) <= _VERSION_AS_LOADED:
        forget(tensor)


def load_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any], unchanged: Set[nn.Parameter]) -> None:
    """Load ``saved`` into ``optimizer``, in host memory of its own and in the dtypes in which it was saved.

    Pages of a mapped file that were read leave RAM at once.

    ``Optimizer.load_state_dict`` casts states to the dtype of their parameter, which truncates the fp32 states of bf16
    weights; and it keeps tensors that are pages of the checkpoint file. ``unchanged`` are parameters of the dtype that
    they had when ``saved`` was made; states of others are cast.
    """
    optimizer.load_state_dict(dict(saved))
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        state = optimizer.state[parameter] if index in saved["state"] else {}
        for place, value in tensors_of(state).items():
            source = tensor_at(saved["state"][index], place) if parameter in unchanged else value
            assert source is not None
            put(state, place, torch.empty_like(source, device="cpu").copy_(source))
            if (read := tensor_at(saved["state"][index], place)) is not None:
                _forget(read)


Job = Callable[[], None]


class Writer:
    """A queue of jobs that run one after the other on a thread of its own; :meth:`check` raises their first error.

    The thread ends with the process, in the middle of a job if need be: files are complete or absent all the same.
    """

    def __init__(self) -> None:
        self._jobs: Queue[Job | None] = Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="lt_offload checkpoints", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Do ``job`` when all before it are over."""
        self._jobs.put(job)

    def if_all_went_well(self, job: Job) -> None:
        """Do ``job`` when all before it are over; leave it out if one of them has failed."""
        self.submit(lambda: job() if self._error is None else None)

    def wait(self) -> None:
        """Block until nothing is left to do."""
        self._jobs.join()

    def check(self) -> None:
        """Raise the first error of a job, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for all jobs, and end the thread."""
        self.wait()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # it belongs to whoever asks next
                # The first one: those behind it mostly follow from it.
                self._error = self._error or error
            del job  # or an idle thread would keep a checkpoint
            self._jobs.task_done()


class AtomicCheckpointIO(_Base):
    """A Lightning ``CheckpointIO`` over :func:`save` and :func:`load`; remote paths are left to Lightning's own.

    Written without Lightning; ``namespaces.bind`` puts it on the ``TorchCheckpointIO`` of a namespace.
    """

    _writer: Writer | None = None
    """The thread that writes checkpoints while training goes on; each object has its own."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint file."""
        local_path = local(path)
        if local_path is None or storage_options is not None:  # Lightning explains that it takes no storage_options
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            save(checkpoint, local_path)

    def save_snapshot(self, begin: Callable[[], NewFile | FilePart], snapshot: HostSnapshot, *, later: bool) -> None:
        """Write a checkpoint file, or one of several processes' part of it, in the order in which training changes it.

        ``begin`` makes the file, as the checkpoint is now; all processes that have a part in it call this.
        ``snapshot``, of tensors in it that training will change, is closed. ``later``: it is written on a thread of its
        own, while training goes on. What ``snapshot`` does not hold is copied first; if there is no room for that, it
        is written now. Each process decides for itself. Raises ``CheckpointError`` if it cannot be written, or one that
        was to be written later could not.
        """
        with ExitStack() as undo:
            undo.callback(snapshot.close)
            if self._writer is not None:
                self._writer.check()
            file = begin()
            undo.callback(file.close)
            # In the order in which training changes them: in another one, more would have to be copied aside.
            records = sorted(file.records, key=lambda r: -1 if r.storage is None else snapshot.rank(r.storage))
            loose = [r for r in records if r.storage is not None and not snapshot.holds(r.storage)]
            nbytes = sum(record.nbytes for record in loose)
            if later and nbytes > max(snapshot.room, _LITTLE_MEMORY):
                rank_zero_warn(
                    f"checkpoint {file.path} is written while training waits: it holds {format_bytes(nbytes)} that is "
                    f"no weight and no state of the optimizer, and RAM for a copy of {format_bytes(snapshot.room)} is "
                    "left"
                )
                later = False
            if not later:
                self.wait()
                file.write(records, _reading(snapshot))
                return
            with plain_torch():
                for record in loose:
                    record.storage = record.storage.clone()  # type: ignore[union-attr]
            if self._writer is None:
                self._writer = Writer()
            # From here on the writer closes file and snapshot, when it has written it.
            own = undo.pop_all()

            def write() -> None:
                with own:
                    file.write(records, _reading(snapshot))

            self._writer.submit(write)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file, once all that are to be written are complete: till then it may be the last complete one."""
        if self._writer is not None:
            self._writer.if_all_went_well(partial(super().remove_checkpoint, path))
        else:
            super().remove_checkpoint(path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint file; tensors of a local one are on the host, whatever ``map_location`` says."""
        self.wait()
        local_path = local(path)
        if local_path is None:
            return super().load_checkpoint(path, map_location, weights_only)
        return load(local_path, weights_only=weights_only)

    def wait(self) -> None:
        """Block until all files are written."""
        if self._writer is not None:
            self._writer.wait()

    def teardown(self) -> None:
        """Block until all files are written; raises ``CheckpointError`` if one could not be."""
        if (writer := self._writer) is not None:
            writer.close()
            self._writer = None
            writer.check()


def _reading(snapshot: HostSnapshot) -> Reading:
    return lambda storage: snapshot.reading(storage) if snapshot.holds(storage) else nullcontext(storage)


def local(path: str | Path) -> Path | None:
    """Return ``path`` as a local path, None if it is on a remote file system."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    system, bare = url_to_fs(str(path))
    return Path(bare) if isinstance(system, LocalFileSystem) else None
