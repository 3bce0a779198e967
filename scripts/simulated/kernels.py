"""What compiled layers and Liger's kernels change, from configurations: a layer's bytes and times, a plan's seconds.

python -m scripts.simulated.kernels [--seconds S] [MODEL ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lt_offload import Profile, profile_config, solve
from lt_offload.finetune.kernels import plan_liger
from lt_offload.units import format_seconds

CARD, MEMORY, BATCH, LENGTH = "rtx-4090", "22GB", 4, 512
MODELS = ("llama2-7b", "qwen3-4b", "gemma2-2b")


def _with_liger(model: nn.Module) -> nn.Module:
    plan_liger(model)
    return model


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "`kernels: liger`": {"prepare": _with_liger},
    "`compile_blocks`": {"compile_blocks": True},
}


def rows(model: Any, seconds: float, **sizes: Any) -> Iterator[list[str]]:
    """Yield a row for each way to compute ``model``, the name of a configuration or one itself."""
    settings = {"batch_size": BATCH, "sequence_length": LENGTH, "dtype": "bfloat16", "hardware": CARD} | sizes
    for way, options in WAYS.items():
        found: Profile = profile_config(model, **settings, **options)
        block = next(block for block in found.blocks if block.kind == "layer")
        keep = block.option("keep")
        held = keep.saved_bytes + (block.input_bytes if keep.keeps_input else 0)
        plan = solve(found, memory=MEMORY, time_limit=seconds)
        yield [
            model if isinstance(model, str) else found.model,
            way,
            f"{held / 2**20:.0f} MiB",
            f"{keep.forward_s * 1e3:.2f} ms",
            f"{keep.backward_s * 1e3:.2f} ms",
            format_seconds(plan.predicted.iteration_s),
        ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each plan")
    given = parser.parse_args(arguments)
    print(f"| model | layers | kept by a layer | forward | backward | iteration, {MEMORY} |")
    print("|---|---|---:|---:|---:|---:|")
    for model in given.models:
        for row in rows(model, given.seconds):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
