"""What the C library's heap does with freed memory: kept while somebody asks for it, given back afterwards."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")

MEASURE = """
import re, resource, torch
from lt_offload.execute.device.emulated import EmulatedDevice
from lt_offload.machine.heap import keep_freed_memory

BYTES = 40 << 20

def resident():
    return 1024 * int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

def asked_for():
    # the share of a large tensor's bytes that the system had to find pages for
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(BYTES, dtype=torch.uint8).fill_(1)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / BYTES

def always():
    return min(asked_for() for _ in range(12)) > 0.9

def never_again():
    # aligned tensors leave small gaps, which come together with their neighbours only when a cache of them is full
    for _ in range(12):
        asked_for()
    return asked_for() < 0.01

torch.empty(BYTES, dtype=torch.uint8).fill_(1)
start = resident()
"""

KEPT = """
assert always()
end = keep_freed_memory()
assert never_again() and resident() > start + 0.9 * BYTES
also = keep_freed_memory()
end(), end()
assert never_again(), "somebody else still wants it"
also()
assert resident() < start + 0.1 * BYTES, "what is free has not gone back to the system"
"""

TAKEN = """
from lt_offload.profiling.hardware import taken_host_bytes
before = taken_host_bytes()
end = keep_freed_memory()
assert never_again() and resident() > start + 0.9 * BYTES
assert taken_host_bytes().all < before.all + 0.1 * BYTES, "free memory of the heap is taken for the process's own"
end()
"""

DEVICE = """
device, other = EmulatedDevice(1 << 20), EmulatedDevice(1 << 20)
assert never_again()
device.close(), device.close()
assert never_again()
del other  # nobody has closed it
assert resident() < start + 0.1 * BYTES
"""

RECORD = """
from lt_offload.finetune.run.record import RunRecord
start, record = resident(), RunRecord()
assert never_again()
del record
assert resident() < start + 0.1 * BYTES
"""

CHOSEN = """
keep_freed_memory()
assert always()
"""


def run(code: str, **environment: str) -> None:
    names = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
    env = {name: value for name, value in os.environ.items() if name not in names} | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", MEASURE + code], env=env | environment, check=True)


@pytest.mark.slow
def test_freed_memory_is_kept_while_somebody_asks_for_it_as_an_emulated_device_does() -> None:
    run(KEPT + DEVICE + RECORD)


@pytest.mark.slow
def test_freed_memory_is_nothing_that_the_process_takes() -> None:
    run(TAKEN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")],
)
def test_thresholds_that_are_set_already_stay(name: str, value: str) -> None:
    run(CHOSEN, **{name: value})
