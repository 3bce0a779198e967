"""What more tokens per update buy, simulated, beside what others have measured on the same cards.

    python -m scripts.simulated.large_updates [--seconds S] [--output results]

Qwen2.5 of three sizes, trained whole in bfloat16 (weights, gradients and AdamW's moments), sequences of 1,024 tokens,
without clipping, on the shipped descriptions of two cards with ``RAM`` of host memory. Rows of others are figures that
they have published with a tag of where; nothing of them was run here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_offload import InfeasibleError, Profile, profile_config
from lt_offload.errors import ConfigError
from lt_offload.plan import Settings, make_plan
from lt_offload.profiling.from_config import load_model_config
from lt_offload.profiling.hardware import load_hardware
from lt_offload.units import format_bytes
from scripts.common import RESULTS, save
from scripts.planning import gap

Result = dict[str, Any]

RAM = 256_000_000_000
LENGTH = 1024
TOKENS = (1 << 13, 1 << 16, 1 << 19)
"""Per update."""
CARDS = {"rtx-4090": (8, 16), "rtx-5060ti-16gb": (8,)}
"""And the samples of a micro-batch that are tried on each."""
SIZES: dict[str, dict[str, Any]] = {
    "3B": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "layer_types": None,
    },
    "7B": {},
    "14B": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "layer_types": None,
    },
}
"""What differs from the shipped configuration of Qwen2.5-7B, from the models' own ``config.json``."""
LLMQ = "LLMQ, benchmarks of commit b77d969 (2026-05)"
MEASURED: dict[tuple[str, str], list[tuple[str, float]]] = {
    ("rtx-4090", "3B"): [("LLMQ", 7006), ("ZeRO-2 offload", 5448)],
    ("rtx-4090", "7B"): [("LLMQ", 2777), ("ZeRO-3 offload", 2523)],
    ("rtx-4090", "14B"): [("LLMQ", 1348), ("ZeRO-3 offload", 1135)],
    ("rtx-5060ti-16gb", "3B"): [("LLMQ", 2013)],
    ("rtx-5060ti-16gb", "7B"): [("LLMQ", 889)],
}
"""Tokens per second at 524,288 tokens per update, sequences of 1,024, bfloat16, from LLMQ's own tables
(``benchmarks/4090x1.md`` and ``5060Ti.md``): LLMQ with moments and weights in bfloat16 and fused kernels; LLaMA-Factory
with DeepSpeed's offload, Liger's kernels and FlashAttention 2."""


CONDITIONS = """In brackets: the share of the rate that the card is specified for. Ours are simulated for weights,
gradients and moments in bfloat16, sequences of 1,024, no clipping, 256 GB of RAM and the unfused kernels of
transformers; no GPU has run them. Others are measured, from LLMQ's published benchmarks (commit b77d969, May 2026),
in bfloat16 with sequences of 1,024: LLMQ is training in C++ with fused kernels, ZeRO is LLaMA-Factory with
DeepSpeed's offload, Liger's kernels and FlashAttention 2; how much RAM they took is not known."""


def profiles(card: str, size: str) -> Iterator[Profile]:
    """Yield the profile of each micro-batch."""
    machine = replace(load_hardware(card), host_bytes=RAM, pinnable_bytes=RAM)
    config = load_model_config("qwen2.5-7b")
    config = type(config)(**{**config.to_dict(), **SIZES[size]})
    for samples in CARDS[card]:
        yield profile_config(config, batch_size=samples, sequence_length=LENGTH, dtype="bfloat16", hardware=machine)


def cases(card: str, size: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield what is planned for each number of tokens, with the micro-batch that is fastest."""
    made = list(profiles(card, size))
    for tokens in TOKENS:
        best: dict[str, Any] = {"card": card, "model": size, "tokens": tokens, "tokens_per_s": None}
        for profile in made:
            window = tokens // (profile.batch_size * LENGTH)
            if not window:
                continue
            try:
                plan = make_plan(profile, Settings(accumulate=window, time_limit=seconds))
            except (InfeasibleError, ConfigError):
                continue
            if plan.tokens_per_s is None or plan.tokens_per_s <= (best["tokens_per_s"] or 0.0):
                continue
            best |= {
                "tokens_per_s": plan.tokens_per_s,
                "peak_share": plan.peak_share,
                "samples": profile.batch_size,
                "accumulate": window,
                "gap": gap(plan),
                "against_enough_memory": plan.predicted.iteration_s / plan.predicted.no_offload_s,
                "host_peak_bytes": plan.predicted.host_peak_bytes,
                "planner": plan.planner,
            }
        print(best, flush=True)
        yield best


def table(section: Callable[..., str], results: Sequence[Result]) -> str:
    """Return the table of ``results``, which ``section`` puts under a title; empty if there are none."""
    if not results:
        return ""
    rows = []
    for result in results:
        cases, measured = result["figures"]["cases"], result["figures"]["measured"]
        for card, model in dict.fromkeys((case["card"], case["model"]) for case in cases):
            own = [case for case in cases if (case["card"], case["model"]) == (card, model)]
            others = [row for row in measured if (row["card"], row["model"]) == (card, model)]
            rams = [case["host_peak_bytes"] for case in own if case["tokens_per_s"]]
            rows.append(
                [
                    f"{card}, {model}",
                    *(_rate_and_share(case) for case in sorted(own, key=lambda case: case["tokens"])),
                    format_bytes(max(rams)) if rams else "",
                    ", ".join(f"{row['system']} {row['tokens_per_s']:,.0f}" for row in others),
                ]
            )
    sizes = sorted({case["tokens"] for result in results for case in result["figures"]["cases"]})
    head = ["card, Qwen2.5", *(f"{tokens:,} per update" for tokens in sizes), "RAM", "others, measured at 524,288"]
    made = section(
        "Tokens per second by size of update, simulated", "scripts.simulated.large_updates", results, head, rows
    )
    return f"{made}\n\n{CONDITIONS}"


def _rate_and_share(case: Result) -> str:
    rate = case["tokens_per_s"]
    return f"{rate:,.0f} ({case['peak_share']:.0%})" if rate else "does not fit"


def main() -> None:
    """Plan, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="what a plan may take")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    measured = [
        {"card": card, "model": size, "system": system, "tokens_per_s": rate}
        for (card, size), rows in MEASURED.items()
        for system, rate in rows
    ]
    settings = {"ram_bytes": RAM, "sequence_length": LENGTH, "seconds": options.seconds, "source": LLMQ}
    for card in CARDS:
        for size in SIZES:
            found += cases(card, size, options.seconds)
            figures = {"cases": found, "measured": measured}
            print(save("large-updates", "large-updates", settings, figures, options.output))


if __name__ == "__main__":
    main()
