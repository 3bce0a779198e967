"""A model of the CUDA calls that the CUDA device makes.

Streams run as late as possible, and a wait for an event that was not recorded is an error.
"""

import threading
import time
from contextlib import contextmanager

import torch

from lt_offload.errors import UnsupportedError
from lt_offload.execute.device.base import AllocatorEvents
from lt_offload.machine.numa import MemoryNode

KB = 1024
CONTEXT = 100 * KB


class Stream:
    def __init__(self, gpu, name):
        self.gpu, self.name = gpu, name
        self.issued, self.executed = [], 0

    def launch(self, work):
        self.issued.append(work)
        position = len(self.issued)
        if self.name == "idle":  # nothing else is there to be late for
            self.run_until(position)
        return position

    def run_until(self, position):
        while self.executed < position:
            work = self.issued[self.executed]
            self.executed += 1
            work()

    def wait_event(self, event):
        assert event.stream is not None, "a wait for an event that was not recorded does nothing"
        self.gpu.waits += 1
        stream, position = event.stream, event.position
        self.launch(lambda: stream.run_until(position))

    def synchronize(self):
        with self.gpu.lock:
            self.run_until(len(self.issued))


class Event:
    def __init__(self, gpu, timing):
        self.gpu, self.timing, self.stream, self.time = gpu, timing, None, None
        gpu.events += 1

    def record(self, stream):
        self.stream, self.position = stream, len(stream.issued) + 1
        stream.launch(self._happen)

    def _happen(self):
        self.time = time.perf_counter()

    def query(self):
        return self.stream is None or self.stream.executed >= self.position

    def synchronize(self):
        assert self.stream is not None
        with self.gpu.lock:
            self.stream.run_until(self.position)

    def elapsed_time(self, end):
        assert self.timing
        assert end.timing
        return float(torch.tensor((end.time - self.time) * 1e3, dtype=torch.float32))  # as precise as CUDA is


class Gpu:
    """Stands in for ``CudaRuntime``. A stream works only while the host waits for it or for one that waits for it."""

    device = torch.device("cpu")

    def __init__(self, free=1 << 20, index=0):
        self.index = index
        self.lock = threading.RLock()
        self.main = Stream(self, "compute")
        self.local = threading.local()
        self.limit, self.free, self.held = None, free, 0
        self.registered = {}
        self.viewed, self.refuses, self.copies = 0, "", False
        self.generator = torch.Generator()
        self.streams = []
        self.events = self.waits = 0
        self.context, self.exact, self.prepared = CONTEXT, True, False
        # exact: NVML shows what this process has; False: as in a container that does not see process ids
        self.asked = 0
        """How often the driver was asked about the context."""
        self.workspaces = 0
        self.page_tables = False
        """Whether registered host memory takes device memory, as on a GPU."""
        self.others = 0
        """What other processes occupy; shows where the driver does not tell processes apart."""
        self.cached = self.emptied = 0
        self.events_of_allocator = AllocatorEvents(0, 0, 0)
        self.locks = True

    def prepare(self):
        self.prepared = True

    def memory_node(self):
        return MemoryNode()

    def stream(self):
        self.streams.append(Stream(self, ("h2d", "d2h", "idle")[len(self.streams)]))
        return self.streams[-1]

    def current_stream(self):
        return getattr(self.local, "stream", self.main)

    @contextmanager
    def use(self, stream):
        before, self.local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self.local.stream = before

    def event(self, *, timing):
        return Event(self, timing)

    def launch(self, work):
        """What a kernel or an asynchronous copy does."""
        self.current_stream().launch(work)

    def empty(self, nbytes):
        if nbytes > 800 * KB:
            raise torch.OutOfMemoryError("no room")
        self.held = nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def cap(self, nbytes):
        self.limit = nbytes

    def context_bytes(self):
        assert self.prepared, "libraries are to be loaded first"
        self.asked += 1
        own = self.context + (sum(self.registered.values()) // 512 if self.page_tables else 0)
        return own + (0 if self.exact else self.others), self.exact

    def workspace_bytes(self):
        return self.workspaces

    def empty_cache(self):
        self.emptied += 1
        self.cached = 0

    def allocator_events(self):
        return self.events_of_allocator

    def available(self):
        return self.free

    def reserved(self):
        return self.held + self.cached

    def peak_reserved(self):
        return self.held + 1

    def reset_peak(self):
        self.held -= 1

    def register(self, address, nbytes):
        if not self.locks:
            return 2
        self.registered[address] = nbytes
        return 0

    def unregister(self, address):
        del self.registered[address]
        return 0

    def zero_copy_view(self, host):
        self.viewed += 1
        if self.refuses:
            raise UnsupportedError(self.refuses)
        return host.clone() if self.copies else host.view_as(host)

    def rng_state(self):
        return self.generator.get_state()

    def set_rng_state(self, state):
        self.generator.set_state(state)


class Allocator:
    """Stands in for torch's caching allocator: memory comes in segments, of a kind that the driver may refuse."""

    def __init__(self, refuses=None):
        self.refuses = refuses
        """The error of a driver that does not map memory page by page."""
        self.settings = []
        self.expandable = False
        self.current = "default"
        self.cached = {"default": 1 << 30}
        """By stream: what is left over, from which allocations are served without asking the driver."""

    def set(self, settings):
        self.settings.append(settings)
        self.expandable = "expandable_segments:True" in settings

    @contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty(self, nbytes, **_):
        if self.cached.get(self.current, 0) >= nbytes:
            return
        if self.expandable and self.refuses is not None:
            raise self.refuses
        self.cached[self.current] = nbytes

    def empty_cache(self):
        self.cached = {"default": 1 << 30}
