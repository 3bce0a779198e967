"""Where memory near a GPU is, read from a made-up sysfs."""

import os
from pathlib import Path

import pytest

from lt_offload.machine.numa import MemoryNode, memory_node_near

GPU = "0000:65:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for number, cores in enumerate(["0-3,8-11", "4-7,12-15"]):
        node = tmp_path / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cores}\n")
    pci = tmp_path / "bus/pci/devices" / GPU
    pci.mkdir(parents=True)
    (pci / "numa_node").write_text("1\n")
    return tmp_path


def test_the_node_of_the_gpu(sysfs: Path) -> None:
    place = memory_node_near(GPU, sysfs, allowed=frozenset(range(16)))
    assert place == MemoryNode(cores=frozenset({4, 5, 6, 7, 12, 13, 14, 15}), about="node 1 of 2, 8 of 16 cores")
    assert memory_node_near(GPU, sysfs, allowed=frozenset({0, 5})).cores == {5}


def test_cores_that_a_process_may_not_use(sysfs: Path) -> None:
    place = memory_node_near(GPU, sysfs, allowed=frozenset({0, 1}))
    assert place == MemoryNode(about="node 1 of 2, but this process may use none of its cores")


@pytest.mark.parametrize("node", ["-1\n", "\n", None, "7\n"])
def test_a_system_that_does_not_say(sysfs: Path, node: str | None) -> None:
    path = sysfs / "bus/pci/devices" / GPU / "numa_node"
    path.unlink()
    if node is not None:
        path.write_text(node)
    place = memory_node_near(GPU, sysfs, allowed=frozenset(range(16)))
    assert not place.cores
    assert "of 2" in place.about


def test_one_node_or_no_sysfs(sysfs: Path, tmp_path: Path) -> None:
    assert memory_node_near(GPU, tmp_path / "none", allowed=frozenset({0})) == MemoryNode(
        about="unknown: the system does not say"
    )
    for path in (sysfs / "devices/system/node/node1").iterdir():
        path.unlink()
    (sysfs / "devices/system/node/node1").rmdir()
    assert memory_node_near(GPU, sysfs, allowed=frozenset({0})) == MemoryNode(about="one node")


def test_work_is_done_there_and_nobody_else_is_moved() -> None:
    mine = os.sched_getaffinity(0)
    core = frozenset({max(mine)})
    seen: list[set[int]] = []
    MemoryNode(cores=core).run(lambda: seen.append(os.sched_getaffinity(0)))
    assert seen == [core]
    assert os.sched_getaffinity(0) == mine


def test_a_failure_reaches_the_caller() -> None:
    def fail() -> None:
        raise MemoryError("no pages")

    for place in (MemoryNode(), MemoryNode(cores=frozenset(os.sched_getaffinity(0)))):
        with pytest.raises(MemoryError, match="no pages"):
            place.run(fail)
