"""What compiled layers and Liger's kernels change, from configurations: a layer's bytes and times, a plan's seconds.

python -m scripts.simulated.kernels [--seconds S] [--output results] [MODEL ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lt_offload import Profile, profile_config, solve
from lt_offload.finetune.kernels import plan_liger
from lt_offload.units import format_seconds
from scripts.common import RESULTS, save

Result = dict[str, Any]

NAME = "layer-kernels"
CARD, MEMORY, BATCH, LENGTH = "rtx-4090", "22GB", 4, 512
MODELS = {"llama2-7b": "Llama-2-7B", "qwen3-4b": "Qwen3-4B", "gemma2-2b": "Gemma-2-2B"}
"""By the name of the shipped configuration, the model's own."""


def _with_liger(model: nn.Module) -> nn.Module:
    plan_liger(model)
    return model


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "`kernels: liger`": {"prepare": _with_liger},
    "`compile_blocks`": {"compile_blocks": True},
}


CONDITIONS = """Full fine-tuning in bfloat16 on an RTX 4090, 4 x 512 tokens per update, estimated and simulated, not
run on a GPU; the input counts as kept by a layer. An estimate takes every operation that is not
fused to read and write the card's memory, as cards with large caches do not always."""


def cases(model: Any, seconds: float, **sizes: Any) -> Iterator[dict[str, Any]]:
    """Yield the figures of each way to compute ``model``, the name of a configuration or one itself."""
    settings = {"batch_size": BATCH, "sequence_length": LENGTH, "dtype": "bfloat16", "hardware": CARD} | sizes
    for way, options in WAYS.items():
        found: Profile = profile_config(model, **settings, **options)
        block = next(block for block in found.blocks if block.kind == "layer")
        keep = block.option("keep")
        held = keep.saved_bytes + (block.input_bytes if keep.keeps_input else 0)
        plan = solve(found, memory=MEMORY, time_limit=seconds)
        yield {
            "model": model if isinstance(model, str) else found.model,
            "way": way,
            "kept_bytes": held,
            "forward_s": keep.forward_s,
            "backward_s": keep.backward_s,
            "iteration_s": plan.predicted.iteration_s,
        }


def table(section: Callable[..., str], results: Sequence[Result]) -> str:
    """Return the table of ``results``, which ``section`` puts under a title."""
    rows = [
        [
            MODELS.get(case["model"], case["model"]),
            case["way"],
            f"{case['kept_bytes'] / 2**20:.0f} MiB",
            f"{case['forward_s'] * 1e3:.2f} ms",
            f"{case['backward_s'] * 1e3:.2f} ms",
            format_seconds(case["iteration_s"]),
        ]
        for result in results
        for case in result["figures"]["cases"]
    ]
    head = ["model", "layers", "kept by a layer", "forward", "backward", f"iteration, {MEMORY}"]
    title = "Layers with Liger's kernels, and compiled, simulated"
    return f"{section(title, 'scripts.simulated.kernels', results, head, rows)}\n\n{CONDITIONS}" if results else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=[*MODELS], metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each plan")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    given = parser.parse_args(arguments)
    found = []
    for model in given.models:
        for case in cases(model, given.seconds):
            print(case, flush=True)
            found.append(case)
    settings = {"card": CARD, "memory": MEMORY, "batch_size": BATCH, "sequence_length": LENGTH}
    print(save(NAME, NAME, settings | {"seconds": given.seconds}, {"cases": found}, given.output))


if __name__ == "__main__":
    main()
