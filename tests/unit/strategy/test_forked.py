"""Work in a process of its own: what comes back, and what is said if nothing does."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from lt_offload.errors import ConfigError
from lt_offload.machine import forked as module
from lt_offload.machine.forked import in_a_fork


def asked(work: Any) -> Any:
    return in_a_fork(work, what="asking", way_out="give sample_batch()")


def test_results_come_back_and_changes_do_not() -> None:
    seen: list[int] = []
    tensor = torch.zeros(3)

    def work() -> Any:
        seen.append(1)
        tensor.add_(1)
        return {"tensor": tensor.clone(), "pid": os.getpid()}

    found = asked(work)
    assert torch.equal(found["tensor"], torch.ones(3))
    assert found["pid"] != os.getpid()
    assert seen == []
    assert torch.equal(tensor, torch.zeros(3))


class Private(Exception):
    """Cannot be made from its text alone."""

    def __init__(self, text: str, *, needed: int) -> None:
        super().__init__(text)


def raises(error: BaseException) -> Any:
    def work() -> None:
        raise error

    return work


def test_errors_come_back_as_what_they_are() -> None:
    with pytest.raises(KeyError, match="column"):
        asked(raises(KeyError("column")))
    with pytest.raises(
        ConfigError, match=r"asking failed in a process of its own \(Private: odd; .*\); give sample_batch"
    ):
        asked(raises(Private("odd", needed=1)))


def test_what_a_fork_cannot_do_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Cannot re-initialize CUDA.*give sample_batch\(\)"):
        asked(raises(RuntimeError("Cannot re-initialize CUDA in forked subprocess")))
    with pytest.raises(ConfigError, match=r"a tensor on meta.*give sample_batch\(\)"):
        asked(lambda: torch.empty(1, device="meta"))
    with pytest.raises(ConfigError, match=r"it gave a function; .*local.*give sample_batch\(\)"):
        asked(lambda: lambda: None)


def test_a_process_that_dies() -> None:
    with pytest.raises(ConfigError, match=r"ended without a result, exit code -9; give sample_batch\(\)"):
        asked(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    with pytest.raises(ConfigError, match=r"did not end within 0.05 s in a process of its own; give sample_batch\(\)"):
        asked(lambda: time.sleep(600))


def test_a_system_without_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ConfigError, match=r"needs os.fork\(\).*give sample_batch\(\)"):
        asked(lambda: 1)
