"""Trains one model twice, plainly and through the engine, and compares everything bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from lt_offload.execute.device.base import Device
from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from lt_offload.model.tiles import tile_tokens
from lt_offload.schema.plan import Plan
from tests.support import models, plans
from tests.support.hostile.device import HostileDevice

BUDGET = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix."""

    family: str = "llama"
    options: tuple[str, ...] = ("keep",)
    places: tuple[str, ...] = ("device",)
    mode: str = "lazy"
    dtype: str = "float32"
    dropout: float = 0.0
    lora: bool = False
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "adamw-fused"
    lag: int = 1
    lead: int = 1
    roomy: bool = False
    seed: int = 0
    last_option: str | None = None
    chunk_tokens: int = 0
    tile_tokens: int | None = None
    shapes: tuple[tuple[int, int], ...] = ((2, 12), (2, 12), (2, 12))

    def __str__(self) -> str:
        return "-".join(str(v) for v in vars(self).values()).replace(" ", "")


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=False),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9),
    "sgd-plain": lambda groups: torch.optim.SGD(groups, lr=1e-1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


Factory = Callable[[Any], torch.optim.Optimizer]
"""Makes an optimizer from parameter groups."""


def make_optimizer(model: nn.Module, name: str | Factory) -> torch.optim.Optimizer:
    """Two parameter groups: matrices with weight decay, vectors without."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    make = OPTIMIZERS[name] if isinstance(name, str) else name
    return make([group for group in groups if group["params"]])


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def build(case: Case) -> nn.Module:
    dtype = getattr(torch, case.dtype)
    model = models.build(case.family, dropout=case.dropout, dtype=dtype, lora=case.lora, seed=case.seed)
    tile_tokens(model, case.tile_tokens)
    return model


def batches(case: Case, model: nn.Module, device: torch.device | None = None) -> list[dict[str, torch.Tensor]]:
    """The batches on ``device``; None: where the model is."""
    made = [
        models.batch(model, batch_size=b, sequence_length=s, seed=case.seed + i) for i, (b, s) in enumerate(case.shapes)
    ]
    return made if device is None else [{name: tensor.to(device) for name, tensor in batch.items()} for batch in made]


@dataclass
class Result:
    losses: list[torch.Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def plain(case: Case, prepare: Callable[[nn.Module], None] | None = None) -> Result:
    """Return the model trained without the engine; ``prepare`` changes it before."""
    model = build(case)
    if prepare is not None:
        prepare(model)
    optimizer = make_optimizer(model, case.optimizer)
    schedule = scheduler(optimizer)
    torch.manual_seed(case.seed + 1)
    losses = []
    for batch in batches(case, model):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return Result(losses, model, optimizer)


LAYOUT = ("options", "places", "last_option", "chunk_tokens", "lag", "lead", "roomy")


def planned(case: Case) -> Plan:
    model = build(case)
    layout = {name: getattr(case, name) for name in LAYOUT}
    return plans.streamed(find_blocks(model), make_optimizer(model, case.optimizer), **layout)


def offloaded(case: Case, **device_options: Any) -> Result:
    device = HostileDevice(BUDGET, **{"mode": case.mode, "seed": case.seed, "check": True} | device_options)
    return trained_on(device, case, planned(case))[0]


def trained_on(device: Device, case: Case, plan: Plan, window: int = 1) -> tuple[Result, int]:
    """Return the model trained by ``plan``, ``window`` batches per update, and the peak of device memory.

    Closes ``device``.
    """
    model = build(case)
    optimizer = make_optimizer(model, case.optimizer)
    made = batches(case, model, device.torch_device)
    after = scheduler(optimizer).step
    return trained_by(device, plan, model, optimizer, made, seed=case.seed + 1, after=after, window=window)


def trained_by(
    device: Device,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, torch.Tensor]],
    *,
    seed: int = 0,
    after: Callable[[], None] = lambda: None,
    window: int = 1,
) -> tuple[Result, int]:
    """Train ``model``, an update per ``window`` batches and one after the last, and ``after`` each.

    Returns:
        It, and the peak of device memory.
    """
    losses, peak = [], 0
    with carried_out(model, optimizer, plan, device) as engine:
        torch.manual_seed(seed)
        for number, batch in enumerate(batches, start=1):
            last = number % window == 0 or number == len(batches)
            with engine.iteration(last=last):
                loss = model(**batch).loss
                loss.backward()
                if last:
                    optimizer.step()
            if last:
                after()
            losses.append(loss.detach().clone())
            peak = max(peak, engine.stats.device_peak_bytes)
        engine.drain()
    return Result(losses, model, optimizer), peak


def in_windows(
    model: nn.Module, optimizer: torch.optim.Optimizer, windows: Iterable[Sequence[Any]], **clips: float | None
) -> list[torch.Tensor]:
    """Train ``model`` plainly, an update per window of batches; return losses, and the norms that clip it."""
    losses = []
    for window in windows:
        for batch in window:
            loss = model(**batch).loss / len(window)
            loss.backward()
            losses.append(loss.detach())
        losses += updated(model, optimizer, **clips)
    return losses


def updated(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> list[torch.Tensor]:
    """Clip and update ``model``; return the norm, if it is clipped by that."""
    norms = [] if clip_norm is None else [nn.utils.clip_grad_norm_(model.parameters(), clip_norm)]
    if clip_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), clip_value)
    optimizer.step()
    optimizer.zero_grad()
    return norms


@contextmanager
def carried_out(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, device: Device | None = None
) -> Iterator[Engine]:
    """An engine on ``device``, which is closed; None: an emulated one of the plan's budget that checks every access."""
    device = HostileDevice(plan.budget_bytes, "lazy", check=True) if device is None else device
    engine = Engine(model, optimizer, plan, device)
    try:
        engine.install()
        yield engine
    finally:
        engine.remove()
        device.close()


@contextmanager
def installed(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Iterator[Engine]:
    """An engine that follows a loop of one's own, on an emulated device that checks every access."""
    with carried_out(model, optimizer, plan, HostileDevice(BUDGET, "lazy", check=True)) as engine:
        try:
            engine.follow(optimizer)
            yield engine
        except BaseException as error:
            engine.abort(error)
            raise


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; they may be on different devices."""
    return torch.equal(a.cpu(), b.cpu())


def differences(a: Result, b: Result) -> list[str]:
    """Name everything that is not bitwise equal, wherever it is."""
    found = [f"loss {i}" for i, (x, y) in enumerate(zip(a.losses, b.losses, strict=True)) if not equal(x, y)]
    names = [name for name, _ in a.model.named_parameters()]
    state_a, state_b = a.model.state_dict(), b.model.state_dict()
    found += [f"weight {name}" for name in state_a if not equal(state_a[name], state_b[name])]
    left, right = a.optimizer.state_dict(), b.optimizer.state_dict()
    if left["param_groups"] != right["param_groups"]:
        found.append("param_groups")
    if left["state"].keys() != right["state"].keys():
        found.append("state keys")
    for key in left["state"].keys() & right["state"].keys():
        entries = left["state"][key]
        if not isinstance(entries, dict):
            found += [] if entries == right["state"][key] else [f"state {key}"]
            continue
        for field, value in entries.items():
            if not same_state(value, right["state"][key][field]):
                found.append(f"state {field} of tensor {key} ({names[key] if key < len(names) else '?'})")
    return found


def same_state(one: Any, other: Any) -> bool:
    """Whether two entries of optimizer states are equal, with all the tensors in them."""
    (left, form), (right, other_form) = tree_flatten(one), tree_flatten(other)
    pairs = zip(left, right, strict=False)
    return bool(form == other_form) and all(equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def changed(case: Case, result: Result) -> bool:
    """Whether training moved every trainable matrix: equality of untrained models would prove nothing."""
    start = dict(build(case).named_parameters())
    return all(
        not equal(p, start[name]) for name, p in result.model.named_parameters() if p.requires_grad and p.ndim > 1
    )
