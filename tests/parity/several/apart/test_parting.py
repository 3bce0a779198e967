"""Processes that part say so, in both, and name what differs; nothing waits for what does not come."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.parity.several.apart.parting import PLANNERS, WAYS, WEIGHT
from tests.parity.several.training import HANG

SAID = {
    "rate": "ConfigError: 'lr' of the optimizer's parameter group 0 differs between the processes of this run: process "
    "0 has 0.5, process 1 1.0",
    "stopped": "ConfigError: the processes of this run do not do the same: they are at the beginning of a batch "
    "(process 0), at a reduction (sync_dist, EarlyStopping) (process 1)",
    "saved": "ConfigError: the processes of this run do not do the same: they are at the barrier 'of a checkpoint' "
    "(process 0), at the beginning of a batch (process 1)",
    "waiting": "ConfigError: the processes of this run do not do the same: they are at the barrier 'mine' (process 0), "
    "at the beginning of a batch (process 1)",
    **dict.fromkeys(
        ("written", "shuffled", "state"),
        f"UnsupportedError: weight {WEIGHT} has other values in process 1 than in process 0",
    ),
    "edited": "UnsupportedError: the gradient of weight model.model.embed_tokens.weight has other values in process 1 "
    "than in process 0",
    "once": f"UnsupportedError: the gradient of weight {WEIGHT} was written in process 1 only",
    "outside": "UnsupportedError: scale has other values in process 1 than in process 0",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process has said of each case."""
    folder = tmp_path_factory.mktemp("parting")
    command = [sys.executable, "-m", "tests.parity.several.apart.parting", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "planner"), [(name, one) for name in SAID for one in PLANNERS[name]])
def test_both_say_what_is_different(found: list[dict[str, Any]], name: str, planner: str) -> None:
    for said in found:
        assert said[f"{name}, {planner}"].startswith(SAID[name])


@pytest.mark.long
def test_an_error_in_the_exchange_is_what_it_is(found: list[dict[str, Any]]) -> None:
    first, second = (said["short, resident"] for said in found)
    assert first == "ProcessError: process 1 failed: 86.8 kB are needed"
    assert second == "OverBudget: 86.8 kB are needed"


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_what_both_do_is_what_ddp_does(found: list[dict[str, Any]], way: str) -> None:
    for said in found:
        assert said[way] == []


@pytest.mark.long
@pytest.mark.parametrize("switches", [{}, {"host_update": False}])
def test_the_exchange_takes_nothing_of_the_smallest_memory(found: list[dict[str, Any]], switches: Any) -> None:
    for said in found:
        assert said[f"small {switches}"] == []
