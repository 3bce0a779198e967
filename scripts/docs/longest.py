"""The longest sequence that can be trained on, by card, with and without tiles of tokens within blocks.

python -m scripts.docs.longest [--ways WAY ...] [--seconds 60]

Everything is simulated, from configurations. What a plan needs at two lengths says what it needs at others: bytes grow
with the tokens. Two of the longest are then profiled and planned as they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lt_offload
from lt_offload.errors import InfeasibleError
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.batch.profiles import scaled
from lt_offload.profiling.from_config import load_model_config
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from scripts.common import arguments, save

CARDS = (8, 12, 16, 24)
"""GB of device memory."""
HARDWARE, RAM, TILE = "rtx-4090", 64, 2048
LENGTHS = (4 * TILE, 8 * TILE)
"""Tokens that are profiled, from which other lengths follow."""
STEP, MOST = 1024, 1 << 20
"""The table goes in such steps, up to so many tokens."""
_LORA = {"r": 32, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
_EIGHT_BITS = {"optimizer": partial(lt_offload.AdamW, stochastic_rounding=True, state_dtype="8bit")}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "8B, QLoRA": ("llama3-8b", {"lora": _LORA, "quantize": "nf4"}),
    "8B, LoRA": ("llama3-8b", {"lora": _LORA}),
    "8B, all weights": ("llama3-8b", _EIGHT_BITS),
    "3B, all weights": ("llama3.2-3b", _EIGHT_BITS),
    "1.7B, all weights": ("qwen3-1.7b", _EIGHT_BITS),
}
PLANNED = {"8B, QLoRA": 100 * STEP, "8B, all weights": 49 * STEP}
"""Lengths that are planned on the largest card."""


def config_of(name: str) -> Any:
    """Return a configuration that has positions for any length."""
    if name == "qwen3-1.7b":  # https://huggingface.co/Qwen/Qwen3-1.7B
        config: Any = load_model_config("qwen3-4b")
        sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
        for key, value in {**sizes, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}.items():
            setattr(config, key, value)
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    else:
        config = load_model_config(name)
    config.max_position_embeddings = MOST
    return config


def profile_at(way: str, tokens: int, tile: int | None) -> Profile:
    """Return the profile of one sequence of so many ``tokens``."""
    name, options = WAYS[way]
    return lt_offload.profile_config(
        config_of(name),
        batch_size=1,
        sequence_length=tokens,
        dtype="bfloat16",
        hardware=load_hardware(HARDWARE),
        tile_tokens=tile,
        **options,
    )


def needed(profile: Profile) -> float:
    """Return the bytes of the smallest budget that has a plan; infinity if the RAM is too small for any."""
    try:
        lt_offload.solve(profile, memory=1, host_memory=f"{RAM}GB")
    except InfeasibleError as error:
        return error.needed_bytes or float("inf")
    raise AssertionError("a plan in one byte")


def longest(low: Profile, high: Profile, card: int) -> int:
    """Return the most tokens, in steps, for which ``card`` GB are enough; 0: not even for one step."""
    few, many = (replace(one, batch_size=one.sequence_length) for one in (low, high))
    bounds = [0, MOST]
    while bounds[1] - bounds[0] > STEP:
        middle = sum(bounds) // 2 // STEP * STEP
        fits = needed(scaled(few, middle, many)) <= card * 1e9
        bounds[not fits] = middle
    return bounds[0]


def counted(way: str, plan: Plan) -> float:
    """Return the seconds of the products of ``plan`` at the card's rate, counted by hand.

    Forward, backward, what runs a second time before it, and what a tile computes again.
    """
    name, options = WAYS[way]
    config, tokens, adapted = config_of(name), plan.sequence_length, "lora" in options
    width, heads, per_head = (
        config.hidden_size,
        config.num_attention_heads,
        config.hidden_size // config.num_attention_heads,
    )
    projections = 2.0 * tokens * width * (2 * heads + 2 * config.num_key_value_heads) * per_head
    mlp = 2.0 * tokens * 3 * width * config.intermediate_size
    attention = 4.0 * tokens * tokens * heads * per_head / 2  # a half of the scores is hidden
    head = 2.0 * tokens * width * config.vocab_size
    back = 1 if adapted else 2  # of a product: the gradient of its input, and of its weight
    flops = head * (1 + back) if plan.options[-1] in ("fused", "chunked") else head * (1 + back)
    for option in plan.options[1:-2]:
        again = option in ("recompute", "reload", "discard", "mixed")
        products = mlp * (1 + again + 1 + back) + projections * (1 + back + (again and option != "mixed") + adapted)
        flops += products + attention * (1 + (again and option != "mixed") + 2.5)
    return flops / load_hardware(HARDWARE).flops_per_s["bfloat16"]


def main() -> None:
    """Make the table and two plans, and write a result file."""
    parser = arguments(__doc__)
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each plan")
    options = parser.parse_args()
    rows, plans = [], []
    for way in options.ways:
        for tile in (None, TILE):
            pair = [profile_at(way, tokens, tile) for tokens in LENGTHS]
            lengths = {f"{card}GB": longest(*pair, card) for card in CARDS}
            each = (needed(pair[1]) - needed(pair[0])) / (LENGTHS[1] - LENGTHS[0])
            rows.append({"way": way, "tile_tokens": tile, "longest": lengths, "bytes_per_token": each})
            print(rows[-1], flush=True)
        if way in PLANNED:
            profile = profile_at(way, PLANNED[way], TILE)
            plan = make_plan(
                profile, Settings(memory=CARDS[-1] * 10**9, host_memory=f"{RAM}GB", time_limit=options.seconds)
            )
            plans.append(
                {
                    "way": way,
                    "tokens": PLANNED[way],
                    "needed_bytes": needed(profile),
                    "iteration_s": plan.predicted.iteration_s,
                    "counted_s": counted(way, plan),
                    "no_offload_s": plan.predicted.no_offload_s,
                    "device_peak_bytes": plan.predicted.device_peak_bytes,
                    "host_peak_bytes": plan.predicted.host_peak_bytes,
                    "options": {name: plan.options.count(name) for name in dict.fromkeys(plan.options)},
                    "planner": plan.planner,
                }
            )
            print(plans[-1], flush=True)
    about = {"hardware": HARDWARE, "host_memory": f"{RAM}GB", "tile_tokens": TILE, "simulated": True}
    print(save("longest", "longest", about, {"longest": rows, "plans": plans}, options.results))


if __name__ == "__main__":
    main()
