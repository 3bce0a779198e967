"""Memory of the emulated device: places in its arena, what overwrites them, and a budget that is hard to the byte."""

import random
import threading
import time

import pytest
import torch

from lt_offload.errors import OverBudget
from lt_offload.execute.device.arena import Arena
from lt_offload.execute.device.lanes import Task
from lt_offload.schema.plan import ALIGNMENT
from tests.unit.execute.device.conftest import KB, MODES

# -- arena and poison --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_out_gets_what_was_there_whoever_had_the_range_in_between(opened, mode):
    device = opened(mode)
    old = device.place(0, KB, "old")
    old.bytes.fill_(7)
    host = torch.zeros(KB, dtype=torch.uint8)
    out = device.submit("d2h", lambda view=old.bytes: device.copy(host, view), after=[device.mark()], reads=[old])
    device.free(old, [out])
    device.free(device.place(0, KB, "given back unused"))
    new = device.place(0, KB, "new")
    device.synchronize(device.submit("h2d", lambda view=new.bytes: view.fill_(8), writes=[new]), out)
    assert host.tolist() == [7] * KB


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writer", ["task", "compute"])
def test_a_writer_of_reused_memory_waits_for_the_release(opened, mode, writer):
    device = opened(mode)
    gate = threading.Event()
    old = device.place(0, KB)
    out = device.submit("d2h", gate.wait if mode == "thread" else gate.set)
    device.free(old, [out])
    new = device.place(512, 512)
    if mode == "thread":
        threading.Timer(0.05, gate.set).start()
    if writer == "compute":
        device.wait(writes=[new])
    else:
        device.wait(device.submit("h2d", lambda: None, writes=[new]))
    assert gate.is_set()
    assert out.done()


def test_the_arena_is_within_the_budget(opened):
    device = opened(budget=100 * KB, arena=10 * KB)
    with pytest.raises(OverBudget, match=r"102401 bytes.* exceeds the budget of .*\(102400 bytes\)"):
        device.reserve(100 * KB + 1)
    assert device.memory() == 10 * KB
    device.reserve(100 * KB)
    assert device.memory() == 100 * KB
    device.reserve(KB)
    assert device.memory() == KB


# -- accounting --------------------------------------------------------------------------------------------------------


def test_the_budget_is_hard_to_the_byte(opened):
    device = opened(budget=100 * KB, arena=60 * KB)
    with device.accounting():
        kept = [torch.empty(10 * KB, dtype=torch.uint8) for _ in range(4)]
        assert device.memory() == 100 * KB
        with pytest.raises(OverBudget, match=r"\(1 bytes\).*102400 bytes\) are in use; a batch that is longer"):
            torch.empty(1, dtype=torch.uint8)
        del kept[0]
        assert device.memory() == 90 * KB
    assert device.peak_memory() == 100 * KB
    kept.clear()
    device.reset_peak()
    assert device.peak_memory() == device.memory() == 60 * KB


def test_arena_views_host_memory_and_tasks_cost_nothing(opened):
    device = opened("lazy", budget=64 * KB, arena=64 * KB)
    host = device.host_adopt(torch.ones(256))
    with device.accounting():
        buffer = device.place(0, KB)
        view = buffer.view(torch.float32, (256,))
        device.wait(device.submit("h2d", lambda: view.copy_(host + torch.zeros(256)), writes=[buffer]))
        view.add_(host)
        fresh = device.host_empty((256,), torch.float32).copy_(view)
        assert device.memory() == 64 * KB
        with pytest.raises(OverBudget):
            device.empty_all([((1,), torch.float32)])
    assert device.host_bytes == 2 * KB
    del fresh
    assert device.host_adopt(host).data_ptr() == host.data_ptr()
    assert device.host_bytes == KB


def test_a_full_device_waits_for_copies_that_are_leaving(opened):
    """A task holds the only reference to device memory; its end makes the room that is asked for."""
    for mode in MODES:
        device = opened(mode, budget=100 * KB, arena=0)
        with device.accounting():
            leaving = torch.zeros(60 * KB, dtype=torch.uint8)
            out = torch.empty(0)
            pause = 0.1 if mode == "thread" else 0

            def copy(leaving=leaving, pause=pause):
                time.sleep(pause)

            device.submit("d2h", copy)
            del leaving, copy
            out = torch.zeros(50 * KB, dtype=torch.uint8)
            with pytest.raises(OverBudget):
                torch.zeros(60 * KB, dtype=torch.uint8)
        assert device.peak_memory() <= 100 * KB
        del out


