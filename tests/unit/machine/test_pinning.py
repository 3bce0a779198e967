"""The pin limit is found by trying, on models of drivers and systems."""

import resource
from pathlib import Path

import pytest

from lt_offload.machine import pinning
from lt_offload.machine.pinning import PinLimit, advice, find_pin_limit, is_wsl2, memlock_bytes

MB = 1 << 20
GB = 1000 * MB


class Driver:
    """Locks ``wall`` bytes in all, and what the process's limit leaves, if it heeds that."""

    def __init__(self, wall: int = 1 << 50, heeds: bool = False) -> None:
        self.wall, self.heeds = wall, heeds
        self.held: dict[int, int] = {}
        self.most = self.refused = 0

    def register(self, address: int, nbytes: int) -> int:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if self.heeds else -1
        total = sum(self.held.values()) + nbytes
        if total > self.wall or (limit != resource.RLIM_INFINITY and self.heeds and total > limit):
            self.refused += 1
            return 2
        self.held[address] = nbytes
        self.most = max(self.most, total)
        return 0

    def unregister(self, address: int) -> int:
        del self.held[address]
        return 0

    def find(self, host_bytes: int = 100 * GB) -> PinLimit:
        found = find_pin_limit(self.register, self.unregister, host_bytes=host_bytes)
        assert self.held == {}
        return found


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The process's limit, as this test wants it."""
    state = {"soft": resource.RLIM_INFINITY, "hard": resource.RLIM_INFINITY, "changes": 0}

    def change(which: int, values: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_MEMLOCK
        assert values[1] == state["hard"]
        state["soft"] = values[0]
        state["changes"] += 1

    monkeypatch.setattr(resource, "getrlimit", lambda which: (state["soft"], state["hard"]))
    monkeypatch.setattr(resource, "setrlimit", change)
    return state


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: dict[str, int]) -> dict[str, int]:
    version = tmp_path / "version"
    version.write_text("Linux version 6.8.0-generic\n")
    monkeypatch.setattr(pinning, "_VERSION", version)
    return limits


@pytest.fixture
def wsl2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: dict[str, int]) -> dict[str, int]:
    version = tmp_path / "version"
    version.write_text("Linux version 6.6.87-Microsoft-standard-WSL2\n")
    monkeypatch.setattr(pinning, "_VERSION", version)
    monkeypatch.setattr(pinning, "map_pages", ThinPages)
    return limits


class ThinPages:
    """Pages that take no memory."""

    addresses = iter(range(1 << 40, 1 << 60, 1 << 34))

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.address = nbytes, next(self.addresses)


def test_no_limit(linux: dict[str, int]) -> None:
    driver = Driver()
    assert driver.find() == PinLimit(nbytes=100 * GB, how="no limit: 67.1 MB were locked")
    assert driver.most == 64 * MB
    assert linux["changes"] == 0


@pytest.mark.parametrize("soft", [64 * 1024, 8 * MB, 16 * GB])
def test_a_limit_that_the_driver_does_not_heed(linux: dict[str, int], soft: int) -> None:
    linux["soft"] = soft
    driver = Driver()
    found = driver.find()
    assert found.nbytes == 100 * GB
    assert "does not count" in found.how
    assert (driver.most, driver.refused) == (64 * MB, 0)
    assert linux["soft"] == soft


@pytest.mark.parametrize("soft", [64 * 1024, 8 * MB, 200 * MB, 16 * GB])
def test_a_limit_that_the_driver_heeds(linux: dict[str, int], soft: int) -> None:
    linux["soft"] = soft
    driver = Driver(heeds=True)
    found = driver.find()
    assert found.nbytes == soft
    assert "(`ulimit -l`) counts" in found.how
    assert driver.most <= 64 * MB
    assert linux["soft"] == soft
    assert driver.find(host_bytes=20 * MB).nbytes == min(soft, 20 * MB)


@pytest.mark.parametrize("soft", [0, 8 * MB, resource.RLIM_INFINITY])
def test_a_driver_that_locks_nothing(linux: dict[str, int], soft: int) -> None:
    linux["soft"] = soft
    assert Driver(wall=0).find() == PinLimit(nbytes=0, how="67.1 MB could not be locked")
    assert linux["soft"] == soft


@pytest.mark.parametrize("wall", [800 * MB, 1024 * MB, 3000 * MB])
def test_the_wall_of_wsl2_is_found(wsl2: dict[str, int], wall: int) -> None:
    driver = Driver(wall=wall)
    found = driver.find()
    assert wall - 64 * MB < found.nbytes <= wall
    assert found.how == "WSL2 refused more"
    assert driver.refused <= 3


def test_a_high_wall_of_wsl2_is_not_climbed(wsl2: dict[str, int]) -> None:
    driver = Driver()
    found = driver.find()
    assert found.nbytes == 50 * GB
    assert found.how == "half of the RAM, as is usual in WSL2; 4.29 GB were locked without a refusal"
    assert driver.most == 4 << 30
    assert driver.find(host_bytes=3 * GB).nbytes == 1500 * MB


def test_a_slow_wsl2_is_not_tried_for_long(wsl2: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(pinning.time, "perf_counter", lambda: next(clock))
    driver = Driver()
    assert driver.find().nbytes == 50 * GB
    assert driver.most == 256 * MB


def test_wsl2_without_any(wsl2: dict[str, int]) -> None:
    assert Driver(wall=0).find().nbytes == 0


def test_the_limit_is_restored_after_an_error(linux: dict[str, int]) -> None:
    linux["soft"] = 8 * MB
    driver = Driver()

    def interrupted(address: int, nbytes: int) -> int:
        driver.register(address, nbytes)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_pin_limit(interrupted, driver.unregister, host_bytes=GB)
    assert linux["soft"] == 8 * MB


def test_advice_fits_the_system(linux: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert memlock_bytes() is None
    assert "dmesg" in advice()
    linux["soft"] = 8_000_000
    assert advice() == "this process may lock 8 MB: try `ulimit -l unlimited`, in Docker `--ulimit memlock=-1`"
    pinning._VERSION.write_text("Linux version 5.15.167.4-microsoft-standard-WSL2\n")
    assert ".wslconfig" in advice()
    monkeypatch.setattr(pinning, "_VERSION", tmp_path / "none")
    assert not is_wsl2()
