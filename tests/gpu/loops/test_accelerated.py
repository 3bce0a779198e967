"""Loops with accelerate on the device: the model stays on the host, and numbers are those of a plain loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from scripts.attack.compared import attacked
from tests.gpu.loops.bench import LOOPS
from tests.gpu.target import Target
from tests.support import accelerated

# The fake GPU's mean of squares gives its backward a result that has no shape yet.
pytestmark = [*LOOPS, pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")]

BUDGETS = {
    "accumulated, clipped, evaluated": "middle",
    "mixed precision": "smallest",
    "LoRA": "recomputing",
    "by hand": "smallest",
    "resumed": "middle",
    "diffusion": "resident",  # its average of weights is on the GPU, beside the budget
    "two lists": "smallest",
    "fp16, clipped": "smallest",
    "fp16, not clipped": "middle",
    "fp16, SGD": "recomputing",
    "fp16, resumed": "middle",
}


@pytest.mark.parametrize("case", BUDGETS)
def test_a_loop_trains_as_plainly(case: str, target: Target, tmp_path: Path) -> None:
    [found] = attacked(partial(accelerated.train, case, tmp_path, accelerated.LARGE), (BUDGETS[case],))
    assert (found.outcome, found.says) == ("equal", "")
