"""Device memory that is not the allocator's: followed as it grows, and kept from the allocator. Knows no tensors.

The CUDA context grows as long as new kernels are launched, since each is loaded then, and with host memory that is
registered, for which the device needs page tables. The driver takes both from the memory that is free at that moment,
so an allocator that has already been given the rest of the budget would make the process pass it.
"""

from __future__ import annotations

import logging

from lt_offload.errors import ConfigError, OverBudget
from lt_offload.execute.device.cuda_runtime import CudaRuntime
from lt_offload.machine.driver import page_table_bytes
from lt_offload.units import format_bytes

_log = logging.getLogger(__name__)

_FOLLOWED = 4
"""First iterations after each of which the context is looked at; then when their number has doubled."""


class Context:
    """Divides ``budget`` bytes between the context and torch's allocator.

    Args:
        cuda: the GPU.
        budget: bytes for both.
        planned: what was planned for the context with all kernels, workspaces of libraries included; so much is left to
            it from the beginning. 0: not known.

    Raises:
        ConfigError: if the context alone is larger.
        OverBudget: if the device has less than ``budget``.
    """

    def __init__(self, cuda: CudaRuntime, budget: int, *, planned: int = 0) -> None:
        self._cuda = cuda
        self.budget = budget
        self.nbytes, self._exact = cuda.context_bytes()
        """The largest that was seen; and whether it is this process's alone."""
        if budget <= self.nbytes:
            raise ConfigError(
                f"memory={format_bytes(budget)} is not more than the CUDA context alone occupies "
                f"({format_bytes(self.nbytes)})"
            )
        if budget - self.nbytes > cuda.available():
            raise OverBudget(
                f"memory={format_bytes(budget)} is more than the {format_bytes(cuda.available() + self.nbytes)} that "
                f"are free on {cuda.device}"
            )
        self._opened = self.nbytes
        self._planned = planned - cuda.workspace_bytes() if planned else 0  # workspaces are the allocator's
        self._iterations = 0
        self._cap()

    def follow(self, locked_bytes: int) -> None:
        """Look at it again; ``locked_bytes`` of host memory are registered by now. Waits for nothing."""
        context, exact = self._cuda.context_bytes()
        if not (exact and self._exact):
            # It may be others' memory that has grown. Page tables are known without asking.
            context = self._opened + page_table_bytes(locked_bytes)
        if context > self.nbytes:
            _log.info("the CUDA context has grown from %s to %s", format_bytes(self.nbytes), format_bytes(context))
            self.nbytes = context
            self._cap()

    def end_iteration(self, locked_bytes: int) -> None:
        """Look at it again in the first iterations, where most of it happens, and less and less often later on."""
        self._iterations += 1
        if self._iterations <= _FOLLOWED or self._iterations.bit_count() == 1:
            self.follow(locked_bytes)

    def _cap(self) -> None:
        """Let the allocator have what the budget leaves it, and take back what it has beyond that and does not use."""
        room = max(0, self.budget - max(self.nbytes, self._planned))
        self._cuda.cap(room)
        if self._cuda.reserved() > room:
            self._cuda.empty_cache()
