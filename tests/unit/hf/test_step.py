"""Where the backward of a training step begins, whoever calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lt_offload.hf.step import at_backward

BACKWARD = Tensor.backward


def run_one() -> Tensor:
    x = torch.ones((), requires_grad=True)
    (3 * x).backward()
    assert x.grad is not None
    return x.grad


def test_the_first_backward_of_this_thread_comes_to_it() -> None:
    seen: list[float] = []

    def run(loss: Tensor, backward: Callable[[], None]) -> None:
        seen.append(loss.item())
        backward()

    with at_backward(run):
        other = threading.Thread(target=run_one)
        other.start()
        other.join()
        assert seen == []
        assert [run_one(), run_one()] == [3, 3]
        assert seen == [3]
    assert Tensor.backward is BACKWARD


def test_contexts_of_several_threads_end_in_any_order() -> None:
    inside, ended = threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        with at_backward(lambda loss, backward: seen.append("theirs")):
            inside.set()
            ended.wait()
            torch.ones((), requires_grad=True).backward()

    thread = threading.Thread(target=other)
    with at_backward(lambda loss, backward: seen.append("ours")):
        thread.start()
        inside.wait()
        torch.ones((), requires_grad=True).backward()
    ended.set()
    thread.join()
    assert seen == ["ours", "theirs"]
    assert Tensor.backward is BACKWARD


def test_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), at_backward(lambda loss, backward: None):
        raise ZeroDivisionError
    assert Tensor.backward is BACKWARD
    assert run_one() == 3
