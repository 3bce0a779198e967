"""How long bytes take on the emulated links, on a clock that only sleeping moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lt_offload.execute.device import emulated
from lt_offload.execute.device.lanes import Task
from tests.support.hostile import links
from tests.support.hostile.links import LinkRunner

RATE = 1e6


class Clock:
    """``meanwhile`` happens a third into the first time that somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: Callable[[], None] | None = None

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        work, self.meanwhile = self.meanwhile, None
        end = self.now + seconds
        if work is not None:
            self.now += seconds / 3
            work()
        self.now = max(self.now, end)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (emulated, links):
        monkeypatch.setattr(module, "time", clock)
    return clock


def runner(**rates: float | None) -> LinkRunner:
    made = LinkRunner(rates)
    made.recording = True
    return made


def task(lane: str, nbytes: int, work: Callable[[], None] = lambda: None) -> Task:
    return Task(lane=lane, work=work, after=(), label="", op=0, nbytes=nbytes)


def spans(made: LinkRunner) -> dict[str, tuple[float, float]]:
    return {lane: (pytest.approx(start), pytest.approx(end)) for _, lane, _, start, end in made.spans}


def test_copies_take_as_long_as_their_bytes_on_their_link(clock: Clock) -> None:
    made = runner(h2d=RATE, d2h=2 * RATE)
    for lane in ("h2d", "d2h", "host"):
        made(task(lane, 50_000))
    assert spans(made) == {"h2d": (0, 0.05), "d2h": (0.05, 0.075), "host": (0.075, 0.075)}


def test_crossing_a_link_takes_as_long_as_the_bytes(clock: Clock) -> None:
    made = runner(h2d=RATE, d2h=2 * RATE)
    made.cross("h2d", 30_000)
    assert clock.now == pytest.approx(0.03)
    made.cross("d2h", 30_000)
    assert clock.now == pytest.approx(0.045)


def test_links_without_a_rate_take_no_time(clock: Clock) -> None:
    made = runner(h2d=None)
    made.cross("h2d", 10**12)
    made(task("h2d", 10**12))
    assert clock.now == 0


@pytest.mark.parametrize(("lane", "end"), [("h2d", 0.1), ("d2h", 0.05)])
def test_copies_pause_while_a_computation_uses_their_link(clock: Clock, lane: str, end: float) -> None:
    made = runner(h2d=RATE, d2h=RATE)
    made(task(lane, 50_000, lambda: made.cross("h2d", 50_000)))
    assert spans(made) == {lane: (0, pytest.approx(end))}


def test_a_copy_that_begins_during_an_access_pauses_for_the_rest_of_it(clock: Clock) -> None:
    made = runner(h2d=RATE)
    clock.meanwhile = lambda: made(task("h2d", 10_000))
    made.cross("h2d", 60_000)
    assert spans(made) == {"h2d": (0.02, 0.07)}
