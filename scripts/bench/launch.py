"""What the engine costs the thread that launches kernels, per block and step; goal: at most 0.2 ms.

    python -m scripts.bench.launch [--tiny] [--device cpu|cuda] [--layers N] [--steps N] [--rounds N]

The model has many tiny blocks, so that hardly anything but launching takes time. Plans:

    resident    everything stays, updates on the device
    streamed    every weight travels, updates on the host
    recompute   as resident, every block runs again in the backward
    offload     as resident, saved activations go to the host

The emulated device keeps no account of its memory meanwhile, as a GPU keeps none. Each is measured in two ways:

    difference  (engine's step - plain step) / (2 * blocks), by the clock and by the processor time of the launching
                thread (emulated device: the update on the host and copies run on other threads); a plain loop over a
                copy of the model takes turns with the engine
    calls       of functions of the package by the launching thread, per block and step: the same on a busy machine.
                Where they are and what they take under the profiler is said by file. Copies and other tasks of the
                lanes are counted per iteration.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from scripts.common import arguments, in_child, save, serve_child

PROGRAM = "scripts.bench.launch"
GOAL_S = 0.2e-3
"""Of the launching thread."""
PLANS = ("resident", "streamed", "recompute", "offload")
WARM_UP = 3
SHOWN_FILES = 12


class Loop:
    """A plain loop, or the engine's, one iteration at a time."""

    def __init__(self, layers: int, device: str, plan: str | None) -> None:
        import torch

        self.model = tiny_llama(layers)
        self.device = torch.device(device if plan is None else "cpu")
        self.batch = _batch(torch.device(device))
        self.engine: Any = None
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.update_s = 0.0
        """Time of the last ``optimizer.step()``."""
        if plan is not None:
            self._offload(plan, device)

    def _offload(self, plan: str, device: str) -> None:
        from lt_offload.execute import open_device
        from lt_offload.execute.engine import Engine
        from lt_offload.schema.plan import Plan

        loaded = Plan.load(plan)
        opened = open_device(loaded.budget_bytes, device, context=loaded.context_bytes)
        self.engine = Engine(self.model, self.optimizer, loaded, opened)
        self.engine.install()

    def iterate(self) -> tuple[float, float]:
        """Run one iteration; return the seconds it took by the clock and of this thread's processor time."""
        began, used = time.perf_counter(), time.thread_time()
        if self.engine is None:
            self._forward_and_backward()
            updated = time.perf_counter()
            self.optimizer.step()
            self.update_s = time.perf_counter() - updated
            self.optimizer.zero_grad()
        else:
            with self.engine.iteration(signature="only"):
                self._forward_and_backward()
        return time.perf_counter() - began, time.thread_time() - used

    def _forward_and_backward(self) -> None:
        self.model(**self.batch).loss.backward()

    def settle(self) -> None:
        """Let everything end that goes on elsewhere, so that the next iteration of somebody else has the machine."""
        import torch

        if self.engine is not None:
            self.engine.device.drain()
        if self.batch["input_ids"].is_cuda:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Give everything back."""
        if self.engine is not None:
            self.engine.remove()
            self.engine.device.close()


def make_plans(layers: int, device: str, folder: str) -> dict[str, Any]:
    """Profile the model, save a plan for each of ``PLANS`` and return their files."""
    import torch

    import lt_offload
    from lt_offload.plan.iteration.decisions import Decisions, resident_tensors
    from scripts.planning import scheduled, stream_all

    model = tiny_llama(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    profile = lt_offload.profile(model, _batch(torch.device("cpu")), optimizer=optimizer, device=device)
    files = {}
    for name in PLANS:
        if name == "streamed":
            plan = stream_all(profile)
        else:
            offered = [{option.name for option in block.options} for block in profile.blocks]
            chosen: Any = tuple(name if name in names else "keep" for names in offered)
            plan = scheduled(name, Decisions(tensors=resident_tensors(profile), options=chosen), profile)
        # Tight budgets are not what this is about; nor is all of a device, of which others have a part. The context of
        # a large GPU is a gigabyte by itself, and the plain loop is in the same process.
        room = max(plan.predicted.device_peak_bytes, profile.hardware.context_bytes + (2 << 30))
        plan = replace(plan, budget_bytes=min(profile.hardware.device_bytes, room))
        files[name] = str(plan.save(f"{folder}/{name}.json"))
    return {"blocks": len(profile.blocks), "tensors": len(profile.tensors), "files": files}


def difference(layers: int, device: str, plan: str, steps: int, rounds: int) -> dict[str, Any]:
    """Let a plain loop and the engine take turns; return medians over rounds and the median of the differences."""
    with ExitStack() as stack:
        stack.enter_context(without_account())
        plain, ours = Loop(layers, device, None), Loop(layers, device, plan)
        stack.callback(ours.close)
        for _ in range(WARM_UP):
            plain.iterate()
            ours.iterate()
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        figures: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(rounds * steps):
            plain.settle()
            with ours.engine._guard.suspended:  # else users' code is watched, and this loop is as slow
                plain_s, plain_cpu = plain.iterate()
            plain.settle()
            ours.settle()
            ours_s, ours_cpu = ours.iterate()
            ours.settle()
            for name, value in (
                ("plain_step_s", plain_s),
                ("plain_update_s", plain.update_s),
                ("engine_step_s", ours_s),
                ("difference_s", ours_s - plain_s),
                ("thread_difference_s", ours_cpu - plain_cpu),
            ):
                figures[name].append(value)
        return {name: statistics.median(values) for name, values in figures.items()}


def without_account() -> Any:
    """Within the context emulated devices keep no account."""
    from lt_offload.execute.device.emulated import EmulatedDevice

    return patch.object(EmulatedDevice, "_counting", lambda device, **_: nullcontext())


def calls(layers: int, device: str, plan: str, steps: int) -> dict[str, Any]:
    """Count calls of the package's functions, by file, and what its lanes are given, per iteration."""
    import torch

    from lt_offload.execute.device import cuda, emulated

    submitted = Counter[str]()
    with ExitStack() as stack:
        stack.enter_context(without_account())
        for owner in (emulated.EmulatedDevice, cuda.CudaDevice):
            stack.enter_context(patch.object(owner, "submit", _counted(owner.submit, submitted)))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # or a GPU's backward is on no profile
        ours = Loop(layers, device, plan)
        stack.callback(ours.close)
        for _ in range(WARM_UP):
            ours.iterate()
        submitted.clear()
        profile = cProfile.Profile()
        for _ in range(steps):
            ours.settle()
            profile.runcall(ours.iterate)
        ours.settle()
    files: dict[str, list[float]] = {}
    for (file, _, _), (_, count, seconds, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if "/lt_offload/" in file:
            known = files.setdefault(file.rpartition("/lt_offload/")[2], [0.0, 0.0])
            known[0], known[1] = known[0] + count / steps, known[1] + seconds / steps
    ordered = sorted(files.items(), key=lambda item: -item[1][0])
    return {"files": dict(ordered), "submitted": {lane: count / steps for lane, count in sorted(submitted.items())}}


def _counted(submit: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def run(self: Any, lane: str, *args: Any, **kwargs: Any) -> Any:
        counts[lane] += 1
        return submit(self, lane, *args, **kwargs)

    return run


def tiny_llama(layers: int) -> Any:
    """Return a model of many tiny blocks, in which hardly anything but launching takes time."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def _batch(device: Any) -> dict[str, Any]:
    import torch

    ids = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids.clone()}


def measure(layers: int, device: str, steps: int, rounds: int) -> dict[str, Any]:
    """Return the figures of every plan, each measured in processes of its own."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = in_child(PROGRAM, "make_plans", layers=layers, device=device, folder=folder)
        halves = 2 * made["blocks"]
        plans = []
        for name, file in made["files"].items():
            compared = in_child(
                PROGRAM, "difference", layers=layers, device=device, plan=file, steps=steps, rounds=rounds
            )
            counted = in_child(PROGRAM, "calls", layers=layers, device=device, plan=file, steps=steps)
            plans.append(
                {
                    "name": name,
                    **compared,
                    "per_block_step_s": compared["difference_s"] / halves,
                    "thread_per_block_step_s": compared["thread_difference_s"] / halves,
                    "calls_per_block_step": sum(count for count, _ in counted["files"].values()) / halves,
                    **counted,
                }
            )
    return {"blocks": made["blocks"], "tensors": made["tensors"], "goal_s": GOAL_S, "plans": plans}


def main() -> int:
    """Measure, print and save."""
    from lt_offload.units import format_seconds

    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="few blocks and steps: a smoke test of this script")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu is the emulated device")
    parser.add_argument("--layers", type=int, default=25, help="decoder layers (default 25)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round (default 10)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds (default 4)")
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.steps, options.rounds = min(options.layers, 4), 2, 1
    began = time.monotonic()
    figures = measure(options.layers, options.device, options.steps, options.rounds)
    for plan in figures["plans"]:
        step_s, thread_s = (format_seconds(plan[f"{kind}per_block_step_s"]) for kind in ("", "thread_"))
        lanes = ", ".join(f"{count:g} {lane}" for lane, count in plan["submitted"].items())
        count = f"{plan['calls_per_block_step']:.1f} calls"
        print(f"{plan['name']:10s} {step_s:>9s} (thread {thread_s}), {count} per block and step; {lanes}")
        for file, (count, seconds) in list(plan["files"].items())[:SHOWN_FILES]:
            print(f"    {file:40s} {count:8.0f} calls {format_seconds(seconds):>9s}")
    settings = {name: getattr(options, name) for name in ("device", "layers", "steps", "rounds")}
    name = f"bench-launch-{options.device}" + ("-tiny" if options.tiny else "")
    print(save(name, "bench-launch", settings, figures | {"seconds": time.monotonic() - began}, options.results))
    return 0


if __name__ == "__main__":
    serve_child(make_plans, difference, calls)
    raise SystemExit(main())
