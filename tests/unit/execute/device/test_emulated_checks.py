"""Accesses that nothing orders are found on the emulated device, and so is every dependency that is dropped."""

import pytest

from lt_offload.execute.device.base import Cell
from tests.support.hostile.races import Race
from tests.unit.execute.device.conftest import KB, MODES

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
