"""The bench's measured process: one contender, one workload. Started by suite.py; its answer is a dict of figures."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.workloads import Workload
from scripts.common import machine, serve_child, versions

WARM_UP = 2
"""Steps that are not timed: the first allocates, and offloaded updates of the first end in the second."""


def describe() -> dict[str, Any]:
    """Return the machine and the versions of what matters."""
    return {"machine": machine(), "versions": versions()}


def train(workload: dict[str, Any], module: str, folder: str, progress: str, steps: int, **case: Any) -> dict[str, Any]:
    """Train for ``steps`` timed steps and return the figures, or why there are none."""
    import torch

    from scripts.bench.contenders.case import Case

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    made = Case(
        workload=Workload(**workload),
        folder=Path(folder),
        progress=Path(progress),
        steps=WARM_UP + steps,
        **case,
    )
    made.say("starting")
    try:
        figures = _train(made, module)
    except Exception as error:  # every failure is a row
        import traceback

        traceback.print_exc()
        return {"status": status_of(error), "message": first_line(error)}
    return {"status": "ok", **figures}


def _train(case: Any, module: str) -> dict[str, Any]:
    import torch

    from scripts.bench.contenders.case import finite

    batches = case.batches()
    with importlib.import_module(f"scripts.bench.contenders.{module}").training(case) as training:
        losses = []
        for index, batch in enumerate(batches):
            if index < WARM_UP:
                case.say(f"step {index + 1}")
            elif index == WARM_UP:
                case.synchronize()
                case.say("timed steps")
                began = time.perf_counter()
            losses.append(training.step(batch))
            if index < WARM_UP and not training.own_limit:
                case.follow()
        case.synchronize()
        seconds = time.perf_counter() - began
        values = finite(float(loss) for loss in losses)
        figures = training.figures()
    timed = len(batches) - WARM_UP
    step_s = seconds / timed
    tokens = batches[0]["input_ids"].numel()
    cuda = case.device == "cuda"
    return figures | {
        "step_s": step_s,
        "tokens": tokens,
        "tokens_per_s": tokens / step_s,
        "losses": values,
        "loss": values[-1],
        "steps": len(batches),
        "allocator_peak_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "notes": list(training.notes),
    }


def status_of(error: BaseException) -> str:
    """Return what kind of failure ``error`` is."""
    import torch

    from lt_offload import InfeasibleError, OverBudget, UnsupportedError
    from scripts.bench.contenders.case import Unsupported

    text = str(error).lower()
    kinds: Sequence[tuple[type[BaseException] | tuple[type[BaseException], ...], str]] = (
        (InfeasibleError, "infeasible"),
        ((UnsupportedError, Unsupported), "unsupported"),
        ((OverBudget, torch.OutOfMemoryError), "out of memory"),
        (MemoryError, "out of host memory"),
    )
    for kind, status in kinds:
        if isinstance(error, kind):
            return status
    if "defaultcpuallocator" in text or "cannot allocate memory" in text:
        return "out of host memory"
    return "out of memory" if "out of memory" in text else "failed"


def first_line(error: BaseException) -> str:
    """Return the first line of what ``error`` says, with its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


if __name__ == "__main__":
    serve_child(describe, train)
    raise SystemExit("scripts.bench.child is started by scripts.bench.suite")
