"""What the engine costs the thread that launches kernels, per block and step; goal: at most 0.3 ms.

    python -m scripts.bench.launch [--tiny] [--device cpu|cuda] [--layers N] [--steps N] [--rounds N]

The model has many tiny blocks, so that hardly anything but launching takes time. Plans:

    resident    everything stays, updates on the device
    streamed    every weight travels, updates on the host
    recompute   as resident, every block runs again in the backward
    offload     as resident, saved activations go to the host

Each is measured in two ways, with a plain loop over a copy of the model taking turns with the engine:

    difference  (engine's step - plain step) / (2 * blocks), by the clock and by the processor time of the launching
                thread (emulated device: the update on the host and copies run on other threads)
    own         what the launching thread spends between the engine's entries and the user's forward and backward, by
                phase, in the iteration where that was least: all others were disturbed. Time in which it waits for
                copies is shown but not counted: links and updates decide about it.
                Updates on the device are the optimizer's work, too; compare ``plain_update_s``.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from scripts.common import arguments, in_child, save, serve_child

PROGRAM = "scripts.bench.launch"
GOAL_S = 0.3e-3
PLANS = ("resident", "streamed", "recompute", "offload")
WARM_UP = 3
WAITING = "waiting"
OUTSIDE = ("outside", "model", WAITING)
"""Phases that are not the engine's."""


class Phases:
    """Exclusive time by phase: whoever is entered last is running.

    Args:
        clock: processor time of the thread where one thread launches everything; wall time where autograd has its own.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._running = ["outside"]
        self._since = 0.0
        self._switch_s = 0.0
        self._switch_s = self._calibrate()

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, whose time is that of ``phase``; on the lanes' threads it is not timed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith("lt_offload"):
                return function(*args, **kwargs)
            self._enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return run

    def reset(self) -> None:
        """Begin anew."""
        self.seconds.clear()
        self.calls.clear()
        self._since = self._clock()

    def per(self, count: int) -> dict[str, float]:
        """Return seconds by phase for each of ``count``, without what measuring them took."""
        return {
            phase: max(0.0, seconds - self.calls[phase] * self._switch_s) / count
            for phase, seconds in sorted(self.seconds.items(), key=lambda item: -item[1])
        }

    def _enter(self, phase: str) -> None:
        now = self._clock()
        self.seconds[self._running[-1]] += now - self._since
        self._running.append(phase)
        self.calls[phase] += 1
        self._since = self._clock()

    def _leave(self) -> None:
        now = self._clock()
        self.seconds[self._running.pop()] += now - self._since
        self._since = self._clock()

    def _calibrate(self) -> float:
        """Return what a phase that does nothing seems to take."""
        nothing = self.timed("nothing", lambda: None)
        for _ in range(20_000):
            nothing()
        found = self.seconds["nothing"] / 20_000
        self.reset()
        return found


@contextmanager
def instrumented(phases: Phases, copies: Counter[str]) -> Iterator[None]:
    """Time the engine's entries and parts, for engines that are made within the context; count what its lanes do."""
    import torch

    from lt_offload.execute import engine
    from lt_offload.execute.blocks import run as units
    from lt_offload.execute.device import cuda, emulated
    from lt_offload.execute.interpreter import Interpreter
    from lt_offload.execute.training.passes import Passes
    from lt_offload.execute.updates import gradients

    with ExitStack() as stack:

        def within(owner: Any, phase: str, *names: str) -> None:
            for name in names:
                stack.enter_context(patch.object(owner, name, phases.timed(phase, getattr(owner, name))))

        def counted(owner: Any, name: str) -> None:
            original = getattr(owner, name)

            def run(self: Any, *args: Any, **kwargs: Any) -> Any:
                copies[f"{name} {args[0]}" if name == "submit" else name] += 1
                return original(self, *args, **kwargs)

            stack.enter_context(patch.object(owner, name, run))

        for device in (emulated.EmulatedDevice, cuda.CudaDevice):
            counted(device, "submit")
            counted(device, "copy")
            counted(device, "copy_all")
            within(device, "device", "submit", "mark", "place", "free", "begin_compute", "end_compute", "empty")
            within(device, "device", "empty_all")
            within(device, WAITING, "wait")
        within(Passes, "around the forward", "forward")
        within(Passes, "around the backward", "_run_backward")
        within(engine.Engine, "end of the iteration", "finish")
        within(Interpreter, "walk", "begin", "end")
        within(units.BlockRun, "model", "_call")
        within(torch.autograd, "model", "backward")
        within(gradients.Gradients, "gradient hooks", "_collect")
        within(gradients.Gradients, "update", "use_on_device")
        init = torch.autograd.graph.saved_tensors_hooks.__init__

        def hooks(self: Any, pack: Any, unpack: Any) -> None:
            init(self, phases.timed("saved tensors", pack), phases.timed("saved tensors", unpack))

        stack.enter_context(patch.object(torch.autograd.graph.saved_tensors_hooks, "__init__", hooks))
        yield


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
        self.engine = Engine(self.model, self.optimizer, loaded, open_device(loaded.budget_bytes, device))
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
        # Tight budgets are not what this is about; nor is all of a device, of which others have a part.
        room = max(plan.predicted.device_peak_bytes, min(profile.hardware.device_bytes, 2 << 30))
        plan = replace(plan, budget_bytes=room)
        files[name] = str(plan.save(f"{folder}/{name}.json"))
    return {"blocks": len(profile.blocks), "tensors": len(profile.tensors), "files": files}


