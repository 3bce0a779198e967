"""Jobs that need a process of their own: a fresh CUDA context, its own peaks, a sanitizer from the beginning.

python -m tests.gpu.worker JOB ANSWER ARGUMENTS

On the fake device they share a process, which begins every job with an empty device: to start another takes longer.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch

import lt_offload
from lt_offload.execute.device.base import Device
from lt_offload.execute.device.cuda import CudaDevice
from lt_offload.execute.engine import Engine
from lt_offload.schema.plan import Plan
from lt_offload.schema.trace import Span
from tests.gpu.machine import known_machine
from tests.gpu.target import ROOM, Kind, Target, memory_now, used_by_driver
from tests.support import models
from tests.support.engines import Case, planned, trained_on
from tests.support.hostile.races import Race

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3

SIZES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "tiny": ({"layers": 6}, {"batch_size": 4, "sequence_length": 32}),
    "small": (
        {"layers": 8, "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "max_position_embeddings": 64},
        {"batch_size": 4, "sequence_length": 32},
    ),
    "large": (
        {
            "layers": 10,
            "vocab_size": 16384,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 512,
        },
        {"batch_size": 4, "sequence_length": 512},
    ),
}
"""A model, and the shape of its batches. The small one is some of the pieces in which torch's allocator takes memory of
a device, the tiny one less than one. The large one has 160 million parameters; blocks of 50 MB travel within the time
that a data centre GPU computes with them."""


def call(job: str, limit_s: float = 240.0, **arguments: Any) -> dict[str, Any]:
    """Run ``job`` in a process of its own and return its answer; in this one where there is no context."""
    if arguments["kind"] == "cpu":
        return _done(job, arguments)
    if arguments["kind"] == "fake":
        try:
            return _shared_process().submit(_done, job, arguments).result(limit_s)
        except (BrokenExecutor, TimeoutError):
            _shared_process.cache_clear()
            for process in multiprocessing.active_children():
                process.kill()
            raise
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "tests.gpu.worker", job, str(answer), json.dumps(arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        if done.returncode or not answer.is_file():
            raise RuntimeError(f"{job} failed (exit code {done.returncode}):\n{done.stdout}\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


def _done(job: str, arguments: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    found: dict[str, Any] = json.loads(json.dumps(JOBS[job](**arguments)))
    return found


@functools.cache
def _shared_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def make(size: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """Return model, optimizer and a batch, on the host."""
    config, shape = SIZES[size]
    model = models.build(**config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, optimizer, models.batch(model, padding=False, **shape)


def profile(kind: Kind, size: str, file: str) -> dict[str, Any]:
    """Measure the model and save the profile; return what the driver showed afterwards."""
    target = Target(kind=kind)
    model, optimizer, batch = make(size)
    start = time.perf_counter()
    with known_machine(target):
        measured = lt_offload.profile(
            model, batch, optimizer=optimizer, device=target.torch_device, run=lambda batch: model(**batch).loss
        )
    measured.save(file)
    seconds = time.perf_counter() - start
    return {"profile_s": seconds, "driver": used_by_driver() if target.cuda else None}


def train(kind: Kind, size: str, plan: str, steps: int, before: int) -> dict[str, Any]:
    """Train by the plan in a file and return times, peaks and what ran at the same time.

    Args:
        kind: of the target.
        size: of the model.
        plan: its file.
        steps: measured iterations, after those that warm up.
        before: device memory that was in use before this process.
    """
    target, carried = Target(kind=kind), Plan.load(plan)
    model, optimizer, batch = make(size)
    batch = {name: tensor.to(target.torch_device) for name, tensor in batch.items()}
    stages = {"before": memory_now()} if target.cuda else {}
    device = target.open(carried.budget_bytes, check=False)
    engine = Engine(model, optimizer, carried, device)
    peaks, peak, source = [], 0, "allocator and context"
    shortages: list[dict[str, int]] = []
    try:
        stages |= _seen(target, device, "opened")
        engine.install()
        stages |= _seen(target, device, "installed")
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                target.synchronize()
                start = time.perf_counter()
            with engine.iteration():
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
            peaks.append(engine.stats.device_peak_bytes)
            shortages.append(_shortages(target))
            if step == 0:
                stages |= _seen(target, device, "first iteration")
            if target.cuda and step < WARM_UP:
                peak, source = max((peak, source), _driver(before))
        target.synchronize()
        seconds = (time.perf_counter() - start) / steps
        if target.cuda:
            peak, source = max((peak, source), _driver(before))
        trace = engine.trace()
        stages |= _seen(target, device, "last iteration")
    finally:
        engine.remove()
        device.close()
    return {
        "loss": loss.item(),
        "iteration_s": seconds,
        "recorded_s": trace.iteration_time,
        "peak": peak if target.cuda else max(peaks),
        "peak_source": source,
        "engine_peak": max(peaks),
        "stages": stages,
        "allocator": shortages,
        "busy_s": {lane: trace.busy(lane) for lane in ("compute", "h2d", "d2h", "host")},
        "both_ways_s": overlap(trace.spans, "h2d", "d2h"),
        "ops": sorted({span.op for span in trace.spans}),
    }


def _shortages(target: Target) -> dict[str, int]:
    """Return how often torch's allocator has run short so far; each time the launching thread waits for the device."""
    counts = torch.cuda.memory_stats() if target.cuda else {}
    return {name: counts.get(key, 0) for name, key in (("retries", "num_alloc_retries"), ("failures", "num_ooms"))}


