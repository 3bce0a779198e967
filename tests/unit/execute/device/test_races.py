"""The checker must find every missing dependency and accept every ordered program."""

import pytest

from lt_offload.execute.device.base import Cell
from tests.support.hostile.races import Checker, Race

PROGRAMS = {
    "h2d w; compute r": False,
    "h2d w; compute r 0": True,
    "compute r; h2d w": False,
    "compute r; mark; h2d w 1": True,
    "d2h w; host w": False,
    "d2h w; host w 0": True,
    "h2d r; host r; compute r": True,
    "h2d r; d2h r; host w 0": False,
    "h2d r; d2h r; host w 1": False,
    "h2d r; d2h r; host w 0 1": True,
    "h2d w; h2d r": True,
    "mark; d2h w 0; host - 1; h2d r 2": True,
    # A mark does not cover what comes after it, and declares what was accessed before it.
    "mark; compute r; h2d w 0": False,
    "mark; mark w; d2h r 0": False,
    "mark; mark w; d2h r 1": True,
    # On a GPU a wait blocks a stream, not the caller: tasks submitted later are not ordered by it.
    "h2d w; compute r 0; d2h r": False,
    "h2d w; sync - 0; d2h r": True,
    "h2d w; drain; host r": True,
    "compute r; drain; host w": False,
}
"""Steps, each a lane, what it does with the one cell, and the numbers of the steps that it waits for; is it ordered?"""


def run(program: str) -> None:
    checker, cell, events = Checker(), Cell("w"), []
    for step in program.split("; "):
        lane, access, *after = [*step.split(), "-"][: max(2, len(step.split()))]
        waits = [events[int(number)] for number in after]
        reads, writes = [cell] * (access == "r"), [cell] * (access == "w")
        event = None
        if lane == "mark":
            event = checker.mark(step, reads=reads, writes=writes)
        elif lane == "sync":
            checker.synchronize(waits)
        elif lane == "drain":
            checker.drain()
        elif lane == "compute":
            checker.wait(step, waits, reads, writes)
        else:
            event = checker.task(lane, step, waits, reads, writes)
        events.append(event)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_are_not_ordered_are_races(program):
    if PROGRAMS[program]:
        run(program)
    else:
        with pytest.raises(Race, match=f"\"{program.rpartition('; ')[2]}\" on .* 'w', not ordered after: "):
            run(program)


def test_history_does_not_grow():
    checker, cell = Checker(), Cell("w")
    for _ in range(100):
        event = checker.task("h2d", "prefetch", [checker.mark("forward")], [cell], [])
        checker.wait("forward", [event], [cell], [cell])
    assert len(checker.history(cell).accesses) <= 4
