"""fp16 with a scaled loss, compared bit for bit with plain training: losses, weights, states, scales, skipped steps.

    python -m scripts.breadth.fp16      minutes of processor time; docs/faq.md shows a table of results/fp16.json

Each library in three budgets: batches that are accumulated, clipped too, and a run that is resumed after skipped steps.
Lightning and a loop of one's own run on the emulated device; transformers and accelerate, which scale no loss on a CPU,
on a CUDA device without a GPU (``tests/fake_cuda``).
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from scripts.common import arguments, in_child, save, serve_child
from tests import fake_cuda

NAME = "fp16"
BUDGETS = ("smallest", "middle", "resident")
ON = {"by_lightning": "emulated", "in_own_loop": "emulated", "by_trainer": "fake", "by_accelerate": "fake"}
"""The functions of ``scaled.py``, and the device of each."""


def trained(library: str, device: str) -> dict[str, Any]:
    """Compare the cases of a library; for a process of its own.

    Args:
        library: the name of a function of ``scaled.py``.
        device: ``emulated``, or ``fake``: a CUDA device without a GPU.
    """
    if device == "fake":
        fake_cuda.enable()
    import torch

    from scripts.attack.children import prepare
    from scripts.attack.compared import attacked
    from scripts.breadth import scaled

    prepare()
    rows = []
    for case in scaled.CASES:
        with tempfile.TemporaryDirectory() as folder:
            train = partial(getattr(scaled, library), case, Path(folder))
            plain = train(None)
            runs = [
                {"budget": one.budget, "outcome": one.outcome, "travels": one.travels, "says": one.says}
                for one in attacked(train, BUDGETS)
            ]
        rows.append({"case": case, "skipped": plain.seen["skipped"][0], "runs": runs})
        print(library, rows[-1])
    return {"library": library, "device": device, "threads": torch.get_num_threads(), "rows": rows}


def main() -> int:
    """Compare and save; return 1 unless all are equal."""
    serve_child(trained)
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=ON, default=list(ON), help="some libraries; nothing is saved")
    options = parser.parse_args()
    rows = [in_child("scripts.breadth.fp16", "trained", library=name, device=ON[name]) for name in options.only]
    if options.only == list(ON):
        save(NAME, NAME, {}, {"rows": rows}, options.results)
    return int(any(run["outcome"] != "equal" for row in rows for case in row["rows"] for run in case["runs"]))


if __name__ == "__main__":
    sys.exit(main())
