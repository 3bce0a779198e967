"""What torch without CUDA lacks in Python: the functions of ``torch._C`` that ``torch.cuda`` is written on.

Set up before ``torch.cuda`` is imported, so that all of that is torch's own.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch._C as C

from tests.fake_cuda.build import library

LIB = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "cudaHostRegister": ([ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint], ctypes.c_int),
    "cudaHostUnregister": ([ctypes.c_void_p], ctypes.c_int),
    "fake_elapsed_ms": ([ctypes.c_void_p, ctypes.c_void_p], ctypes.c_double),
    "fake_cap": ([ctypes.c_int, ctypes.c_double], None),
    "fake_occupy": ([ctypes.c_int, ctypes.c_size_t], None),
}
for _name, (_takes, _gives) in _SIGNATURES.items():
    _function = getattr(LIB, _name)
    _function.argtypes, _function.restype = _takes, _gives

CUDA = 1
"""Number of the device's type."""
NAME = "Fake GPU"
CAPABILITY = (8, 6)
FIGURES = (
    "allocated", "peak_allocated", "reserved", "peak_reserved", "retries", "frees", "failures", "total", "beside",
    "available", "locked",
)  # fmt: skip


def figures(device: int = 0) -> dict[str, int]:
    """Return what there is of the device's memory and of page-locked memory, in bytes."""
    values = (ctypes.c_size_t * len(FIGURES))()
    LIB.fake_figures(device, values)
    return dict(zip(FIGURES, map(int, values), strict=True))


def counters() -> dict[str, int]:
    """Return how often things happened since the process began: copies by kind, what ran at once, what failed late."""
    text = ctypes.create_string_buffer(1 << 16)
    LIB.fake_counters(text, len(text))
    return {name: int(number) for name, number in (line.split("\t") for line in text.value.decode().splitlines())}


def failed() -> int:
    """Return how many kernels have failed after their launch, once all that were launched have run."""
    torch.cuda.synchronize()
    return counters().get("kernels that failed late", 0)


def occupy(nbytes: int, device: int = 0) -> None:
    """Let other processes have so much of the device's memory."""
    LIB.fake_occupy(device, nbytes)


def forbid_pageable(stream: Any, forbidden: bool = True) -> None:
    """Make every copy on ``stream`` that would block the host an error."""
    LIB.fake_forbid_pageable(stream.device_index, stream.stream_id, forbidden)


# -- classes ----------------------------------------------------------------------------------------------------------


class StreamBase(C.Stream):  # type: ignore[misc]
    """Base of ``torch.cuda.Stream``."""

    def __new__(cls, priority: int = 0, **which: int) -> StreamBase:
        if which:
            return super().__new__(cls, **which)
        return super().__new__(cls, device=C.device("cuda", LIB.fake_device()), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)


