"""One training run of the bench, the same for every contender: model, data, optimizer, memory. Imports torch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.machine import driver
from scripts.bench.workloads import Workload

LEARNING_RATE = 1e-4
_SAMPLE = 1_000_003
"""Length of the sample of normal numbers that weights repeat; prime, so that no two rows of a matrix are equal."""
_SCALE = 0.02

Batch = dict[str, Tensor]


class Unsupported(Exception):
    """The contender cannot run here at all; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a contender hands to the loop."""

    step: Callable[[Batch], Tensor]
    """Train on a batch, given on the host, and return its loss. May return before the work is done."""
    figures: Callable[[], dict[str, Any]] = dict
    """Asked after the last step."""
    own_limit: bool = False
    """Whether it keeps to the budget by itself, once it has begun."""
    notes: tuple[str, ...] = ()
    """What differs from the plain run: precision of states, other updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What a contender is asked to do."""

    workload: Workload
    device: str
    """``"cuda"``, or ``"cpu"`` for the emulated device."""
    budget_bytes: int | None
    """None: the whole device."""
    host_bytes: int
    folder: Path
    """Where processes of the same workload share what they measured."""
    progress: Path
    steps: int
    host_given: bool = False
    """Whether somebody has said how much RAM there is; otherwise ``host_bytes`` is what was free."""
    _contexts: list[int] = field(default_factory=list)
    """Bytes of the CUDA context, measured whenever it may have grown."""

    @property
    def place(self) -> torch.device:
        """Where blocks run."""
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        found: torch.dtype = getattr(torch, self.workload.dtype)
        return found

    def say(self, phase: str, **values: Any) -> None:
        """Note how far this process has come, for the runner to read if it has to end it."""
        known = json.loads(self.progress.read_text("utf-8")) if self.progress.exists() else {"phases": []}
        known["phases"].append([phase, time.time()])
        self.progress.write_text(json.dumps(known | values), encoding="utf-8")

    def model(self, device: torch.device | str = "cpu") -> nn.Module:
        """Return the model with weights that depend on the workload only."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self.say("building the model")
        config = AutoConfig.for_model(**self.workload.settings)
        config.use_cache = False
        with _parameters_without_memory():
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=self.dtype)  # type: ignore[no-untyped-call]
        _materialize(model, torch.device(device))
        return model.train()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer that all contenders use if they can."""
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def batches(self) -> list[Batch]:
        """Return one batch per step, on the host; no sequence is padded."""
        shape = (self.workload.batch_size, self.workload.sequence_length)
        vocabulary = self.workload.settings["vocab_size"]
        found = []
        for seed in range(self.steps):
            ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))
            found.append({"input_ids": ids, "labels": ids.clone()})
        return found

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], Tensor]:
        """Return what trains on a batch as a whole."""

        def step(batch: Batch) -> Tensor:
            loss: Tensor = model(**{name: values.to(self.place) for name, values in batch.items()}).loss
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def plain_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], Tensor]:
        """Return what trains on the parts of a batch, one after the other."""
        parts = self.workload.parts

        def step(batch: Batch) -> Tensor:
            total = torch.zeros((), device=self.place)
            chunks = [values.to(self.place).chunk(parts) for values in batch.values()]
            for part in zip(*chunks, strict=True):
                loss: Tensor = model(**dict(zip(batch, part, strict=True))).loss / parts
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def limit(self) -> None:
        """Let torch's allocator take what the budget leaves beside the context.

        Every contender's allocator gives back single pages, also that of the run without a budget.

        Raises:
            Unsupported: if the context is larger than the budget, or others occupy the device.
        """
        if self.device != "cuda":
            return
        driver.use_expandable_segments(self.place)
        if self.budget_bytes is None:
            return
        driver.warm_up(self.place)  # every contender loads these kernels; those of its own are followed
        context = driver.beside_bytes(self.place)[0]
        room, free = self.budget_bytes - context, torch.cuda.mem_get_info(self.place)[0]
        if not 0 < room <= free + torch.cuda.memory_reserved(self.place):
            raise Unsupported(f"of {self.budget_bytes} bytes the context takes {context}; {free} are free beside it")
        self.follow()
        self.say("memory limited", context_bytes=context)

    def follow(self) -> None:
        """Take from the allocator what the context has grown by: kernels are loaded when they are first launched."""
        if self.device != "cuda" or self.budget_bytes is None:
            return
        self._contexts.append(driver.beside_bytes(self.place)[0])
        room = max(0, self.budget_bytes - max(self._contexts))
        total = torch.cuda.mem_get_info(self.place)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, room / total), self.place)
        if torch.cuda.memory_reserved(self.place) > room:
            torch.cuda.empty_cache()  # a lower limit alone takes nothing back, and the row would be over the budget


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Let modules that are made within the context have their parameters on the meta device, but real buffers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Give every parameter memory and numbers: ones for norms, zeros for biases, else parts of one normal sample.

    Drawing billions of random numbers would take longer than the measurement.
    """
    sample = torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0)).mul_(_SCALE)
    samples: dict[torch.dtype, Tensor] = {}
    made: dict[int, nn.Parameter] = {}
    offset = 0
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                if parameter.dim() == 1:
                    values.fill_(0.0 if name == "bias" else 1.0)
                else:
                    if parameter.dtype not in samples:
                        samples[parameter.dtype] = sample.to(device=device, dtype=parameter.dtype)
                    _repeat(samples[parameter.dtype], values.view(-1), offset)
                    offset = (offset + values.numel() + 1) % _SAMPLE
                made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                made[id(made[id(parameter)])] = made[id(parameter)]
            module._parameters[name] = made[id(parameter)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _repeat(sample: Tensor, target: Tensor, offset: int) -> None:
    """Fill ``target`` with ``sample``, again and again, beginning at ``offset``."""
    position = 0
    while position < target.numel():
        count = min(sample.numel() - offset, target.numel() - position)
        target[position : position + count].copy_(sample[offset : offset + count])
        position, offset = position + count, 0


def finite(losses: Iterable[float]) -> list[float | None]:
    """Return ``losses`` as JSON can hold them."""
    return [loss if math.isfinite(loss) else None for loss in losses]
