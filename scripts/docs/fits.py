"""What fits into which card: plans every shipped model on cards of 8 to 24 GB, from configurations alone.

python -m scripts.docs.fits [--models NAME ...] [--seconds 30]             on cards of 8 to 24 GB, with 128 GB of RAM
python -m scripts.docs.fits --home [--models NAME ...] [--seconds 30]      on a card of 12 GB, by RAM, 4-bit weights too

Everything is simulated. Times are those of the cards' descriptions (configs/hardware/).
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import lt_offload
from lt_offload.errors import InfeasibleError
from lt_offload.profiling.from_config import load_model_config
from lt_offload.profiling.hardware import load_hardware
from lt_offload.resources import shipped_files
from lt_offload.schema.profile import HardwareProfile
from lt_offload.units import parse_bytes
from scripts.common import arguments, save
from scripts.planning import Stopwatch

CARDS = ("rtx-3070-8gb", "rtx-3060-12gb", "rtx-4060ti-16gb", "rtx-3090")
RAM = "128GB"
HOME_CARD = "rtx-3060-12gb"
HOME_RAM = ("16GB", "32GB", "64GB", "128GB")
BATCH = (4, 512)
_LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
WAYS: dict[str, dict[str, Any]] = {
    "All weights, float32": {"dtype": "float32", "optimizer": "adamw"},
    "All weights, bfloat16 with float32 masters": {"dtype": "bfloat16", "optimizer": lt_offload.AdamW},
    "LoRA of rank 8 on bfloat16 weights": {
        "dtype": "bfloat16",
        "optimizer": "adamw",
        "lora": _LORA,
    },
}
EIGHT = "All weights, bfloat16 rounded at random, AdamW in 8 bits"
HOME_WAYS = WAYS | {
    EIGHT: {
        "dtype": "bfloat16",
        "optimizer": partial(lt_offload.AdamW, stochastic_rounding=True, state_dtype="8bit"),
    },
    "LoRA of rank 8 on 4-bit weights (QLoRA)": {
        "dtype": "bfloat16",
        "optimizer": "adamw",
        "lora": _LORA,
        "quantize": "nf4",
    },
}
_SHOWN = ("iteration_s", "no_offload_s", "host_peak_bytes", "device_peak_bytes")
_LEFT = 0.9
"""Part of a home machine's RAM that training gets; the rest is the system's."""


def case(model: str, way: str, card: str, seconds: float) -> dict[str, Any]:
    """Plan ``model`` on ``card`` and return the figures of a row."""
    row, error = _planned(model, way, load_hardware(f"{card},free={RAM}"), seconds)
    needs_ram = str(error).startswith("host_memory")
    return {"model": model, "way": way, "card": card, "reason": f"more than {RAM} of RAM" * needs_ram, **row}


def home(model: str, way: str, ram: str, seconds: float) -> dict[str, Any]:
    """Plan ``model`` on a card of 12 GB with the ``ram`` of a home machine and return the figures of a row."""
    left = int(_LEFT * parse_bytes(ram))
    row, error = _planned(model, way, load_hardware(HOME_CARD), seconds, host_memory=left)
    needed = {} if error is None else {"needed_host_bytes": error.needed_host_bytes}
    return {"model": model, "way": way, "ram": ram, **row, **needed}


def _planned(
    model: str, way: str, machine: HardwareProfile, seconds: float, **room: int
) -> tuple[dict[str, Any], InfeasibleError | None]:
    watch, error = Stopwatch(), None
    size, length = BATCH
    profile = lt_offload.profile_config(
        load_model_config(model), batch_size=size, sequence_length=length, hardware=machine, **HOME_WAYS[way]
    )
    row: dict[str, Any] = {"iteration_s": None}
    try:
        plan = lt_offload.solve(profile, memory=machine.device_bytes, time_limit=seconds, **room)
        predicted = plan.predicted
        row = {name: getattr(predicted, name) for name in _SHOWN} | {"planner": plan.planner}
    except InfeasibleError as infeasible:
        error = infeasible
    return row | watch.figures(), error


def main() -> None:
    """Plan all and write a result file per model."""
    parser = arguments(__doc__)
    known = sorted(shipped_files("configs/models", ".json"))
    parser.add_argument("--models", nargs="+", choices=known, default=known)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each plan")
    parser.add_argument("--home", action="store_true", help="by RAM instead of by card")
    options = parser.parse_args()
    if options.home:
        settings = {"card": HOME_CARD, "rams": HOME_RAM, "ways": list(HOME_WAYS), "batch": BATCH, "left": _LEFT}
        settings["seconds"] = options.seconds
        for model in options.models:
            rows = [home(model, way, ram, options.seconds) for way in HOME_WAYS for ram in HOME_RAM]
            print(save(f"home-{model}", "home", settings | {"model": model}, {"rows": rows}, options.results))
        return
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
