"""Trains with the Trainers of transformers and TRL, plainly and offloaded, and compares everything bit for bit.

    python -m scripts.hf transformers         every case of a library at every budget (five minutes of processor time)
    python -m scripts.hf TRL SFT "DPO, LoRA"  some cases
    python -m scripts.hf TRL --save           write results/hf-trl.json, a row for each case;
                                              with names of cases, those of them anew
    python -m scripts.hf TRL --device fake    on the fake GPU of the tests, whose results have a file of their own

On the emulated device, or on a GPU if there is one. On the fake GPU all that speaks to CUDA is executed, with the
kernels of the CPU (tests/fake_cuda).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lt_offload.errors import OffloadError
from scripts.common import RESULTS, machine_measured_once, read_json, save, versions
from tests import fake_cuda

if TYPE_CHECKING:
    from scripts.hf.cases import Make

LIBRARIES = {"transformers": "HF", "TRL": "TRL"}
PACKAGES = {"transformers": ("transformers", "peft", "accelerate")}
PACKAGES["TRL"] = (*PACKAGES["transformers"], "trl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns 1 if something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", choices=LIBRARIES, help="whose Trainers are run")
    parser.add_argument("cases", nargs="*", help="names of cases; all if none is given")
    parser.add_argument("--save", action="store_true", help="write the result file")
    parser.add_argument("--device", choices=("fake",), help="without it a GPU, or else the emulated device")
    options = parser.parse_args(arguments)
    if options.device == "fake":
        fake_cuda.enable()
        # Without kernels of its own for that device bitsandbytes compiles an update, anew for each number of a step.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch  # finds the fake device

    from scripts.hf import cases as known

    machine_measured_once()
    gc.collect()
    gc.freeze()  # imported modules need not be looked through in every run
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    made: dict[str, Make] = getattr(known, LIBRARIES[options.library])
    cases = {name: make for name, make in made.items() if not options.cases or name in options.cases}
    device = "a GPU" if torch.cuda.is_available() else "the emulated device"
    if fake_cuda.enabled():
        device = "a CUDA device without a GPU (fake)"
    installed = versions("trl", "peft", "accelerate")
    packages = {name: installed[name] for name in PACKAGES[options.library]}
    settings = {"library": options.library, "packages": packages, "device": device}
    path = RESULTS / f"hf-{options.library.lower()}{'-fake' * fake_cuda.enabled()}.json"
    found = [
        before
        for before in (read_json(path)["figures"]["cases"] if options.save and path.is_file() else [])
        if before["case"] in made and before["case"] not in cases
    ]
    for name, make in cases.items():
        found.append({"case": name, **row(name, make)})
        if options.save:  # each time: a run that is stopped leaves what it has
            found.sort(key=lambda each: list(made).index(each["case"]))
            save(path.stem, "hf", settings, {"cases": found}, RESULTS)
    return int(any(cell["differs"] for each in found for cell in each["budgets"].values()))


def row(name: str, make: Make) -> dict[str, Any]:
    """Compare one case at every budget."""
    from scripts.hf.runs import BUDGETS, Outcome, compare, home, train

    cells: dict[str, Any] = {}
    with home() as folder:
        plain = Outcome.of(train(make, folder))
        for budget in BUDGETS:
            try:
                outcome, differs = compare(make, budget, folder, plain)
                travels = sorted(outcome.travels)
                cells[budget] = {"device_peak_bytes": outcome.peak, "travels": travels, "differs": differs}
            except OffloadError as error:
                cells[budget] = {"device_peak_bytes": 0, "differs": [f"{type(error).__name__}: {error}"]}
            print(name, budget, cells[budget], flush=True)
    return {"steps": sum("loss" in record for record in plain.logs), "budgets": cells}


if __name__ == "__main__":
    sys.exit(main())
