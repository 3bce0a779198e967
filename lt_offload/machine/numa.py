"""The memory node (NUMA) that a GPU hangs on, and threads bound to its cores.

The system takes a page from the node of the core that touches it first, and from another node when that one is full.
So memory is placed by touching it from bound threads: unlike policies (mbind), containers allow that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

SYSFS = Path("/sys")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNode:
    """The cores for threads that touch memory from and to which a GPU copies."""

    cores: frozenset[int] = frozenset()
    """Empty: there is nothing to choose, and binding does nothing."""
    about: str = ""
    """A description for people."""

    def bind(self) -> None:
        """Keep the calling thread, and those it will start, on ``cores``; without permission nothing happens."""
        if self.cores:
            with suppress(OSError):
                os.sched_setaffinity(0, self.cores)

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Call ``work`` on ``cores``, and let torch's threads for it be there too."""
        if not self.cores:
            return work()
        # Not this thread: torch has started its threads already, and they may be on any core. Torch's threads are
        # children of the one that is bound.
        with ThreadPoolExecutor(1, initializer=self.bind) as pool:
            return pool.submit(work).result()


def memory_node_of(device: torch.device, root: Path = SYSFS) -> MemoryNode:
    """Return the memory node that ``device`` hangs on; for the CPU there is nothing to choose."""
    if device.type != "cuda":
        return MemoryNode(about="no GPU")
    gpu: Any = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    return memory_node_near(address, root, allowed=frozenset(os.sched_getaffinity(os.getpid())))


def memory_node_near(address: str, root: Path, *, allowed: frozenset[int]) -> MemoryNode:
    """Return the memory node of the PCI device at ``address``, among the ``allowed`` cores."""
    nodes = {path: _cores(path / "cpulist") for path in sorted((root / "devices/system/node").glob("node[0-9]*"))}
    if len(nodes) < 2:
        return MemoryNode(about="one node" if nodes else "unknown: the system does not say")
    try:
        number = int((root / "bus/pci/devices" / address / "numa_node").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        number = -1
    if number < 0:
        return MemoryNode(about=f"unknown: the system does not say which of {len(nodes)}")
    cores = nodes.get(root / "devices/system/node" / f"node{number}", frozenset()) & allowed
    if not cores:
        return MemoryNode(about=f"node {number} of {len(nodes)}, but this process may use none of its cores")
    return MemoryNode(cores=cores, about=f"node {number} of {len(nodes)}, {len(cores)} of {len(allowed)} cores")


def _cores(path: Path) -> frozenset[int]:
    """Return the numbers in a list such as ``0-3,8``; none if it cannot be read."""
    cores: set[int] = set()
    try:
        for part in path.read_text(encoding="utf-8").strip().split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(cores)
