"""A CUDA device without a GPU, for the CPU build of torch: ``device.type`` is ``"cuda"``, and everything is late.

Kernels are those of the CPU, on memory that the host cannot touch; streams are queues that run as late as possible, in
random order, or at once; autograd has the thread of its own that it has for a GPU. So whatever speaks to CUDA can be
executed: which thread, which device, which stream, which event, whose memory. What it cannot show: times and overlap,
the driver's real figures, numbers of real kernels, Triton, cuDNN and flash attention, CUDA graphs.

It is loaded when torch is imported, in this process and in those it starts, by::

    tests.fake_cuda.enable("random", seed=7)         # before torch is imported
    FAKE_CUDA=lazy PYTHONPATH=tests/fake_cuda/site python script.py

One thread computes: late kernels run in whichever thread waits for them, and other numbers of threads give other bits.

================== ==================================================================================================
FAKE_CUDA          ``lazy``: as late as possible; ``random``; ``eager``: at once
FAKE_CUDA_SEED     of ``random``
FAKE_CUDA_DEVICES  1 or 2
FAKE_CUDA_BYTES    of each device, 8 GiB
FAKE_CUDA_CONTEXT  bytes that the context takes of it, 200 MiB, without page tables
FAKE_CUDA_PIN_BYTES  what may be page-locked; not limited
FAKE_CUDA_EXPANDABLE  0: the driver cannot map memory page by page
================== ==================================================================================================

A wait that is in the wrong place shows as other numbers, memory that is freed too early as well: ``memory.hpp`` and
``streams.hpp`` say why. ``kernels.hpp`` says how one function stands for all kernels.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.fake_cuda.build import BuildError

__all__ = ["BuildError", "enable", "enabled"]

HERE = Path(__file__).parent
ORDERS = ("lazy", "random", "eager")


def enabled() -> bool:
    """Whether this process and its children have the device."""
    return "FAKE_CUDA" in os.environ


def enable(order: str = "lazy", *, seed: int = 0, devices: int = 1) -> None:
    """Let torch, which must not be imported yet, find the device, in this process and in those it starts.

    Raises:
        BuildError: if the device cannot be built here; says why in one line.
    """
    from tests.fake_cuda import build, loading

    assert order in ORDERS
    path = [str(HERE / "site"), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        "FAKE_CUDA": order,
        "FAKE_CUDA_SEED": str(seed),
        "FAKE_CUDA_DEVICES": str(devices),
        "OMP_NUM_THREADS": "1",
        "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": "0",  # threads of autograd that end with Python 3.11 may abort it
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
    }
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    build.library()
    loading.install()
    assert "torch" not in sys.modules or loading.loaded(), "torch was imported before the fake device was enabled"