def difference(layers: int, device: str, plan: str, steps: int, rounds: int) -> dict[str, Any]:
    """Let a plain loop and the engine take turns; return medians over rounds and the median of the differences."""
    plain, ours = Loop(layers, device, None), Loop(layers, device, plan)
    try:
        for _ in range(WARM_UP):
            plain.iterate()
            ours.iterate()
        gc.collect()
        gc.freeze()
        figures: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            for _ in range(steps):
                plain.settle()
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
    finally:
        ours.close()


def own(layers: int, device: str, plan: str, steps: int) -> dict[str, Any]:
    """Time the engine's own parts and count what it submits, per iteration."""
    phases, copies = Phases(time.thread_time if device == "cpu" else time.perf_counter), Counter[str]()
    with instrumented(phases, copies):
        ours = Loop(layers, device, plan)
        try:
            for _ in range(WARM_UP):
                ours.iterate()
            found = []
            gc.collect()
            gc.freeze()
            copies.clear()
            for _ in range(steps):
                ours.settle()
                phases.reset()
                ours.iterate()
                found.append(phases.per(1))
            ours.settle()
            counts = {name: count / steps for name, count in sorted(copies.items())}
        finally:
            ours.close()
    least = min(found, key=lambda each: sum(s for phase, s in each.items() if phase not in OUTSIDE))
    return {"phases": least, "counts": counts}


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
        calls = 2 * made["blocks"]
        plans = []
        for name, file in made["files"].items():
            compared = in_child(
                PROGRAM, "difference", layers=layers, device=device, plan=file, steps=steps, rounds=rounds
            )
            parts = in_child(PROGRAM, "own", layers=layers, device=device, plan=file, steps=steps * rounds)
            phases = {phase: seconds / calls for phase, seconds in parts["phases"].items()}
            plans.append(
                {
                    "name": name,
                    **compared,
                    "per_block_step_s": compared["difference_s"] / calls,
                    "thread_per_block_step_s": compared["thread_difference_s"] / calls,
                    "own_per_block_step_s": sum(s for phase, s in phases.items() if phase not in OUTSIDE),
                    "waiting_per_block_step_s": phases.get(WAITING, 0.0),
                    "phases_s": {phase: s for phase, s in phases.items() if phase not in OUTSIDE},
                    "per_iteration": parts["counts"],
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
        own_s, step_s, thread_s = (format_seconds(plan[f"{kind}per_block_step_s"]) for kind in ("own_", "", "thread_"))
        counts = ", ".join(f"{count:g} {name}" for name, count in plan["per_iteration"].items())
        print(f"{plan['name']:10s} own {own_s:>9s}   difference {step_s:>9s} (thread {thread_s})   {counts}")
        for phase, seconds in plan["phases_s"].items():
            print(f"    {phase:22s} {format_seconds(seconds):>9s}")
    settings = {name: getattr(options, name) for name in ("device", "layers", "steps", "rounds")}
    name = f"bench-launch-{options.device}" + ("-tiny" if options.tiny else "")
    print(save(name, "bench-launch", settings, figures | {"seconds": time.monotonic() - began}, options.results))
    return 0


if __name__ == "__main__":
    serve_child(make_plans, difference, own)
    raise SystemExit(main())