def _seen(target: Target, device: Device, stage: str) -> dict[str, Any]:
    return {stage: memory_now(cast(CudaDevice, device)) if target.cuda else {"engine": device.memory()}}


def _driver(before: int) -> tuple[int, str]:
    used, whose = used_by_driver()
    return (used, whose) if whose == "process" else (used - before, whose)


def overlap(spans: Sequence[Span], one: str, other: str) -> float:
    """Return for how many seconds both lanes are busy."""
    pairs = itertools.product([s for s in spans if s.lane == one], [s for s in spans if s.lane == other])
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a, b in pairs)


FAULTS: dict[str, Callable[[str, str], bool]] = {
    "computations before their weights": lambda what, event: what == "compute" and event.startswith("prefetch weight"),
    "copies before computations": lambda what, event: what.startswith("offload") and event == "compute",
}
"""What is left out, as the emulated device calls it."""


def sanitized(kind: Kind, fault: str | None, **case: Any) -> dict[str, Any]:
    """Train a tiny model while accesses to memory are watched; return the first that is not ordered, if any."""
    made = Case(**{name: tuple(value) if isinstance(value, list) else value for name, value in case.items()})
    plan = planned(made)
    if kind == "cpu":
        ignore = FAULTS[fault] if fault else None
        try:
            trained_on(Target(kind=kind).open(ignore=ignore, mode="lazy"), made, plan)
        except Race as error:
            return {"race": str(error), "launches": 0, "copies": 0}
        return {"race": None, "launches": 0, "copies": 0}
    from torch.cuda._sanitizer import CUDASanitizerErrors

    from tests.gpu.races import sanitizer

    race = None
    with ExitStack() as stack:
        torch.use_deterministic_algorithms(True)
        stack.callback(torch.use_deterministic_algorithms, False)
        stack.enter_context(sanitizer.alone())
        handler = stack.enter_context(sanitizer.watching())
        torch._C._activate_gpu_trace()
        try:
            trained_on(_faulty(sanitizer.WatchedDevice, fault), made, plan)
        except CUDASanitizerErrors as error:
            race = str(error.errors[0])[:3000]
    return {"race": race, "launches": handler.seq_num, "copies": handler.copies}


def _faulty(base: type[Any], fault: str | None) -> Device:
    class Careless(base):  # type: ignore[misc]
        def wait(self, *events: Any, **cells: Any) -> None:
            super().wait(*(() if fault == "computations before their weights" else events), **cells)

        def submit(self, lane: Any, task: Any, *, after: Sequence[Any] = (), **options: Any) -> Any:
            careless = fault == "copies before computations" and lane == "d2h"
            return super().submit(lane, task, after=() if careless else after, **options)

    device: Device = Careless(ROOM)
    return device


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"profile": profile, "train": train, "sanitized": sanitized}


def main() -> None:
    job, answer, arguments = sys.argv[1:4]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = JOBS[job](**json.loads(arguments))
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
