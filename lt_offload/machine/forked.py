"""Runs a function in a copy of this process, so that whatever it changes stays there.

Taking a batch runs a user's code: data sets with generators of their own, collate functions that count, samplers that
keep a position. No copy of such an object is sure to be complete; a forked process is.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from lt_offload.compat.torch import tree_leaves
from lt_offload.errors import ConfigError

PATIENCE = 300.0
"""Seconds after which a process that has given nothing is taken to hang: a fork inherits locks that nobody opens."""


def in_a_fork(work: Callable[[], Any], *, what: str, way_out: str) -> Any:
    """Return what ``work`` returns in a forked process; objects, generators and files of this process do not notice.

    Errors of ``work`` are raised here, too. Its result has to be pickled, without tensors on a GPU. ``what`` is done
    and the ``way_out`` are for errors. Raises ``ConfigError`` if there is no fork here, or the process ends or hangs
    without a result.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError(f"{what} needs os.fork(), which this system does not have; {way_out}")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, work), name="lt_offload asks the data")
    with receiver, _read_positions_kept():
        with warnings.catch_warnings():  # from Python 3.12 on; data loaders' workers are forked from threads as well
            warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
            process.start()
        # Ours: as long as one end to write to is open, the end of the child is not seen as the end of the pipe.
        sender.close()
        try:
            ready = wait([receiver], timeout=PATIENCE)
            answer = receiver.recv_bytes() if ready else None
        except EOFError:
            process.join()
            raise ConfigError(
                f"{what}: the process that did it ended without a result, exit code {process.exitcode}; {way_out}"
            ) from None
        finally:
            # Also after an answer, so that ``join`` cannot hang: threads that ``work`` has started need not end.
            process.kill()
            process.join()
    if answer is None:
        raise ConfigError(f"{what} did not end within {PATIENCE:g} s in a process of its own; {way_out}")
    outcome, value = pickle.loads(answer)
    if outcome == "returned":
        return value
    if outcome == "raised":
        raise value
    raise ConfigError(f"{what} failed in a process of its own ({value}); {way_out}")


def _serve(pipe: Connection, work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)  # the pool of threads has not been forked
    pipe.send_bytes(_answer(work))
    pipe.close()


def _answer(work: Callable[[], Any]) -> bytes:
    """Return an outcome and what belongs to it: the value that was returned, the error, or why there is neither."""
    try:
        value = work()
    except BaseException as error:
        # CUDA does not survive a fork: what it says about that is no error of the user's, and the way out is named
        # instead.
        described = f"{type(error).__name__}: {error}"
        return pickle.dumps(("failed", described)) if "CUDA" in described else _pickled("raised", error, described)
    devices = {leaf.device for leaf in tree_leaves(value) if isinstance(leaf, Tensor)} - {torch.device("cpu")}
    if devices:
        return pickle.dumps(("failed", f"it gave a tensor on {devices.pop()}"))
    return _pickled("returned", value, f"it gave a {type(value).__name__}")


def _pickled(outcome: str, value: Any, described: str) -> bytes:
    try:
        message = pickle.dumps((outcome, value))
        pickle.loads(message)  # some exceptions cannot be made again
    except Exception as problem:  # whatever a foreign class raises on the way
        return pickle.dumps(("failed", f"{described}; on its way here: {problem}"))
    return message


@contextmanager
def _read_positions_kept() -> Iterator[None]:
    """Put the positions of files that are open for reading back: a fork has them in common with this process."""
    positions = dict(_positions())
    try:
        yield
    finally:
        for descriptor, position in positions.items():
            with suppress(OSError):
                os.lseek(descriptor, position, os.SEEK_SET)


def _positions() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/dev/fd"):
        descriptor = int(name)
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            readable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if readable and stat.S_ISREG(os.fstat(descriptor).st_mode):
                yield descriptor, os.lseek(descriptor, 0, os.SEEK_CUR)
