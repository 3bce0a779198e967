"""Several processes, each with an engine: bit for bit what one process computes that takes their batches in turn.

One start of two processes, one of four and one of three run all cases of one machine. Machines are tried out on one:
processes of different ones share no memory.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parity.several.cases import IS_LATE, LATE, MORE, PAIRS, plan
from tests.parity.several.training import HANG, Case, Group, in_turn, plainly, same, same_as_stock
from tests.support.engines import Result, differences, make_optimizer

pytestmark = pytest.mark.long

ONE_LATE = {f"{name}{IS_LATE}": PAIRS[name] for name in LATE}
"""Once more, with one process's copies late."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where all processes have left what became of them; those that a test of this session asks for."""
    folder = tmp_path_factory.mktemp("several")
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    groups = []
    for (ranks, machines), cases in {(2, 1): PAIRS | ONE_LATE, **MORE}.items():
        group = Group(ranks, machines=machines, stock=(ranks, machines) == (2, 1))
        for name, (case, budget, settings) in cases.items():
            if any(one.get("name") == name or one == {"group": (ranks, machines)} for one in asked):
                group.runs.append((name, case, plan(case, budget, settings, machines), IS_LATE in name))
        if group.runs:
            groups.append(group)
    (folder / "groups").write_bytes(pickle.dumps(groups))
    command = [sys.executable, "-W", "error", "-m", "tests.parity.several.training", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
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


@pytest.mark.parametrize("name", [*ONE_LATE, *PAIRS])
def test_two_processes_train_like_one_that_takes_turns(folder: Path, name: str) -> None:
    require_equal(folder, name, 2, (PAIRS | ONE_LATE)[name][0])


@pytest.mark.parametrize("name", PAIRS)
def test_they_train_like_plain_pytorchs(folder: Path, name: str) -> None:
    assert all(same_as_stock(folder, name, rank) for rank in range(2))


@pytest.mark.parametrize(
    ("name", "ranks"), [("in the middle", 2), ("lora", 2), ("qlora", 2), ("four", 4), ("four, lora", 4)]
)
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
        said = (folder / f"lopsided-2 on 1-{rank}").read_text()
        assert said.startswith("UnsupportedError: ")
        assert "was written in process 1 only" in said


@pytest.mark.parametrize(("name", "ranks", "machines"), [("lora, 4 on 2", 4, 2), ("in the middle, 4 on 2", 4, 2)])
def test_there_is_one_host_copy_on_each_machine(folder: Path, name: str, ranks: int, machines: int) -> None:
    parts = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]
    each = ranks // machines
    for first in range(0, ranks, each):
        weights = sum(part["weights"] for part in parts[first : first + each])
        assert 0 < weights <= 1.1 * max(part["weights alone"] for part in parts)


@pytest.mark.parametrize("group", MORE)
def test_so_do_more(folder: Path, group: tuple[int, int]) -> None:
    for name, (case, *_) in MORE[group].items():
        require_equal(folder, name, group[0], case)
