"""The checker must find every missing dependency and accept every ordered program."""

import pytest

from lt_offload.execute.device.base import Cell
from tests.support.hostile.races import Checker, Race


@pytest.fixture
def checker():
    return Checker()


@pytest.fixture
def cell():
    return Cell("w")


def test_read_after_write(checker, cell):
    copied = checker.task("h2d", "prefetch w", [], [], [cell])
    with pytest.raises(
        Race, match=r"\"forward 0\" on compute reads 'w', not ordered after: \"prefetch w\" on h2d writes"
    ):
        checker.wait("forward 0", [], [cell], [])
    checker.wait("forward 0", [copied], [cell], [])


def test_write_after_read(checker, cell):
    checker.wait("forward 0", [], [cell], [])
    with pytest.raises(Race, match='"prefetch w" on h2d writes .* "forward 0" on compute reads'):
        checker.task("h2d", "prefetch w", [], [], [cell])
    checker.task("h2d", "prefetch w", [checker.mark("forward 0")], [], [cell])


def test_write_after_write(checker, cell):
    copied = checker.task("d2h", "write back", [], [], [cell])
    with pytest.raises(Race, match='"update" on host writes .* "write back" on d2h writes'):
        checker.task("host", "update", [], [], [cell])
    checker.task("host", "update", [copied], [], [cell])


def test_two_reads_are_no_race(checker, cell):
    checker.task("h2d", "prefetch", [], [cell], [])
    checker.task("host", "norm", [], [cell], [])
    checker.wait("forward", [], [cell], [])


@pytest.mark.parametrize("forgotten", [0, 1])
def test_a_write_is_ordered_after_every_reader(checker, cell, forgotten):
    readers = [checker.task(lane, f"copy on {lane}", [], [cell], []) for lane in ("h2d", "d2h")]
    with pytest.raises(Race, match=f"copy on {('h2d', 'd2h')[forgotten]}"):
        checker.task("host", "update", [readers[1 - forgotten]], [], [cell])
    checker.task("host", "update", readers, [], [cell])


def test_tasks_of_one_lane_are_in_order(checker, cell):
    checker.task("h2d", "first", [], [], [cell])
    checker.task("h2d", "second", [], [cell], [cell])


def test_order_is_transitive_over_lanes(checker, cell):
    grad = checker.task("d2h", "grad", [checker.mark("backward")], [], [cell])
    update = checker.task("host", "update", [grad], [], [])
    checker.task("h2d", "prefetch", [update], [cell], [])


def test_a_mark_does_not_cover_what_comes_after_it(checker, cell):
    mark = checker.mark("early")
    checker.wait("forward", [], [cell], [])
    with pytest.raises(Race):
        checker.task("h2d", "prefetch", [mark], [], [cell])


def test_a_mark_declares_what_was_accessed_before_it(checker, cell):
    early = checker.mark("early")
    late = checker.mark("backward", writes=[cell])
    with pytest.raises(Race):
        checker.task("d2h", "offload", [early], [cell], [])
    checker.task("d2h", "offload", [late], [cell], [])


def test_a_wait_orders_the_compute_lane_only(checker, cell):
    """On a GPU a wait blocks a stream, not the caller: tasks submitted later are not ordered by it."""
    copied = checker.task("h2d", "prefetch", [], [], [cell])
    checker.wait("forward", [copied], [cell], [])
    with pytest.raises(Race):
        checker.task("d2h", "offload", [], [cell], [])


def test_synchronize_orders_all_that_is_submitted_later(checker, cell):
    copied = checker.task("h2d", "prefetch", [], [], [cell])
    checker.synchronize([copied])
    checker.task("d2h", "offload", [], [cell], [])


def test_drain_orders_all_lanes_but_not_the_compute_lane(checker, cell):
    other = Cell("read by compute")
    checker.wait("forward", [], [other], [])
    checker.task("h2d", "prefetch", [], [], [cell])
    checker.drain()
    checker.task("host", "update", [], [cell], [])
    with pytest.raises(Race):
        checker.task("host", "update", [], [], [other])


def test_history_does_not_grow(checker, cell):
    for _ in range(100):
        event = checker.task("h2d", "prefetch", [checker.mark("forward")], [cell], [])
        checker.wait("forward", [event], [cell], [cell])
        checker.wait("forward", [], [cell], [])
    assert len(checker.history(cell).accesses) <= 4
