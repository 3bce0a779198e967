"""Host copies as they were at one moment, read while training goes on: what checkpoints beside training are made of."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lt_offload.execute.engine import Engine
from lt_offload.execute.memory.snapshots import HostSnapshot
from tests.gpu.target import Target
from tests.support.engines import Case, batches, build, make_optimizer, planned

CASE = Case(
    options=("keep", "recompute", "offload"), places=("device", "paged", "host"), shapes=((2, 12),) * 4, dropout=0.1
)
MOMENT = 2
"""Iterations before it."""


def read(
    snapshot: HostSnapshot,
    storages: list[torch.UntypedStorage],
    begin: threading.Event,
    found: dict[int, torch.UntypedStorage],
) -> None:
    """Copy ``storages`` as ``snapshot`` shows them to ``found``."""
    begin.wait()
    for storage in storages:
        with snapshot.reading(storage) as source:
            found[storage._cdata] = source.clone()


def values(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@pytest.mark.quick
@pytest.mark.parametrize("room", [0, 1 << 40], ids=["waiting", "set aside"])
def test_a_snapshot_shows_what_host_copies_were(room: int, target: Target) -> None:
    plan = planned(CASE)
    device = target.open(seed=0)
    model = build(CASE)
    optimizer = make_optimizer(model, CASE.optimizer)
    engine = Engine(model, optimizer, plan, device)
    engine.install()
    begin = threading.Event()
    found: dict[int, torch.UntypedStorage] = {}
    try:
        for index, batch in enumerate(batches(CASE, model, device.torch_device)):
            if index == MOMENT:
                with engine.at_rest():
                    storages = [storage for storage, _ in engine._guard.announced()]
                    snapshot = engine.host_copies.snapshot(room)
                    held = sorted(filter(snapshot.holds, storages), key=snapshot.rank)
                    expected = {storage._cdata: storage.clone() for storage in held}
                reader = threading.Thread(target=read, args=(snapshot, held, begin, found))
                reader.start()
                if not room:
                    begin.set()
            with engine.iteration():
                model(**batch).loss.backward()
                optimizer.step()
        engine.drain()
        assert bool(engine.residency.snapshots.nbytes) == bool(room)
        begin.set()
        reader.join()
        assert engine.residency.snapshots.nbytes == 0
    finally:
        begin.set()
        engine.remove()
        device.close()
    assert len(found) > len(list(model.parameters()))

    assert all(torch.equal(values(expected[key]), values(found[key])) for key in expected)
    now = {storage._cdata: values(storage) for storage in held}
    assert not any(torch.equal(now[key], values(expected[key])) for key in expected if expected[key].nbytes() > 512)


@pytest.mark.quick
def test_threads_are_inside_the_engine_at_the_same_time(target: Target) -> None:
    """As autograd's thread is, and whoever saves: what one leaves is not what the other has entered."""
    plan, device, model = planned(CASE), target.open(), build(CASE)
    engine = Engine(model, make_optimizer(model, CASE.optimizer), plan, device)
    engine.install()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with engine._guard.suspended:
            entered.set()
            leave.wait()

    try:
        watched = _get_current_dispatch_mode_stack()
        thread = threading.Thread(target=other)
        with engine._guard.suspended:
            assert len(_get_current_dispatch_mode_stack()) == len(watched) - 1
            thread.start()
            entered.wait()
        assert _get_current_dispatch_mode_stack() == watched
        leave.set()
        thread.join()
        assert _get_current_dispatch_mode_stack() == watched
    finally:
        leave.set()
        engine.remove()
        device.close()
