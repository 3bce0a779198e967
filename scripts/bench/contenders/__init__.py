"""Who takes part in the bench: a table. Each contender's code is a module here that only its own process imports.

A module has one function ``training(case)``: a context that yields what trains on a batch (``case.Training``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to train a model."""

    name: str
    title: str
    """As tables call it."""
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tier: int = 0
    """What is run first: 0 the claim, 1 the other systems, 2 what each ingredient is worth, 3 single planners."""
    budgeted: bool = True
    """False: may use the whole device."""
    ours: bool = False
    checkpointing: tuple[bool, ...] = (False,)
    """Activation checkpointing, in the order to be tried: the next is used where the one before runs out of memory."""


def _ours(name: str, title: str, tier: int, **options: Any) -> Contender:
    return Contender(name=name, title=f"lt_offload, {title}", module="offload", options=options, tier=tier, ours=True)


_ALL = (
    Contender(name="no-offload", title="no offload", module="plain", budgeted=False),
    _ours("auto", "auto", 0),
    Contender(
        name="deepspeed-zero3",
        title="DeepSpeed ZeRO-3, CPU offload",
        module="zero3",
        tier=1,
        checkpointing=(False, True),
    ),
    Contender(
        name="deepspeed-zero3-tuned",
        title="DeepSpeed ZeRO-3, CPU offload, buffers for the budget",
        module="zero3",
        options={"tuned": True},
        tier=1,
        checkpointing=(False, True),
    ),
    Contender(name="fsdp2", title="FSDP2, CPU offload", module="fsdp2", tier=1, checkpointing=(False, True)),
    Contender(
        name="torchao",
        title="torchao CPUOffloadOptimizer, checkpointing",
        module="cpu_optimizer",
        tier=1,
        checkpointing=(True,),
    ),
    Contender(
        name="paged-adam8bit",
        title="paged 8-bit AdamW, checkpointing",
        module="paged",
        tier=1,
        checkpointing=(True,),
    ),
    _ours("no-host-update", "without host update", 2, host_update=False),
    _ours("no-activation-offload", "without activation offload", 2, activation_offload=False),
    _ours("no-recompute", "without recompute", 2, recompute=False),
    _ours("offmate", "planner offmate", 3, planner="offmate"),
    _ours("greedy", "planner greedy", 3, planner="greedy"),
    _ours("l2l", "planner l2l", 3, planner="l2l"),
    _ours("memferry", "planner memferry", 3, planner="memferry"),
    _ours("pofo", "planner pofo", 3, planner="pofo"),
    _ours("resident", "planner resident", 3, planner="resident"),
)
CONTENDERS = {contender.name: contender for contender in _ALL}
DEFAULT_TIERS = {"small": 1, "papers": 3, "curve": 1, "batches": 0}
"""Per suite: tiers up to which contenders run unless they are named."""
