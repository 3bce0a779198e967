"""Two cards, each with a process, beside one card that accumulates two batches: the same numbers, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.several.cards import WAYS
from tests.gpu.target import Target

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.only("cuda", "fake"), pytest.mark.no_cover, pytest.mark.long]


@pytest.fixture(scope="module")
def folders(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Where one card and two have left what became of them."""
    if target.real and torch.cuda.device_count() < 2:
        pytest.skip("this needs two GPUs, and there is one here")
    cuda = {"FAKE_CUDA_DEVICES": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    environment = os.environ | cuda | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    found = {}
    for cards in (1, 2):
        found[cards] = tmp_path_factory.mktemp(f"cards-{cards}")
        command = [sys.executable, "-m", "tests.gpu.several.cards", str(found[cards]), str(cards)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
    return found


def test_they_train_like_one_that_accumulates(folders: dict[int, Path]) -> None:
    for way in WAYS:
        require_equal(way, folders)


def require_equal(way: str, folders: dict[int, Path]) -> None:
    """Check that updates were where they should be, and every number."""
    one, two = (torch.load(folders[cards] / f"{way}.pt", weights_only=True) for cards in (1, 2))
    assert one["steps"] == two["steps"] == 3
    assert one["places"] == two["places"]
    assert way != "host" or "host" in two["places"]
    assert way != "beside" or not two["delayed"]
    assert way != "device" or "host" not in two["places"]
    assert (two["prefetches"] == 0) is (way == "resident")
    # The first card has every second batch.
    assert all(torch.equal(mine, other) for mine, other in zip(one["losses"][::2], two["losses"], strict=True))
    assert differing(one["weights"], two["weights"]) == []
    assert one["states"].keys() == two["states"].keys()
    assert [index for index in one["states"] if differing(one["states"][index], two["states"][index])] == []


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Name the tensors that are not equal."""
    assert left.keys() == right.keys()
    return [name for name, value in left.items() if not torch.equal(value.cpu(), right[name].cpu())]
