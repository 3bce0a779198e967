"""The cases in which several processes are compared with one, and the plans that they carry out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import lt_offload
from lt_offload.plan import Settings, make_plan
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.parity.several.training import Case, with_masters
from tests.support import models
from tests.support.engines import make_optimizer

LLAMA, TIED = Case(), Case(model={"family": "llama-tied"})
BF16, LORA = Case(model={"dtype": torch.bfloat16}), Case(model={"lora": True})
QLORA = Case(four_bits=True)
BESIDE: dict[str, Any] = {"delayed": False, "hosted": True}
"""Updates run beside the backward, all on the host."""
RECOMPUTED: dict[str, Any] = {"activation_offload": False}
PAIRS: dict[str, tuple[Case, str, dict[str, Any]]] = {
    "tight": (LLAMA, "tight", {}),
    "in the middle": (LLAMA, "middle", {}),
    "resident": (LLAMA, "resident", {}),
    "recomputed": (LLAMA, "tight", RECOMPUTED),
    "updated on the device": (LLAMA, "tight", {"host_update": False}),
    "tied": (TIED, "tight", {}),
    "bf16": (BF16, "middle", {}),
    "tiles": (Case(tile_tokens=5, clip_norm=0.3), "tight", {}),
    "lora": (LORA, "tight", {}),
    "qlora": (QLORA, "tight", {}),
    "qlora, in the middle": (QLORA, "middle", {}),
    "lookups": (Case(lookups=True, accumulate=2), "in host memory", {}),
    "lookups, written": (Case(lookups=True, user=True), "in host memory", RECOMPUTED),
    "lookups, lora, written": (Case(model={"lora": True}, lookups=True, user=True), "in host memory", {}),
    "lookups, qlora": (Case(lookups=True, four_bits=True), "in host memory", {}),
    "sgd": (Case(optimizer="sgd"), "middle", {}),
    "adafactor": (Case(optimizer="adafactor"), "tight", {}),
    "masters": (Case(model={"dtype": torch.bfloat16}, optimizer=with_masters, user=True), "tight", {}),
    "accumulated": (Case(accumulate=2), "tight", {}),
    "clipped by norm": (Case(clip_norm=0.3), "middle", {}),
    "clipped by value": (Case(clip_value=1e-3), "tight", {}),
    "written between steps": (Case(user=True), "middle", {}),
    "written, with adapters": (Case(model={"lora": True}, user=True), "tight", {}),
    "beside": (LLAMA, "tight", BESIDE),
    "beside, in the middle": (LLAMA, "middle", BESIDE),
    "beside, resident": (LLAMA, "resident", BESIDE),
    "beside, recomputed": (LLAMA, "tight", BESIDE | RECOMPUTED),
    "beside, tied": (TIED, "tight", BESIDE),
    "beside, bf16": (BF16, "middle", BESIDE),
    "beside, tiles": (Case(tile_tokens=5, accumulate=2), "middle", BESIDE),
    "beside, lora": (LORA, "tight", BESIDE),
    "beside, qlora": (QLORA, "middle", BESIDE),
    "beside, lookups": (Case(lookups=True, user=True), "in host memory", BESIDE),
    "beside, sgd": (Case(optimizer="sgd"), "middle", BESIDE),
    "beside, masters": (Case(model={"dtype": torch.bfloat16}, optimizer=with_masters, user=True), "tight", BESIDE),
    "beside, accumulated": (Case(accumulate=2), "tight", BESIDE),
    "beside, three accumulated": (Case(accumulate=3), "middle", BESIDE),
    "beside, clipped by value": (Case(clip_value=1e-3), "tight", BESIDE),
    "beside, written between steps": (Case(user=True), "middle", BESIDE),
}
"""Cases, budgets and settings of plans, for two processes."""
IS_LATE = ", one late"
"""In the name of cases in which one process's copies, and what it sends to other machines, are late."""
LATE = ("tight", *(name for name in PAIRS if name.startswith("beside")))
"""Those of two processes that are tried so."""
BETWEEN = ("tight", "tied", "accumulated", "clipped by norm", "clipped by value", "lora", "written between steps")
"""Those of several machines."""
MORE: dict[tuple[int, int], dict[str, tuple[Case, str, dict[str, Any]]]] = {
    (3, 1): {
        "three": (LLAMA, "tight", {}),
        "three, beside": (LLAMA, "tight", BESIDE),
        f"three, beside{IS_LATE}": (LLAMA, "tight", BESIDE),
        f"three, beside, accumulated{IS_LATE}": (Case(accumulate=2), "middle", BESIDE),
        "three, beside, one idle": (Case(idle=True), "tight", BESIDE),
        f"three, beside, one idle{IS_LATE}": (Case(idle=True), "tight", BESIDE),
        f"three, beside, accumulated, one idle{IS_LATE}": (Case(idle=True, accumulate=2), "tight", BESIDE),
    },
    (4, 1): {
        "four": (TIED, "middle", {}),
        "four, lora": (LORA, "tight", {}),
        "four, beside": (TIED, "middle", BESIDE),
        f"four, beside{IS_LATE}": (TIED, "tight", BESIDE),
        "four, beside, lora": (LORA, "tight", BESIDE),
    },
    (2, 2): {f"{name}, 2 on 2": PAIRS[name] for name in ("tight", "resident", "updated on the device", "lora")}
    | {f"{name}{IS_LATE}, 2 on 2": PAIRS[name] for name in BETWEEN[:3]},
    (3, 3): {"three on three": (LLAMA, "tight", {}), f"three on three{IS_LATE}": (LLAMA, "tight", {})},
    (4, 2): {f"{name}, 4 on 2": case for name, case in PAIRS.items() if not name.startswith("beside")}
    | {f"{name}{IS_LATE}, 4 on 2": PAIRS[name] for name in BETWEEN},
}
"""The same for other numbers of processes, and of machines."""


def profile(case: Case) -> Profile:
    key = repr((case.model, case.four_bits, case.lookups, case.optimizer, case.idle, case.tile_tokens))
    if key not in _profiles:
        _profiles[key] = measured(case)
    return _profiles[key]


_profiles: dict[str, Profile] = {}


def measured(case: Case) -> Profile:
    model = case.build()
    batch = models.batch(model, batch_size=2, sequence_length=12, seed=99)
    return lt_offload.profile(model, batch, optimizer=make_optimizer(model, case.optimizer))


BUDGETS = {"tight": (250_000, "l2l"), "middle": (400_000, "offmate"), "resident": (8_000_000, "offmate")}
BUDGETS["in host memory"] = 300_000, "offmate"
"""Bytes, and a planner: which one matters little, and few are quicker than all."""


def plan(case: Case, budget: str, settings: dict[str, Any], machines: int = 1) -> Plan:
    """Plan for windows of the case: whose updates wait, unless ``settings`` say otherwise."""
    memory, planner = BUDGETS[budget]
    settings = {"planner": planner, "accumulate": case.accumulate, "delayed": True} | settings
    found = replace(profile(case), machines=machines, common_updates=machines > 1)
    made = make_plan(found, Settings(memory=memory, **settings))
    assert not case.lookups or any(op.zero_copy for op in made.ops)
    return made
