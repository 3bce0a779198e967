"""What fits into which card: plans every shipped model on cards of 8 to 24 GB, from configurations alone.

python -m scripts.docs.fits [--models NAME ...] [--seconds 30]

Everything is simulated. Times are those of the cards' descriptions (configs/hardware/).
"""

from __future__ import annotations

import sys
from typing import Any

import lt_offload
from lt_offload.errors import InfeasibleError
from lt_offload.profiling.from_config import load_model_config
from lt_offload.profiling.hardware import load_hardware
from lt_offload.resources import shipped_files
from scripts.common import arguments, save
from scripts.planning import Stopwatch

CARDS = ("rtx-3070-8gb", "rtx-3060-12gb", "rtx-4060ti-16gb", "rtx-3090")
RAM = "128GB"
BATCH = (4, 512)
WAYS: dict[str, dict[str, Any]] = {
    "All weights, float32": {"dtype": "float32", "optimizer": "adamw"},
    "All weights, bfloat16 with float32 masters": {"dtype": "bfloat16", "optimizer": lt_offload.AdamW},
    "LoRA of rank 8 on bfloat16 weights": {
        "dtype": "bfloat16",
        "optimizer": "adamw",
        "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"},
    },
}
_SHOWN = ("iteration_s", "no_offload_s", "host_peak_bytes", "device_peak_bytes")


def case(model: str, way: str, card: str, seconds: float) -> dict[str, Any]:
    """Plan ``model`` on ``card`` and return the figures of a row."""
    watch, machine, (size, length) = Stopwatch(), load_hardware(f"{card},free={RAM}"), BATCH
    profile = lt_offload.profile_config(
        load_model_config(model), batch_size=size, sequence_length=length, hardware=machine, **WAYS[way]
    )
    row: dict[str, Any] = {"reason": "", "iteration_s": None}
    try:
        plan = lt_offload.solve(profile, memory=machine.device_bytes, solver_time_limit=seconds)
        row |= {name: getattr(plan.predicted, name) for name in _SHOWN} | {"planner": plan.planner}
    except InfeasibleError as error:
        if str(error).startswith("host_memory"):
            row["reason"] = f"more than {RAM} of RAM"
    return {"model": model, "way": way, "card": card, **row, **watch.figures()}


def main() -> None:
    """Plan all and write a result file per model."""
    parser = arguments(__doc__)
    known = sorted(shipped_files("configs/models", ".json"))
    parser.add_argument("--models", nargs="+", choices=known, default=known)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each plan")
    options = parser.parse_args()
    cards = [{"name": card, "bytes": load_hardware(card).device_bytes} for card in CARDS]
    settings = {"cards": cards, "ways": list(WAYS), "batch": BATCH, "seconds": options.seconds}
    for model in options.models:
        cases = []
        for way in WAYS:
            for card in CARDS:
                cases.append(case(model, way, card, options.seconds))
                print(cases[-1], file=sys.stderr)
        print(save(f"fits-{model}", "fits", settings | {"model": model}, {"cases": cases}, options.results))


if __name__ == "__main__":
    main()
