"""The cases in which several processes are compared with one, and the plans that they carry out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import lt_offload
from lt_offload.plan import solve
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.parity.several.training import Case, with_masters
from tests.support import models
from tests.support.engines import make_optimizer

LLAMA, TIED = Case(), Case(model={"family": "llama-tied"})
BF16, LORA = Case(model={"dtype": torch.bfloat16}), Case(model={"lora": True})
QLORA = Case(four_bits=True)
RECOMPUTED: dict[str, Any] = {"activation_offload": False}
PAIRS: dict[str, tuple[Case, str, dict[str, Any]]] = {
    "tight": (LLAMA, "tight", {}),
    "in the middle": (LLAMA, "middle", {}),
    "resident": (LLAMA, "resident", {}),
    "recomputed": (LLAMA, "tight", RECOMPUTED),
    "updated on the device": (LLAMA, "tight", {"host_update": False}),
    "tied": (TIED, "tight", {}),
    "bf16": (BF16, "middle", {}),
    "lora": (LORA, "tight", {}),
    "qlora": (QLORA, "tight", {}),
    "qlora, in the middle": (QLORA, "middle", {}),
    "sgd": (Case(optimizer="sgd"), "middle", {}),
    "adafactor": (Case(optimizer="adafactor"), "tight", {}),
    "masters": (Case(model={"dtype": torch.bfloat16}, optimizer=with_masters, user=True), "tight", {}),
    "accumulated": (Case(accumulate=2), "tight", {}),
    "clipped by norm": (Case(clip_norm=0.3), "middle", {}),
    "clipped by value": (Case(clip_value=1e-3), "tight", {}),
    "written between steps": (Case(user=True), "middle", {}),
    "written, with adapters": (Case(model={"lora": True}, user=True), "tight", {}),
}
"""Cases, budgets and settings of plans, for two processes."""
LATE = "tight, one late"
"""The first plan once more, with one process's copies late."""
IS_LATE = ", one late"
"""In the name of cases in which one process's copies, and what it sends to other machines, are late."""
BETWEEN = ("tight", "tied", "accumulated", "clipped by norm", "clipped by value", "lora", "written between steps")
"""Those of several machines."""
MORE: dict[tuple[int, int], dict[str, tuple[Case, str, dict[str, Any]]]] = {
    (3, 1): {"three": (LLAMA, "tight", {})},
    (4, 1): {"four": (TIED, "middle", {}), "four, lora": (LORA, "tight", {})},
    (2, 2): {f"{name}, 2 on 2": PAIRS[name] for name in ("tight", "resident", "updated on the device", "lora")}
    | {f"{name}{IS_LATE}, 2 on 2": PAIRS[name] for name in BETWEEN[:3]},
    (3, 3): {"three on three": (LLAMA, "tight", {}), f"three on three{IS_LATE}": (LLAMA, "tight", {})},
    (4, 2): {f"{name}, 4 on 2": case for name, case in PAIRS.items()}
    | {f"{name}{IS_LATE}, 4 on 2": PAIRS[name] for name in BETWEEN},
}
"""The same for other numbers of processes, and of machines."""


def profile(case: Case) -> Profile:
    key = repr((case.model, case.four_bits, case.optimizer))
    if key not in _profiles:
        _profiles[key] = measured(case)
    return _profiles[key]


_profiles: dict[str, Profile] = {}


def measured(case: Case) -> Profile:
    model = case.build()
    batch = models.batch(model, batch_size=2, sequence_length=12, seed=99)
    return lt_offload.profile(model, batch, optimizer=make_optimizer(model, case.optimizer))


BUDGETS = {"tight": (250_000, "l2l"), "middle": (400_000, "offmate"), "resident": (8_000_000, "offmate")}
"""Bytes, and a planner: which one matters little, and few are quicker than all."""


def plan(case: Case, budget: str, settings: dict[str, Any], machines: int = 1) -> Plan:
    """Plan for windows of the case whose updates wait."""
    memory, planner = BUDGETS[budget]
    settings = {"planner": planner, "accumulate": case.accumulate} | settings
    found = replace(profile(case), machines=machines, common_updates=machines > 1)
    return solve(found, memory=memory, delayed=True, **settings)
