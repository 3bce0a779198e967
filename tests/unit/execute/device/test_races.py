"""The checker finds every missing dependency and accepts every ordered program, alone and on a device."""

import pytest

from lt_offload.execute.device.base import Cell
from tests.support.hostile.races import Checker, Race
from tests.unit.execute.device.conftest import KB, MODES

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


# -- happens-before ----------------------------------------------------------------------------------------------------


def checked(opened, mode):
    return opened(mode, check=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forgotten", [True, False])
def test_race_on_reused_memory(opened, mode, forgotten):
    """Two buffers over one range: the second is written while the first may still be read."""
    device = checked(opened, mode)
    old = device.place(0, 4 * KB, "old")
    device.wait(device.submit("h2d", lambda: None, writes=[old], label="prefetch old"), reads=[old])
    out = device.submit("d2h", lambda: None, after=[device.mark()], reads=[old], label="offload old")
    device.free(old, [] if forgotten else [out])
    new = device.place(2 * KB, KB, "new")
    if forgotten:
        with pytest.raises(
            Race, match=r'"prefetch new" on h2d writes .*\'new\'.* "offload old" on d2h reads .*\'old\''
        ):
            device.submit("h2d", lambda: None, writes=[new], label="prefetch new")
    else:
        device.submit("h2d", lambda: None, writes=[new], label="prefetch new")


def test_memory_reused_twice_is_still_followed(opened):
    """The range passes through a buffer that nobody used: the older reader must not be forgotten."""
    device = checked(opened, "lazy")
    old = device.place(0, KB, "old")
    device.submit("h2d", lambda: None, writes=[old], label="prefetch old")
    device.free(old)
    device.free(device.place(0, KB, "unused"))
    new = device.place(0, KB, "new")
    with pytest.raises(Race, match="prefetch old"):
        device.wait(writes=[new])


def test_reading_what_was_never_written_and_using_what_was_freed(opened):
    device = checked(opened, "lazy")
    buffer = device.place(0, KB, "w")
    with pytest.raises(Race, match="before anything was written"):
        device.wait(reads=[buffer])
    device.wait(writes=[buffer])
    device.free(buffer)
    with pytest.raises(Race, match="after it was freed"):
        device.mark(reads=[buffer])


# -- dropped dependencies ----------------------------------------------------------------------------------------------


def iterate_over_two_weights(device):
    """A program in which every dependency matters: two weights take turns in one range and are updated on the host."""
    host, grad = [Cell("host w0"), Cell("host w1")], [Cell("grad w0"), Cell("grad w1")]
    updated = [device.mark(), device.mark()]
    for step in range(6):
        i = step % 2
        buffer = device.place(0, KB, "w")
        ready = device.submit(
            "h2d", lambda: None, after=[updated[i]], reads=[host[i]], writes=[buffer], label="prefetch"
        )
        device.wait(ready, reads=[buffer])
        copied = device.submit(
            "d2h", lambda: None, after=[device.mark()], reads=[buffer], writes=[grad[i]], label="grad"
        )
        device.free(buffer, [copied])
        updated[i] = device.submit(
            "host", lambda: None, after=[copied], reads=[grad[i]], writes=[host[i]], label="update"
        )
    device.drain()


DEPENDENCIES = [
    ("prefetch", "update"),
    ("grad", "compute"),
    ("update", "grad"),
    ("compute", "prefetch"),
    ("prefetch", "release w"),
    ("free w", "grad"),
]


@pytest.mark.parametrize("dropped", [None, *DEPENDENCIES])
def test_the_seam_drops_a_dependency_and_the_checker_notices(opened, dropped):
    seen = set()

    def ignore(waiter, awaited):
        seen.add((waiter, awaited))
        return (waiter, awaited) == dropped

    device = opened(check=True, ignore=ignore)
    if dropped is None:
        iterate_over_two_weights(device)
        assert set(DEPENDENCIES) <= seen
    else:
        with pytest.raises(Race):
            iterate_over_two_weights(device)
