"""RAM of what processes of one machine have in common, with 1, 2 and 4 of them on the emulated device.

    python -m scripts.host_copies

Each process trains the same Llama of 23 million parameters in fp32 for three steps, in full and with LoRA, with all
updates on the host. Printed are the bytes of pages of weights, of optimizer states and of sums of gradients, over all
processes: each page counts by the part of those that map it (``Pss`` of ``/proc/self/smaps``).
"""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path

import lt_offload
from lt_offload.plan import solve
from lt_offload.schema.plan import Plan
from lt_offload.units import format_bytes
from tests.parity.several import training
from tests.parity.several.training import Case, Group
from tests.support import models
from tests.support.engines import make_optimizer

_SIZES = {"layers": 8, "hidden_size": 512, "intermediate_size": 1376}
_CASES = {"full": Case(model=_SIZES), "lora": Case(model=_SIZES | {"lora": True})}
_KINDS = ("weights", "states", "sums")


def main() -> None:
    """Print a row per case and number of processes."""
    print("case  processes  " + "  ".join(f"{kind:>10}" for kind in _KINDS))
    for name, case in _CASES.items():
        plan = planned(case)
        for count in (1, 2, 4):
            found = measured(case, plan, count)
            print(f"{name:5} {count:9}  " + "  ".join(f"{format_bytes(found[kind]):>10}" for kind in _KINDS))


def planned(case: Case) -> Plan:
    """Return a plan that has all updates on the host, and wait."""
    model = case.build()
    batch = models.batch(model, batch_size=2, sequence_length=12, seed=99)
    profile = lt_offload.profile(model, batch, optimizer=make_optimizer(model, case.optimizer))
    return solve(profile, memory="200MB", planner="l2l", delayed=True)


def measured(case: Case, plan: Plan, count: int) -> dict[str, int]:
    """Return what ``count`` processes take together, by its name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "groups").write_bytes(pickle.dumps([Group(count, [("run", case, plan, False)])]))
        training.main(folder)
        parts = [json.loads((folder / f"run-{rank}.json").read_text()) for rank in range(count)]
    return {kind: sum(part.get(kind, 0) for part in parts) for kind in _KINDS}


if __name__ == "__main__":
    main()
