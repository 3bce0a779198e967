"""The cases in which several processes are compared with one, and the plans that they carry out."""

from __future__ import annotations

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
MORE: dict[tuple[int, int], dict[str, tuple[Case, str, dict[str, Any]]]] = {
    (3, 1): {"three": (LLAMA, "tight", {})},
    (4, 1): {"four": (TIED, "middle", {}), "four, lora": (LORA, "tight", {})},
    (2, 2): {f"{name}, 2 on 2": PAIRS[name] for name in ("tight", "resident", "updated on the device", "lora")},
    (3, 3): {"three on three": (LLAMA, "tight", {})},
    (4, 2): {f"{name}, 4 on 2": case for name, case in PAIRS.items()},
}
"""The same for other numbers of processes, and of machines."""
LATE = "tight, one late"
"""The first plan once more, with one process's copies late."""


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


def plan(case: Case, budget: str, settings: dict[str, Any]) -> Plan:
    """Plan for windows of the case whose updates wait."""
    memory, planner = BUDGETS[budget]
    settings = {"planner": planner, "accumulate": case.accumulate} | settings
    return solve(profile(case), memory=memory, delayed=True, **settings)
