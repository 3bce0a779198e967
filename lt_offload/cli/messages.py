"""Messages and warnings of libraries that are for users: one line each, on standard error."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from pathlib import Path

from lt_offload.finetune.processes import is_first
from lt_offload.finetune.terminal import clear, quiet, status, wrapped
from lt_offload.finetune.weights.hub import chain_of

_PACKAGE = str(Path(__file__).resolve().parents[1])
_PREFIX = "offmate: "
_PASSING = ("measuring", "running", "planning", "profiling", "estimating", "writing", "loading", "trying")
"""First words of messages about the present activity."""
_ADVICE = (
    r".*does not have many workers.*",  # batches are cut from memory; workers would only cost
    r"Experiment logs directory .* exists and is not empty",  # it is the run folder, with config.yaml in it
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's own call
    r"Total length of `list` across ranks is zero",  # nothing is held out because a setting says so
    r"The dirpath has changed from",  # every run has its own folder, and keeps its own checkpoints
    r"\s*Only use the public API as described in https.//jsonargparse",  # torch.compile pickles, which asks all modules
    r"\s*By default only one JsonargparseDeprecationWarning",
    r"Checkpoint directory .* exists and is not empty",  # it is that of the run that is resumed
)
"""Advice of Lightning about matters that recipes have decided."""


class Messages(logging.Handler):
    """A handler that writes messages of our own modules and warnings of all; other messages of libraries are left out.

    Messages about the present activity replace each other on a terminal, the others stay.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        warns = record.levelno >= logging.WARNING
        # Lightning's messages are not for users, unless they are warnings.
        if not is_first() or not (warns or (record.pathname.startswith(_PACKAGE) and not quiet())):
            return
        message = record.getMessage().removeprefix(_PREFIX)
        if warns:
            message = f"warning: {' '.join(message.split())}"
        elif message.startswith(_PASSING) and "\n" not in message:
            status(message.removesuffix(" ..."))
            return
        clear()
        print(wrapped(message), file=sys.stderr, flush=True)


def install() -> None:
    """Let messages and warnings go through this module from now on."""
    from transformers.utils.logging import disable_progress_bar

    for message in _ADVICE:
        warnings.filterwarnings("ignore", message=message)
    # A warning is told in one line, without the place in a library's source that it comes from.
    warnings.formatwarning = lambda message, *_: str(message)
    logging.captureWarnings(False)  # an earlier call's, whose place somebody may have taken since
    logging.captureWarnings(True)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "lt_offload", "py.warnings"):
        logger = logging.getLogger(name)
        # Lightning's own handlers would write each message a second time. Messages of an earlier call
        # go, too: tests and notebooks call the command line several times in one process.
        for old in [old for old in logger.handlers if type(old) in (logging.StreamHandler, Messages)]:
            logger.removeHandler(old)
        logger.propagate = True
    for name in ("lightning", "lt_offload", "py.warnings"):
        logging.getLogger(name).addHandler(Messages())
    # Importing it asks a hub for kernels of another package, which nobody here has asked for.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    logging.getLogger("huggingface_hub.utils._http").addFilter(_waiting)
    # Models load without bars, and data without them where they could not be drawn; downloads show theirs. datasets
    # reads this from the environment when it is imported, which comes later, and in workers again.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if quiet() or not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def _waiting(record: logging.LogRecord) -> bool:
    """Let one line stand for all requests that are made again; the error at their end is ours.

    Where there is no network, no request is made again: the error that the library tells of is raised at once.
    """
    error = sys.exc_info()[1]
    if error is not None and any(isinstance(link, socket.gaierror) for link in chain_of(error)):
        raise error
    if record.levelno == logging.WARNING:
        status("waiting for the hub, which does not answer")
    return record.levelno > logging.WARNING
