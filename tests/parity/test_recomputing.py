"""Of these tests a sample runs once more, with plans that recompute every block: all do with ``--recompute``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sampling

PLACES = ("callbacks", "lightning", "optimizers", "users", "windows")
ROWS = 10


@pytest.mark.long
@pytest.mark.own_plan("is about this option")
def test_a_sample_is_equal_when_blocks_run_again() -> None:
    folder = Path(__file__).parent
    options = ["--recompute", "--rows", str(ROWS), "--sample-seed", str(sampling.SEED), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(str(folder / place) for place in PLACES)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout
    found = re.search(r"^(\d+) runs of blocks were repeated in (\d+) tests", done.stdout, re.MULTILINE)
    assert found is not None
    assert int(found[2]) >= ROWS // 3  # what is drawn has tests of errors in it, too
