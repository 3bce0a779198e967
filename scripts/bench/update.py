"""Updates on the host: how much of the memory's speed they reach, and how they compare.

    python -m scripts.bench.update [--tiny] [--elements 64M] [--rounds N] [--threads 1,2] [--moments]

Everything is AdamW and runs in turns in one process, round after round; a figure is the median over rounds of the ratio
within a round, so that what slows the machine for a while slows all of them. Speeds are bytes that must move per
second: read weight, gradient and moments, write weight and moments, 28 per weight in fp32 and 14 in sixteen bits; with
fp32 masters of bfloat16 28, too (read gradient, master and moments, write weight, master and moments; 2 + 12 and 2 + 12
bytes). With ``--moments`` moments of fewer bits are measured instead: bfloat16 weights that are rounded at random move
22 bytes with fp32 moments, 14 with bfloat16 and 10 with eight bits (and scales, which are not counted).

    copy, memory       a copy, and passes that move the same bytes and compute next to nothing: the ceiling
    torch              torch.optim.AdamW: its fused kernel, and its loop of one operation after the other
    native             the same updates by the compiled kernel, bit for bit
    lt_offload         lt_offload.AdamW: the same kernel, and what it does without one
    in cache           the kernel over and over the same few numbers: what a core computes, whatever memory does
    bitsandbytes       its AdamW8bit on the host: bfloat16 weights rounded to nearest, states in eight bits
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from scripts.common import arguments, save

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
MUST_MOVE = {"fp32": 28, "bfloat16": 14, "float16": 14, "masters": 28}
"""Bytes per weight."""
CACHED, ALONE = 8192, "in cache"
"""Weights that stay in a core's cache, and the name of what updates them: by one thread only."""
MEMORY_PASSES = """
#include <cstdint>
extern "C" void full(int64_t n, float* w, const float* g, float* m, float* v, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < n; ++i) { w[i] += g[i]; m[i] += g[i]; v[i] += g[i]; }
}
extern "C" void low(int64_t n, uint16_t* w, const uint16_t* g, uint16_t* m, uint16_t* v, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < n; ++i) { w[i] += g[i]; m[i] += g[i]; v[i] += g[i]; }
}
extern "C" void mixed(int64_t n, uint16_t* w, const uint16_t* g, float* a, float* m, float* v, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < n; ++i) { const float x = g[i]; a[i] += x; m[i] += x; v[i] += x; w[i] = g[i] ^ 1; }
}
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to time."""

    name: str
    scheme: str
    """What is updated and in which way, or in what moments are kept."""
    run: Callable[[], None]
    bytes_per_weight: int = MUST_MOVE["fp32"]
    memory: str = ""
    """The pass over memory that moves the same."""


class Tensors:
    """What is updated, in memory like the engine's."""

    def __init__(self, elements: int) -> None:
        import torch

        torch.manual_seed(0)
        scales = (1e-1, 1e-3, 1e-3, 1e-3)
        self.full = [mapped(torch.randn(elements).mul_(scale), torch.float32) for scale in scales]
        self.weight, self.grad, self.exp_avg, self.exp_avg_sq = self.full
        self.exp_avg_sq.square_()
        self.low, self.low_grad = (mapped(tensor, torch.bfloat16) for tensor in self.full[:2])
        self.step = torch.tensor(10.0)


def mapped(tensor: Any, dtype: Any) -> Any:
    """Return ``tensor`` in memory like that of the engine."""
    from lt_offload.machine.pages import map_pages

    return map_pages(tensor.numel() * dtype.itemsize).view(dtype, tensor.numel(), 0).copy_(tensor)


def torch_cases(t: Tensors) -> Iterator[Case]:
    """Yield torch's own optimizers, by torch and by the kernel."""
    import torch

    from lt_offload.optim import native, torch_adam

    low = {dtype: [mapped(each, dtype) for each in t.full] for dtype in (torch.bfloat16, torch.float16)}
    for (dtype, (weight, grad, *moments)), fused in product({torch.float32: t.full, **low}.items(), (True, False)):
        parameter = torch.nn.Parameter(weight)
        parameter.grad = grad
        optimizer = torch.optim.AdamW([parameter], LR, BETAS, EPS, DECAY, fused=fused, foreach=False)
        optimizer.state[parameter] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (t.step, *moments), strict=True))
        name = "fp32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
        same = {"scheme": f"{name} {'fused' if fused else 'loop'}", "bytes_per_weight": MUST_MOVE[name]}
        same["memory"] = "fp32" if name == "fp32" else "low"
        yield Case(name="torch", run=optimizer.step, **same)
        if native.kernel() is not None:
            yield Case(name="native", run=partial(torch_adam.update, optimizer), **same)


