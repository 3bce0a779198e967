import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch

from lt_offload.machine.numa import MemoryNode
from lt_offload.profiling import rates
from lt_offload.profiling.rates import measure_links


def test_copies_within_ram() -> None:
    before = torch.get_num_threads()
    found = measure_links(torch.device("cpu"))
    assert min(found.h2d_alone, found.d2h_alone, found.h2d, found.d2h) > 1e7
    assert found.staged == 0
    assert torch.get_num_threads() == before


def test_host_memory_is_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[object] = []
    monkeypatch.setattr(MemoryNode, "run", lambda self, work: touched.append((self.about, work())))
    measure_links(torch.device("cpu"), node=MemoryNode(about="here"))
    assert touched == [("here", None)] * 2


def test_speeds_count_only_while_all_are_busy() -> None:
    """The slower direction is faster when the other one is over: that is not its speed beside it."""
    assert rates._speeds([[1.0, 2.0, 3.0], [1.4, 2.8, 3.2]], 100) == [100.0, pytest.approx(200 / 2.8)]
    assert rates._speeds([[1.0, 2.0]], 100) == [100.0]
    assert rates._speeds([[1.0, 2.0], [5.0, 5.5]], 100) == [100.0, 20.0]


def test_both_directions_begin_together() -> None:
    inside, most, gate = itertools.count(), [], threading.Barrier(2)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        gate.wait(20)  # passes only if the other one is copying too
        most.append(next(inside))
        time.sleep(0.001)

    pair = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        speeds = pool.submit(rates._on_threads, [copy, copy], [pair, pair]).result(60)
    assert len(most) == 2 * rates._THREAD_REPEATS
    assert all(0 < speed < 4 / 0.001 for speed in speeds)


def test_an_error_of_a_copy_is_raised() -> None:
    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        raise RuntimeError("no memory")

    pair = torch.zeros(4), torch.zeros(4)
    with pytest.raises(RuntimeError, match="no memory"):
        rates._on_threads([copy, copy], [pair, pair])


class Event:
    """An event of a GPU that does everything at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.time = 0.0

    def record(self, stream: object) -> None:
        assert stream is not None
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        assert self.time > 0

    def elapsed_time(self, end: "Event") -> float:
        return (end.time - self.time) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for CUDA; returns what is page-locked."""
    held: list[int] = []

    @contextmanager
    def locked(host: torch.Tensor) -> Iterator[torch.Tensor]:
        held.append(host.nbytes)
        yield host
        held.remove(host.nbytes)

    monkeypatch.setattr(rates, "locked", locked)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return held


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randint(
        0, 255, (rates._COPY_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return torch.zeros_like(source), source


def test_copies_on_streams(gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_COPY_BYTES", 1 << 20)
    down, up = pair(0), pair(1)
    assert len(rates._on_streams(torch.device("cpu"), [down])) == 1
    speeds = rates._on_streams(torch.device("cpu"), [down, up])
    assert all(speed > 0 for speed in speeds)
    assert all(torch.equal(*each) for each in (down, up))


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_through_buffers(gpu: list[int], monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    monkeypatch.setattr(rates, "_COPY_BYTES", 10 << 20)
    down, up = pair(0), pair(1)
    with ExitStack() as stack:
        assert rates._staged(torch.device("cpu"), down, up, stack if pinned else None) > 0
        assert gpu == ([rates.STAGING_BYTES] if pinned else [])
    assert gpu == []
    assert all(torch.equal(*each) for each in (down, up))
