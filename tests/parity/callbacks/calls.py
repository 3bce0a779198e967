"""What is called of the user's, noted with a digest of what it was called with."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Noted = tuple[str, str, str]

_trace = -1
"""The file where calls are noted: a list would be put back by a run aside that is to leave nothing behind."""


def note(kind: str, name: object, *values: Any) -> None:
    """Note a call."""
    os.write(_trace, (json.dumps([kind, str(name), " ".join(map(digest, values))]) + "\n").encode())


def digest(value: Any) -> str:
    """Return a name of a value that differs where a bit of it does."""
    if isinstance(value, Tensor):
        numbers = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{tuple(value.shape)}:{value.dtype}:{hashlib.sha1(numbers).hexdigest()[:12]}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {digest(held)}' for key, held in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(digest, value))})"
    return repr(value)


def drawn() -> tuple[float, ...]:
    """Draw from every global generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class _Printed(io.StringIO):
    """Stands for the terminal."""

    def write(self, text: str) -> int:
        note("print", text)
        return len(text)


@contextlib.contextmanager
def noting() -> Iterator[Callable[[], list[Noted]]]:
    """Within the context calls are noted; yields what returns them, while it is open."""
    global _trace
    with tempfile.TemporaryFile() as file, contextlib.redirect_stdout(_Printed()):
        _trace = file.fileno()

        def noted() -> list[Noted]:
            file.seek(0)
            return [tuple(json.loads(line)) for line in file]

        try:
            yield noted
        finally:
            _trace = -1
