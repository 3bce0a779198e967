"""The bench's other contenders on the device of --device: the losses of plain PyTorch, within the same memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = [pytest.mark.only("cuda", "fake"), pytest.mark.long]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("others")
    command = [sys.executable, "-m", "scripts.bench.suite", "--device", "cuda", "--tiny", "--suite", "small"]
    command += ["--contender", "no-offload", "fsdp2", "transformers", "--steps", "1", "--out", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    result = json.loads((folder / "bench-small.json").read_text())
    return {row["contender"]: row for row in result["figures"]["rows"]}


def test_offloaded_activations_change_no_loss(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["transformers"]
    assert row["status"] == "ok", row["message"]
    assert row["within_budget"]
    # A real GPU is not asked for deterministic kernels.
    assert row["losses_equal"] or (dist.is_nccl_available() and row["loss_difference"] < 1e-4)


def test_fsdp2_needs_a_pytorch_with_nccl(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["fsdp2"]
    if dist.is_nccl_available():
        assert row["status"] == "ok", row["message"]
        assert row["loss_difference"] < 1e-4  # its updates run on the host
    else:
        assert row["status"] == "unsupported"
        assert "not run here: needs a GPU" in row["message"]