def test_between_iterations_what_is_made_of_device_memory_counts(opened):
    """A tensor does not say whose memory it is in; its origin does."""
    device = opened(budget=100 * KB, arena=10 * KB)
    host, buffer = torch.ones(KB), device.place(0, KB)
    with device.between():
        with device.accounting():
            made = torch.zeros(KB)  # in an iteration everything counts
        assert device.memory() == 14 * KB
        copies = [host.clone(), torch.zeros(100 * KB), host + host, torch.cat([host, host]), host.view(2, -1)]
        copies[0].mul_(0.9).add_(host, alpha=0.1)
        assert device.memory() == 14 * KB
        more = [made.clone(), made + host, torch.stack([made.detach(), made]), buffer.bytes.clone()]
        assert device.memory() == 14 * KB + 4 * 4 * KB + KB
        more.append(more[0] * 2)
        assert device.memory() == 14 * KB + 5 * 4 * KB + KB
        fetched = device.empty_all([((KB,), torch.uint8)])
        assert device.memory() == 14 * KB + 5 * 4 * KB + 2 * KB
        with pytest.raises(OverBudget):
            made.repeat(100)
        with device.accounting(), pytest.raises(OverBudget):
            torch.zeros(100 * KB)
    del made, copies, more, fetched
    assert device.memory() == 10 * KB


def test_what_stays_on_the_device_counts(opened):
    device = opened(budget=100 * KB, arena=10 * KB)
    table = torch.ones(KB)
    device.stays(table)
    assert device.memory() == 14 * KB
    with pytest.raises(OverBudget):
        device.stays(torch.ones(30 * KB))
    del table
    assert device.memory() == 10 * KB


UNIT = ALIGNMENT


def arena(units: int) -> Arena:
    return Arena(torch.zeros(units * UNIT, dtype=torch.uint8))


def pending(label: str) -> Task:
    return Task("h2d", lambda: None, label=label)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 2 * UNIT), (UNIT, 1), (UNIT, 5), (0, 4 * UNIT), (2 * UNIT, UNIT)])
def test_overlap_is_refused_and_names_the_other(offset, nbytes):
    space = arena(4)
    space.place(UNIT, 2 * UNIT, "old")
    with pytest.raises(OverBudget, match=r"new at .* overlaps old at \[512, 1536\)"):
        space.place(offset, nbytes, "new")


def test_neighbours_and_empty_ranges_do_not_overlap():
    space = arena(3)
    middle = space.place(UNIT, UNIT, "middle")
    space.place(0, UNIT, "low")
    space.place(2 * UNIT, UNIT, "high")
    empty = space.place(UNIT, 0, "empty")
    assert empty.view(torch.float32, (0, 3)).shape == (0, 3)
    space.free(empty, [])
    space.free(middle, [])
    assert space.used == 2 * UNIT


def test_a_range_beyond_the_end_is_refused():
    with pytest.raises(OverBudget, match="does not fit"):
        arena(2).place(UNIT, UNIT + 1, "w")


def test_find_returns_the_lowest_aligned_gap():
    space = arena(6)
    space.place(0, UNIT - 100, "a")
    space.place(3 * UNIT, UNIT, "b")
    assert space.find(2 * UNIT, "x") == UNIT
    with pytest.raises(OverBudget, match=r"x needs .*\(1025 bytes\).*largest free range has 1024 bytes"):
        space.find(2 * UNIT + 1, "x")


def test_the_next_user_meets_exactly_the_releases_of_its_range():
    """Random places and frees; for every unit of memory a dictionary says which releases are outstanding."""
    rng = random.Random(7)
    space = arena(32)
    expected: dict[int, str] = {}
    live = []
    for step in range(2000):
        if live and rng.random() < 0.5:
            buffer = live.pop(rng.randrange(len(live)))
            units = range(buffer.offset // UNIT, (buffer.offset + buffer.nbytes) // UNIT)
            space.free(buffer, [pending(f"r{step}")])
            expected.update(dict.fromkeys(units, f"{step}"))
            continue
        start = rng.randrange(32)
        units = range(start, min(32, start + rng.randint(1, 8)))
        taken = {u for b in live for u in range(b.offset // UNIT, (b.offset + b.nbytes) // UNIT)}
        if taken & set(units):
            with pytest.raises(OverBudget):
                space.place(start * UNIT, len(units) * UNIT, "new")
            continue
        buffer = space.place(start * UNIT, len(units) * UNIT, "new")
        wanted = {expected.pop(u) for u in units if u in expected}
        assert {t.label for t in buffer.releases} == {f"r{w}" for w in wanted}
        live.append(buffer)
    assert len(space._freed) <= 32