def our_cases(t: Tensors) -> Iterator[Case]:
    """Yield the ways of ``lt_offload.AdamW``, and the kernel in the cache."""
    import torch

    from lt_offload.optim import native, plain
    from lt_offload.optim.plain import Entry, Options

    options = Options(lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY)
    low = Entry(t.low, t.low_grad, t.weight, t.exp_avg, t.exp_avg_sq, 10.0)
    kernel = native.kernel()
    if kernel is not None:
        run = partial(kernel.update, [low], options)
        yield Case(name="lt_offload kernel", scheme="masters", run=run, memory="masters")
    yield Case(name="lt_offload without kernel", scheme="masters", run=lambda: plain.update([low], options))
    if kernel is None or low.param.numel() < CACHED:
        return
    # As many weights in all as there are otherwise, but the same ones over and over.
    turns = [(0, CACHED, 0)] * (low.param.numel() // CACHED)
    for dtype, each in product((torch.float32, torch.bfloat16, torch.float16), (False, True)):
        weight, grad, exp_avg, exp_avg_sq = (tensor[:CACHED].to(dtype) for tensor in t.full)
        own = Entry(weight, grad, None, exp_avg, exp_avg_sq, 10.0)
        name = "fp32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
        run = partial(kernel.update_ranges, own, turns, replace(options, each=each))
        scheme = f"{name} {'loop' if each else 'fused'}"
        yield Case(name=ALONE, scheme=scheme, run=run, bytes_per_weight=MUST_MOVE[name])


def moments_cases(t: Tensors) -> Iterator[Case]:
    """Yield updates with moments of fp32, bfloat16 and eight bits."""
    import torch

    from lt_offload.optim import native, plain
    from lt_offload.optim.plain import Entry, Options

    options = Options(lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY)
    full = Entry(t.weight, t.grad, None, t.exp_avg, t.exp_avg_sq, 10.0)
    low = Entry(t.low, t.low_grad, t.weight, t.exp_avg, t.exp_avg_sq, 10.0)
    rounded = low._replace(master=None, seed=5)
    kernel = native.kernel()
    kinds = {"fp32 weights": (full, 12), "masters": (low, 12), "rounded": (rounded, 6)}
    names = {torch.float32: ("fp32", 16), torch.bfloat16: ("bfloat16", 8), torch.uint8: ("8 bits", 4)}
    for (kind, (entry, weight)), (dtype, (moments, bytes_of_states)) in product(kinds.items(), names.items()):
        kept = plain.with_moments(entry, dtype)
        each = weight + bytes_of_states
        scheme = f"{kind}, moments {moments}"
        if kernel is not None:
            run = partial(kernel.update, [kept], options)
            yield Case(name="lt_offload kernel", scheme=scheme, run=run, bytes_per_weight=each)
        if entry is rounded and dtype == torch.uint8:
            run = partial(plain.update, [kept], options)
            yield Case(name="lt_offload without kernel", scheme=scheme, run=run, bytes_per_weight=each)


def bitsandbytes_cases(t: Tensors) -> Iterator[Case]:
    """Yield bitsandbytes' 8-bit AdamW on the host, if it is installed."""
    import torch

    if importlib.util.find_spec("bitsandbytes") is None:
        return
    from bitsandbytes.optim import AdamW8bit

    parameter = torch.nn.Parameter(t.low)
    parameter.grad = t.low_grad
    optimizer = AdamW8bit([parameter], LR, BETAS, EPS, DECAY)
    yield Case(name="bitsandbytes AdamW8bit", scheme="moments 8 bits", run=optimizer.step, bytes_per_weight=10)


def memory_cases(t: Tensors) -> Iterator[Case]:
    """Yield what memory allows."""
    import torch

    from lt_offload import compiling

    yield Case(name="copy", scheme="copy", run=lambda: t.weight.copy_(t.grad), bytes_per_weight=8)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "memory.cpp"
        source.write_text(MEMORY_PASSES, encoding="utf-8")
        library = ctypes.CDLL(str(compiling.build(source, Path(folder))))
    count = ctypes.c_int64(t.weight.numel())

    def passes(name: str, *tensors: Any) -> Callable[[], None]:
        function = getattr(library, name)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        return lambda: function(count, *addresses, torch.get_num_threads())

    states = (t.exp_avg, t.exp_avg_sq)
    yield Case(name="memory", scheme="fp32", run=passes("full", t.weight, t.grad, *states))
    # Of the fp32 moments the first half of the bytes: as many as moments of sixteen bits have.
    yield Case(name="memory", scheme="low", run=passes("low", t.low, t.low_grad, *states), bytes_per_weight=14)
    yield Case(name="memory", scheme="masters", run=passes("mixed", t.low, t.low_grad, t.weight, *states))


def measure(cases: list[Case], *, elements: int, rounds: int, threads: list[int]) -> list[dict[str, Any]]:
    """Return a row per number of threads and case."""
    import torch

    rows = []
    for count in threads:
        torch.set_num_threads(count)
        times: dict[int, list[float]] = {}
        processor: dict[int, list[float]] = {}
        for turn in range(rounds + 1):
            for i, case in enumerate(cases):
                if count > 1 and case.name == ALONE:
                    continue
                began, before = time.perf_counter(), time.process_time()
                case.run()
                if turn:  # the first warms up
                    times.setdefault(i, []).append(time.perf_counter() - began)
                    processor.setdefault(i, []).append(time.process_time() - before)
        speeds = {i: [cases[i].bytes_per_weight * elements / s for s in taken] for i, taken in times.items()}
        ceilings = {case.scheme: speeds[i] for i, case in enumerate(cases) if case.name == "memory"}
        for i, case in ((i, cases[i]) for i in times):
            row: dict[str, Any] = {"threads": count, "name": case.name, "scheme": case.scheme}
            row["bytes_per_weight"] = case.bytes_per_weight
            row["weights_per_s"] = elements / statistics.median(times[i])
            row["bytes_per_s"] = case.bytes_per_weight * row["weights_per_s"]
            row["spread"] = [min(speeds[i]), max(speeds[i])]
            row["ns_per_weight"] = 1e9 / row["weights_per_s"]
            # Of all threads, and the best round: other processes beside it count for little.
            row["processor_ns_per_weight"] = 1e9 * min(processor[i]) / elements
            ceiling = ceilings.get(case.memory or case.scheme)
            row["of_memory"] = ceiling and statistics.median(a / b for a, b in zip(speeds[i], ceiling, strict=True))
            row["of_torch"] = _ratio(cases, times, i, "torch")
            rows.append(row)
    return rows


def _ratio(cases: list[Case], times: dict[int, list[float]], mine: int, name: str) -> float | None:
    """Return how many times as fast a case is as the one called ``name`` that does the same."""
    other = next((i for i, c in enumerate(cases) if (c.name, c.scheme) == (name, cases[mine].scheme)), None)
    if other is None:
        return None
    return statistics.median(b / a for a, b in zip(times[mine], times[other], strict=True))


def main() -> int:
    """Measure, print and save."""
    options = _parser().parse_args()
    elements = 1 << 16 if options.tiny else options.elements
    rounds = 2 if options.tiny else options.rounds
    import torch

    cores = len(os.sched_getaffinity(0))
    counts = sorted({*(1 << k for k in range(cores.bit_length()) if 1 << k <= cores), cores})
    threads = [int(n) for n in options.threads.split(",")] if options.threads else counts[: 1 if options.tiny else None]
    tensors = Tensors(elements)
    if options.moments:
        cases = [*memory_cases(tensors), *moments_cases(tensors), *bitsandbytes_cases(tensors)]
    else:
        cases = [*memory_cases(tensors), *torch_cases(tensors), *our_cases(tensors)]
    load = os.getloadavg()[0]
    rows = measure(cases, elements=elements, rounds=rounds, threads=threads)
    for row in rows:
        share = "" if row["of_memory"] is None else f"{row['of_memory']:6.0%} of memory"
        more = "" if row["of_torch"] is None else f"   {row['of_torch']:.2f} x torch"
        worst, best = (speed / 1e9 for speed in row["spread"])
        speed = f"{row['bytes_per_s'] / 1e9:6.1f} GB/s ({worst:.1f} to {best:.1f})"
        count = f"{row['ns_per_weight']:6.3f} ns per weight (processor {row['processor_ns_per_weight']:.3f})"
        print(f"{row['threads']:3d} threads  {row['name']:26s} {row['scheme']:30s} {speed} {count} {share}{more}")
    settings = {"elements": elements, "rounds": rounds, "threads": threads}
    figures = {
        "cases": rows,
        "load": [load, os.getloadavg()[0]],
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    name = "bench-update" + "-moments" * options.moments + "-tiny" * options.tiny
    print(save(name, "bench-update", settings, figures, options.results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small tensors, two rounds: a smoke test of this script")
    parser.add_argument(
        "--elements", type=lambda text: int(text.removesuffix("M")) << 20, default=64 << 20, help="weights (64M)"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", help="numbers of threads, with commas (default 1, 2, 4, ..., all)")
    parser.add_argument("--moments", action="store_true", help="measure moments of fewer bits instead")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
