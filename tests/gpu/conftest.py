from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.execute.device.cuda_runtime import CudaRuntime
from lt_offload.profiling import rates
from tests import sampling
from tests.gpu.machine import known_machine
from tests.gpu.target import Target

HERE = Path(__file__).parent
FAKE = HERE.parent / "fake_cuda"

SEEN: dict[str, Any] = {"tests": {}, "running": "", "figures": {}}
"""What the file of --figures says: written after every test, so that it is there whatever happens to the process."""


def pytest_runtest_logstart(nodeid: str) -> None:
    SEEN["running"] = nodeid
    _write()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        message = "" if report.passed else str(report.longrepr)[-1500:]
        if report.skipped and isinstance(report.longrepr, tuple):
            message = report.longrepr[2].removeprefix("Skipped: ")
        test = {"outcome": report.outcome, "seconds": round(report.duration, 3), "message": message}
        SEEN["tests"][report.nodeid.rpartition("::")[2]] = test


def pytest_runtest_logfinish(nodeid: str) -> None:
    SEEN["running"] = ""
    _write()


def _write() -> None:
    if SEEN.get("file"):
        Path(SEEN["file"]).write_text(json.dumps({k: v for k, v in SEEN.items() if k != "file"}), encoding="utf-8")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not for this device; without --device all but a few. The fake one is a GPU."""
    device = config.getoption("device")
    SEEN["file"] = config.getoption("figures")

    def wanted(item: pytest.Item) -> bool:
        if FAKE in item.path.parents:
            return device == "fake"
        if HERE not in item.path.parents:
            return True
        only = item.get_closest_marker("only")
        if device is None:
            return item.get_closest_marker("quick") is not None
        return only is None or device in only.args or (device == "fake" and "cuda" in only.args and fake(only))

    def fake(only: pytest.Mark) -> bool:
        return bool(only.kwargs.get("fake", True))

    kept = [item for item in items if wanted(item)]
    if device == "fake":
        few = config.getoption("few")
        kept = sampling.of_tests(kept, sampling.FEW_ON_THE_FAKE_GPU if few else sampling.ON_THE_FAKE_GPU)
        if few:
            kept = sampling.of_files(kept, sampling.FEW_TESTS)
            kept = [item for item in kept if str(item.path.relative_to(sampling.HERE)) not in sampling.NOT_WITH_FEW]
    left_out = set(items).difference(kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept


@pytest.fixture(scope="session")
def target(pytestconfig: pytest.Config) -> Target:
    return Target(kind=pytestconfig.getoption("device") or "cpu")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits every time; memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def empty_device() -> Iterator[None]:
    """Begin with the device empty: what the test before has left in cycles is not this test's matter."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    yield
    gc.collect()


@pytest.fixture
def found(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Print figures and keep them in the file of --figures."""

    def keep(**figures: Any) -> None:
        print(f"{request.node.name}: {figures}")
        SEEN["figures"].setdefault(request.node.name, {}).update(figures)

    return keep


@pytest.fixture(autouse=True)
def one_machine(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure the machine once: that is most of a tiny model's profile. Where times mean nothing, reads are fast."""
    if not target.real:
        monkeypatch.setattr(rates, "LEAST_SPEED", 0.0)  # a busy processor may read more slowly than it copies
    with known_machine(target):
        yield


@pytest.fixture(autouse=True)
def strict_device(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the fake device: what the engine copies is asynchronous, and no kernel fails after its launch."""
    if target.kind != "fake":
        yield
        return
    from tests.fake_cuda import runtime

    stream, lanes = CudaRuntime.stream, []

    def watched(cuda: CudaRuntime) -> Any:
        lanes.append(stream(cuda))
        runtime.forbid_pageable(lanes[-1])
        return lanes[-1]

    monkeypatch.setattr(CudaRuntime, "stream", watched)
    failed = runtime.failed()
    yield
    for lane in lanes:
        runtime.forbid_pageable(lane, False)
    assert runtime.failed() == failed, "a kernel failed behind the host's back; see what was printed"
