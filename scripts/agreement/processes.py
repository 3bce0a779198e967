"""Whether several processes give the numbers of one that accumulates as many batches, and those of stock ``ddp``.

    python -P -m scripts.agreement.processes [--save]

The cases of ``tests/parity/several`` on the emulated device, with gloo: three steps of engines beside PyTorch's
``DistributedDataParallel`` and a plain loop in one process, and epochs of a Trainer beside ``strategy="ddp"`` and plain
Lightning. What is compared is all weights and optimizer states; of engines all losses and norms, too, and of Trainers
beside ``ddp`` what validation says. Printed is the largest difference. ``--save`` writes ``results/processes.json``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from scripts.common import arguments, save
from scripts.compare import largest_difference
from tests.parity.several import runs, training
from tests.parity.several.cases import LATE, MORE, PAIRS, plan
from tests.parity.several.training import Case, Group, in_turn, parts, plainly

Row = dict[str, Any]
"""``case``, ``processes``, ``machines``, and the largest differences from ``one`` process and ``stock`` ddp: null where
they are not comparable. What was not compared is not there."""

ENGINES = {
    (2, 1): {
        "weights and states travel": "tight",
        "the same, one process's copies late": LATE,
        "some travel": "in the middle",
        "all stay on the device": "resident",
        "everything recomputed": "recomputed",
        "updated on the device": "updated on the device",
        "two micro-batches each": "accumulated",
        "clipped by norm": "clipped by norm",
        "clipped by value": "clipped by value",
        "LoRA": "lora",
        "LoRA on weights of four bits": "qlora",
        "tied weights": "tied",
        "bf16": "bf16",
        "bf16 with fp32 master weights": "masters",
        "SGD": "sgd",
        "weights and states written between steps": "written between steps",
    },
    (3, 1): {"weights and states travel": "three"},
    (4, 1): {"tied weights, some travel": "four", "LoRA": "four, lora"},
    (2, 2): {
        "weights and states travel": "tight, 2 on 2",
        "all stay on the device": "resident, 2 on 2",
        "updated on the device": "updated on the device, 2 on 2",
        "LoRA": "lora, 2 on 2",
    },
    (3, 3): {"weights and states travel": "three on three"},
}
"""By the numbers of processes and machines: what rows are called, and names of cases."""
ENGINES[(4, 2)] = {shown: f"{name}, 4 on 2" for shown, name in ENGINES[(2, 1)].items() if name != LATE}
RUNS = (
    ("a Trainer's epoch, with validation", "2", 2, 1),
    ("a Trainer's epoch, a layer trains from its third step on", "unfrozen", 2, 1),
    ("resumed: the checkpoint of 2", "2 from 2", 2, 1),
    ("resumed: the checkpoint of 1", "2 from 1", 2, 1),
    ("resumed: the checkpoint of 2", "1 from 2", 1, 1),
    ("resumed: the checkpoint of 2", "4 from 2", 4, 1),
    ("a Trainer's epoch, with validation", "2 on 2", 2, 2),
    ("resumed: the checkpoint of 2 machines", "2 on 2 from 2 on 2", 2, 2),
    ("resumed: the checkpoint of 2 machines with 1 each", "4 on 2 from 2 on 2", 4, 2),
    ("resumed: the checkpoint of 2 machines", "1 from 2 on 2", 1, 1),
)
"""Rows, names of runs and numbers of processes and machines."""


def main() -> None:
    """Train all cases, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for row in chain(of_engines(), of_trainers()):
        rows.append(row)
        print(" | ".join(line(row)), flush=True)
    if options.save:
        print(save("processes", "processes", {"steps": training.STEPS}, {"rows": rows}, options.results))


def line(row: Row) -> list[str]:
    """Return a row in words: equal, or the largest difference, where it was compared."""
    machines = row.get("machines", 1)
    count = f"{row['processes']}{f' on {machines} machines' if machines > 1 else ''}"
    return [row["case"], count, *(_difference(row, other) for other in ("one", "stock"))]


def _difference(row: Row, other: str) -> str:
    if other not in row:
        return ""
    value = row[other]
    return "not comparable" if value is None else f"{value:.1e}" if value else "equal"


def of_engines() -> Iterator[Row]:
    """Yield the rows of engines in 2, 3 and 4 processes."""
    known = {(2, 1): PAIRS | {LATE: PAIRS["tight"]}, **MORE}
    for (count, machines), names in ENGINES.items():
        cases = known[count, machines]
        group = Group(count, machines=machines, stock=True)
        for name in names.values():
            case, budget, settings = cases[name]
            group.runs.append((name, case, plan(case, budget, settings, machines), name == LATE))
        with tempfile.TemporaryDirectory() as given:
            folder = Path(given)
            (folder / "groups").write_bytes(pickle.dumps([group]))
            training.main(folder)
            for shown, name in names.items():
                found = _of_engine(folder, name, count, cases[name][0])
                yield {"case": shown, "processes": count, "machines": machines, **found}


def _of_engine(folder: Path, name: str, count: int, case: Case) -> dict[str, float | None]:
    """Return the largest differences in any process."""
    own, stock = (
        [torch.load(folder / f"{name}-{rank}{way}.pt", weights_only=True) for rank in range(count)]
        for way in ("", "-stock")
    )
    losses, weights, states = parts(plainly(case, count))
    turns = in_turn([found[0] for found in own], case)
    return {
        "one": largest_difference([turns] + [found[1:] for found in own], [losses] + [(weights, states)] * count),
        "stock": largest_difference(own, stock),
    }


def of_trainers() -> Iterator[Row]:
    """Yield the rows of Trainers."""
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        with contextlib.redirect_stdout(io.StringIO()):
            runs.main(folder)
        for shown, name, count, machines in RUNS:
            found, plain = (torch.load(folder / f"{each}.pt", weights_only=True) for each in (name, name + runs.PLAIN))
            row: Row = {"case": shown, "processes": count, "machines": machines, "one": _of_run(found, plain)}
            if (folder / f"{name}{runs.STOCK}.pt").exists():
                stock = torch.load(folder / f"{name}{runs.STOCK}.pt", weights_only=True)
                row["stock"] = _of_run(found, stock, "validation")
            yield row


def _of_run(found: dict[str, Any], other: dict[str, Any], *more: str) -> float | None:
    names = ("weights", "states", "steps", *more)
    return largest_difference([found[name] for name in names], [other[name] for name in names])


if __name__ == "__main__":
    main()
