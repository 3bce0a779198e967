"""Several processes, each with an engine: bit for bit what one process computes that takes their batches in turn.

One start of two processes, one of four and one of three run all cases.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import lt_offload
from lt_offload.plan import solve
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.parity.several.training import Case, Group, plainly, same, with_masters
from tests.support import models
from tests.support.engines import Result, differences, make_optimizer

LLAMA, TIED = Case(), Case(model={"family": "llama-tied"})
BF16, LORA = Case(model={"dtype": torch.bfloat16}), Case(model={"lora": True})
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
MORE = {3: {"three": (LLAMA, "tight", {})}, 4: {"four": (TIED, "middle", {}), "four, lora": (LORA, "tight", {})}}
LATE = "tight, one late"
"""The first plan once more, with one process's copies late."""


def profile(case: Case) -> Profile:
    key = repr((case.model, case.optimizer))
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where all processes have left what became of them; those that a test of this session asks for."""
    folder = tmp_path_factory.mktemp("several")
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    groups = []
    for ranks, cases in {2: PAIRS | {LATE: PAIRS["tight"]}, **MORE}.items():
        group = Group(ranks)
        for name, (case, budget, settings) in cases.items():
            if any(one.get("name") == name or one == {"ranks": ranks} for one in asked):
                group.runs.append((name, case, plan(case, budget, settings), name == LATE))
        if group.runs:
            groups.append(group)
    (folder / "groups").write_bytes(pickle.dumps(groups))
    command = [sys.executable, "-W", "error", "-m", "tests.parity.several.training", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    return folder


def require_equal(folder: Path, name: str, ranks: int, case: Case) -> None:
    """Compare what every process left with plain training in one."""
    paths = [folder / f"{name}-{rank}.pt" for rank in range(ranks)]
    assert same(paths), "all processes have the same weights and states"
    expected = plainly(case, ranks)
    loaded = [torch.load(path, weights_only=True) for path in paths]
    model = case.build()
    model.load_state_dict(loaded[0][1])
    optimizer = make_optimizer(model, case.optimizer)
    state = loaded[0][2]
    optimizer.load_state_dict(state)
    assert differences(Result(in_turn([losses for losses, *_ in loaded], case), model, optimizer), expected) == []


def in_turn(losses: Sequence[list[torch.Tensor]], case: Case) -> list[torch.Tensor]:
    """Return the losses of all processes as one has them that takes turns; norms are everybody's."""
    each = case.accumulate + (case.clip_norm is not None) + case.user
    found = []
    for begin in range(0, len(losses[0]), each):
        for own in losses:
            found += own[begin : begin + case.accumulate]
        found += losses[0][begin + case.accumulate : begin + each]
    return found


@pytest.mark.parametrize("name", [LATE, *PAIRS])
def test_two_processes_train_like_one_that_takes_turns(folder: Path, name: str) -> None:
    require_equal(folder, name, 2, (PAIRS | {LATE: PAIRS["tight"]})[name][0])


@pytest.mark.parametrize(("name", "ranks"), [("in the middle", 2), ("lora", 2), ("four", 4), ("four, lora", 4)])
def test_there_is_one_host_copy(folder: Path, name: str, ranks: int) -> None:
    """What processes have in common is in RAM once, as shares of its pages say that are added up."""
    parts = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]
    weights, states = (sum(part[kind] for part in parts) for kind in ("weights", "states"))
    assert 0 < weights <= 1.1 * max(part["weights alone"] for part in parts)
    # Each process writes those that it owns, and no others.
    assert 0 < states <= 1.1 * sum(part["states alone"] for part in parts)


@pytest.mark.parametrize("name", ["in the middle"])
def test_a_weight_that_one_process_writes_is_refused_in_all(folder: Path, name: str) -> None:
    for rank in range(2):
        said = (folder / f"lopsided-2-{rank}").read_text()
        assert said.startswith("UnsupportedError: ")
        assert "was written in process 1 only" in said


@pytest.mark.long
@pytest.mark.parametrize("ranks", MORE)
def test_so_do_more(folder: Path, ranks: int) -> None:
    for name, (case, *_) in MORE[ranks].items():
        require_equal(folder, name, ranks, case)
