"""Trains with the Trainers of transformers and TRL, plainly and offloaded, and compares everything bit for bit.

    python -m scripts.hf                every case at every budget (a quarter of an hour)
    python -m scripts.hf SFT "bf16"     some cases
    python -m scripts.hf --save         write results/hf.json, of which docs/benchmarks.md shows a table

On the emulated device, or on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lt_offload.errors import OffloadError
from scripts.common import RESULTS, save, versions
from scripts.hf.cases import HF, TRL, Make
from scripts.hf.runs import BUDGETS, Outcome, compare, home, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns 1 if something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="names of cases; all if none is given")
    parser.add_argument("--save", action="store_true", help="write results/hf.json")
    options = parser.parse_args(arguments)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
    every = {"transformers": HF, "TRL": TRL}
    found = [
        {"library": library, "case": name, **row(make)}
        for library, cases in every.items()
        for name, make in cases.items()
        if not options.cases or name in options.cases
    ]
    if options.save:
        device = "a GPU" if torch.cuda.is_available() else "the emulated device"
        save(
            "hf", "hf", {"packages": versions("trl", "peft", "accelerate"), "device": device}, {"cases": found}, RESULTS
        )
    return int(any(cell["differs"] for each in found for cell in each["budgets"].values()))


def row(make: Make) -> dict[str, Any]:
    """Compare one case at every budget."""
    cells: dict[str, Any] = {}
    with home() as folder:
        plain = Outcome.of(train(make, folder))
        for budget in BUDGETS:
            try:
                outcome, differs = compare(make, budget, folder, plain)
                cells[budget] = {"device_peak_bytes": outcome.peak, "differs": differs}
            except OffloadError as error:
                cells[budget] = {"device_peak_bytes": 0, "differs": [f"{type(error).__name__}: {error}"]}
            print(budget, cells[budget], flush=True)
    return {"steps": sum("loss" in record for record in plain.logs), "budgets": cells}


if __name__ == "__main__":
    sys.exit(main())
