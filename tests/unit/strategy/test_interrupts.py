"""The first signal is noted, the second does what signals do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lt_offload.strategy.checkpoint.interrupts import Interrupts

ROOT = Path(__file__).parents[3]
BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = [signal.getsignal(number) for number in BOTH]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    made = Interrupts()
    yield made
    made.remove()
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_is_noted(interrupts: Interrupts, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    interrupts.install()
    os.kill(os.getpid(), number)
    assert interrupts.received == number
    assert f"{signal.Signals(number).name}: a checkpoint follows" in capfd.readouterr().err


def test_a_second_ctrl_c_stops_at_once(interrupts: Interrupts) -> None:
    interrupts.install()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_a_second_sigterm_ends_the_process() -> None:
    code = (
        "import os, signal\nfrom lt_offload.strategy.checkpoint.interrupts import Interrupts\nInterrupts().install()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nos.kill(os.getpid(), signal.SIGTERM)\nprint('alive')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == b""


def test_who_had_sigterm_before_hears_of_it_last(interrupts: Interrupts) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    interrupts.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == []
    interrupts.pass_on()
    assert heard == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(heard) == 2


def test_a_handler_of_the_users_own_stays(interrupts: Interrupts) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    interrupts.install()
    os.kill(os.getpid(), signal.SIGINT)
    assert heard == [signal.SIGINT]
    assert interrupts.received is None