class EventBase(C.Event):  # type: ignore[misc]
    """Base of ``torch.cuda.Event``."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> EventBase:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    @property
    def cuda_event(self) -> int:
        return int(self.event_id)

    def elapsed_time(self, end: EventBase) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(LIB.fake_elapsed_ms(self.event_id, end.event_id))


class Generator:
    """One of ``torch.cuda.default_generators``."""

    def __init__(self, index: int) -> None:
        self._cdata = id(self)
        self.device = C.device("cuda", index)
        self._index = index

    def get_state(self) -> Any:
        return _ops().generator_state(self._index)

    def set_state(self, state: Any) -> None:
        _ops().set_generator_state(self._index, state)

    def manual_seed(self, seed: int) -> Generator:
        _ops().seed_generator(self._index, seed)
        return self

    def seed(self) -> int:
        seed = int.from_bytes(os.urandom(7), "little")
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        return int(_ops().generator_seed(self._index))


def _ops() -> Any:
    import torch

    return torch.ops.fake_cuda


class Properties(types.SimpleNamespace):
    """What ``torch.cuda.get_device_properties`` returns."""

    def __init__(self, index: int) -> None:
        super().__init__(
            name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=figures(index)["total"],
            multi_processor_count=28, is_integrated=0, is_multi_gpu_board=0, uuid=uuid(index), pci_bus_id=1 + index,
            pci_device_id=0, pci_domain_id=0, warp_size=32, regs_per_multiprocessor=65536, gcnArchName="",
            max_threads_per_multi_processor=1536, L2_cache_size=2 << 20, shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=99 << 10,
        )  # fmt: skip


def uuid(index: int) -> str:
    """Return the name of a device that never changes."""
    return f"00000000-0000-0000-0000-{index:012}"


class Cudart:
    """What ``torch.cuda.cudart()`` returns."""

    cudaError = types.SimpleNamespace(success=0)

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        return int(LIB.cudaHostRegister(address, nbytes, flags))

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return int(LIB.cudaHostUnregister(address))

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:
        now = figures(device)
        return now["available"], now["total"]

    @staticmethod
    def cudaGetErrorString(code: int) -> str:
        return f"CUDA error {code}"


# -- functions --------------------------------------------------------------------------------------------------------


def _initialise() -> None:
    import torch

    LIB.fake_initialise()
    torch.cuda.default_generators = tuple(Generator(index) for index in range(LIB.fake_device_count()))
    torch.cuda._get_device_properties = Properties


def _set_device(index: int) -> None:
    if LIB.fake_set_device(index):
        raise RuntimeError("CUDA error: invalid device ordinal")


def _exchange_device(index: int) -> int:
    before = int(LIB.fake_device())
    _set_device(index)
    return before if index >= 0 else -1


def _maybe_exchange_device(index: int) -> int:  # another function: torch's compiler tells them apart
    return _exchange_device(index)


def _memory_stats(device: int) -> dict[str, Any]:
    now = figures(device)

    def stat(what: str) -> dict[str, dict[str, int]]:
        return {"all": {"current": now[what], "peak": now[f"peak_{what}"], "allocated": 0, "freed": 0}}

    allocated = {f"{kind}_bytes": stat("allocated") for kind in ("allocated", "active", "requested")}
    numbers = {"num_alloc_retries": "retries", "num_device_free": "frees", "num_ooms": "failures"}
    return allocated | {"reserved_bytes": stat("reserved")} | {name: now[figure] for name, figure in numbers.items()}


def _allocator_settings(settings: str) -> None:
    """Some drivers refuse to map memory page by page, when they are asked to: where ``FAKE_CUDA_EXPANDABLE`` is 0."""
    wanted = "expandable_segments:true" in settings.lower().replace(" ", "")
    LIB.fake_refuse_memory(wanted and os.environ.get("FAKE_CUDA_EXPANDABLE") == "0")


def _nothing(*_: Any) -> None:
    pass


FUNCTIONS: dict[str, Any] = {
    "init": _initialise,
    "isInBadFork": lambda: bool(LIB.fake_forked()),
    "getDeviceCount": lambda: int(LIB.fake_device_count()),
    "getDevice": lambda: int(LIB.fake_device()),
    "setDevice": _set_device,
    "exchangeDevice": _exchange_device,
    "maybeExchangeDevice": _maybe_exchange_device,
    "canDeviceAccessPeer": lambda a, b: True,
    "hasPrimaryContext": lambda device: True,
    "getArchFlags": lambda: "",
    "getDriverVersion": lambda: 13000,
    "getCompiledVersion": lambda: 13000,
    "synchronize": lambda: LIB.fake_synchronize(-1),
    "sleep": _nothing,  # everything is late anyway
    "getCurrentStream": lambda device: (int(LIB.fake_stream(device)), _index(device), CUDA),
    "getCurrentRawStream": lambda device: int(LIB.fake_stream(device)),
    "getDefaultStream": lambda device: (0, _index(device), CUDA),
    "setStream": lambda stream_id, device_index, device_type: _use(stream_id, device_index),
    "isCurrentStreamCapturing": lambda: False,
    "getAllocatorBackend": lambda: "native",
    "memoryStats": _memory_stats,
    "hostMemoryStats": lambda: {"allocated_bytes": {"current": figures()["locked"]}},
    "resetPeakMemoryStats": lambda device: LIB.fake_reset_peak(device),
    "resetAccumulatedMemoryStats": _nothing,
    "emptyCache": lambda *_: LIB.fake_empty_cache(),
    "setMemoryFraction": lambda fraction, device: LIB.fake_cap(device, fraction),
    "cudaCachingAllocator_set_allocator_settings": _allocator_settings,
    "clearCublasWorkspaces": _nothing,
    "ipc_collect": _nothing,
    "set_sync_debug_mode": _nothing,
    "get_sync_debug_mode": lambda: 0,
}
"""Of ``torch._C``, without ``_cuda_``."""


def _index(device: int) -> int:
    return device if device >= 0 else int(LIB.fake_device())


def _use(stream_id: int, device_index: int) -> None:
    _set_device(device_index)
    LIB.fake_set_stream(device_index, stream_id)


def provide() -> None:
    """Give ``torch._C`` what ``torch.cuda`` finds there when it is imported."""
    from torch._utils import _dummy_type

    LIB.fake_open()
    C._CudaStreamBase, C._CudaEventBase, C._cudart, C._has_cuda = StreamBase, EventBase, Cudart, True
    for name in ("_CUDAGraph", "_graph_pool_handle", "_cuda_CUDAAllocator_AllocatorState"):
        setattr(C, name, _dummy_type(name))  # for who imports them; nobody has graphs here
    C._set_cached_tensors_enabled = _nothing
    for name, function in FUNCTIONS.items():
        setattr(C, f"_cuda_{name}", function)
    C._accelerator_setAllocatorSettings = _allocator_settings
    C._accelerator_emptyCache = lambda: LIB.fake_empty_cache()


def _settle(looks: int = 20) -> None:
    """Give threads of autograd time to let go of what they have worked with.

    One that wants Python's lock while Python ends (before 3.12) takes the process with it: programs on a GPU that end
    right behind a backward have the same trouble.
    """
    quiet = 0
    while quiet < looks:
        tasks = [task for task in Path("/proc/self/task").iterdir() if _reads(task / "comm").startswith("pt_autograd")]
        quiet = quiet + 1 if all(") S " in _reads(task / "stat") for task in tasks) else 0
        time.sleep(1e-3 if tasks else 0)  # the lock is theirs meanwhile


def _reads(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the thread has ended
        return ""


def finish() -> None:
    """Mend, once torch is imported, what else torch without CUDA cannot do."""
    import torch

    atexit.register(_settle)
    torch.version.cuda = "13.0"
    torch.backends.mkldnn.set_flags(False)  # its kernels know tensors of the CPU by other marks
    plain = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return plain(cls, *args, **kwargs) if device is None else plain(cls, *args, device=device, **kwargs)
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = new
    _provide_nvml()


def _provide_nvml() -> None:
    """The library counts what the fake has handed out as this process's."""
    try:
        import pynvml
    except ImportError:
        return

    def used(index: int) -> int:
        now = figures(index)
        return now["reserved"] + now["beside"]

    def memory(index: int) -> types.SimpleNamespace:
        now = figures(index)
        return types.SimpleNamespace(used=now["total"] - now["available"], total=now["total"], free=now["available"])

    def process(index: int) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=used(index))]

    pynvml.nvmlInit = _nothing
    pynvml.nvmlDeviceGetHandleByUUID = lambda name: int(str(name).rpartition("-")[2])
    pynvml.nvmlDeviceGetHandleByIndex = lambda index: index
    pynvml.nvmlDeviceGetMemoryInfo = memory
    pynvml.nvmlDeviceGetComputeRunningProcesses = process
