"""The longest sequence that can be trained on, by card, with and without tiles of tokens within blocks.

python -m scripts.docs.longest [--ways WAY ...] [--seconds 60]

Everything is simulated, from configurations: profiles at two lengths say what there is at others, as bytes grow with
the tokens, and seconds with them and their square. Two long ones are planned, and their times counted by hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lt_offload
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.batch.profiles import scaled
from lt_offload.plan.planners.baselines import smallest
from lt_offload.plan.planners.request import allowed_options
from lt_offload.profiling.from_config import load_model_config
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from scripts.common import arguments, save

CARDS = (8, 12, 16, 24)
"""GB of device memory."""
HARDWARE, RAM, TILE = "rtx-4090", 64, 2048
LENGTHS = (2 * TILE, 20 * TILE)
"""Tokens that are profiled, from which other lengths follow. With the longer one attention has the peak of a layer."""
STEP, MOST = 1024, 1 << 20
"""The table goes in such steps, up to so many tokens."""
_LORA = {"r": 32, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
_LAYERS = 3
"""Layers that are profiled; the others are like the one in the middle."""
_STATES = 2 * (1 + 4 / 256)
"""Bytes per weight of moments in 8 bits, with the scale of each block of them."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "8B, QLoRA": ("llama3-8b", {"lora": _LORA, "quantize": "nf4"}),
    "8B, LoRA": ("llama3-8b", {"lora": _LORA}),
    "8B, all weights": ("llama3-8b", {}),
    "3B, all weights": ("llama3.2-3b", {}),
    "1.7B, all weights": ("qwen3-1.7b", {}),
}
PLANNED = {"8B, QLoRA": 100 * STEP, "8B, all weights": 49 * STEP}
"""Lengths that are planned on the largest card."""


def config_of(name: str) -> Any:
    """Return a configuration that has positions for any length."""
    config = load_model_config(name)
    config.max_position_embeddings = MOST
    return config


def profile_at(way: str, tokens: int, tile: int | None) -> Profile:
    """Return the profile of one sequence of so many ``tokens``."""
    name, options = WAYS[way]
    config = config_of(name)
    layers, config.num_hidden_layers = config.num_hidden_layers, _LAYERS
    profile = lt_offload.profile_config(
        config,
        batch_size=1,
        sequence_length=tokens,
        dtype="bfloat16",
        hardware=load_hardware(HARDWARE),
        tile_tokens=tile,
        **options,
    )
    profile = repeated(profile, layers)
    if options:
        return profile
    # As with AdamW(stochastic_rounding=True, state_dtype="8bit"), whose states take minutes to be tried.
    tensors = [replace(tensor, state_bytes=int(_STATES * tensor.bytes / 2)) for tensor in profile.tensors]
    return replace(profile, tensors=tuple(tensors))


def at(tokens: int, low: Profile, high: Profile) -> Profile:
    """Return what two profiles say of a sequence of so many ``tokens``."""
    # Lengths are sizes of batches for a moment.
    bytes_of = scaled(replace(high, batch_size=high.sequence_length), tokens)
    profile = replace(bytes_of, batch_size=1, sequence_length=tokens)
    blocks = []
    for block, *pair in zip(profile.blocks, low.blocks, high.blocks, strict=True):
        options = []
        for option in block.options:
            a, b = (next(one for one in each.options if one.name == option.name) for each in pair)
            seconds = {
                name: _squares(
                    tokens, (low.sequence_length, getattr(a, name)), (high.sequence_length, getattr(b, name))
                )
                for name in ("forward_s", "backward_s")
            }
            # What the planner leaves open beyond a measured size grows with the tokens at most.
            known = {name: getattr(b, name) for name in ("held_peak_bytes", "passing_peak_bytes", "before_loss_bytes")}
            peaks = {name: value and int(value * tokens / high.sequence_length) for name, value in known.items()}
            options.append(replace(option, **seconds, **peaks))
        blocks.append(replace(block, options=tuple(options)))
    return replace(profile, blocks=tuple(blocks))


def _squares(tokens: int, low: tuple[int, float], high: tuple[int, float]) -> float:
    """Return the seconds at so many ``tokens``, from two pairs of tokens and seconds."""
    (few, short), (many, long) = low, high
    square = max(0.0, (long / many - short / few) / (many - few))
    return tokens * (short / few - square * few + square * tokens)


def repeated(profile: Profile, layers: int) -> Profile:
    """Return the profile of a model with so many layers, of which the one that was profiled has ``_LAYERS``."""
    more, last = layers - _LAYERS, _LAYERS - 1  # the last layer but one, as the first and the last may differ
    copies = [replace(profile.blocks[last], name=f"layer {number}") for number in range(more)]
    blocks = (*profile.blocks[: last + 1], *copies, *profile.blocks[last + 1 :])
    tensors = []
    for tensor in profile.tensors:
        tensors.append(replace(tensor, blocks=tuple(at if at <= last else at + more for at in tensor.blocks)))
        if tensor.blocks == (last,):
            tensors += [replace(tensor, blocks=(last + 1 + number,)) for number in range(more)]
    tensors.sort(key=lambda tensor: tensor.blocks[0])
    return replace(profile, blocks=blocks, tensors=tuple(tensors))


def needed(profile: Profile) -> float:
    """Return the bytes of the smallest budget that has a plan; infinity if the RAM is too small for any."""
    allowed = tuple(allowed_options(block, Settings()) for block in profile.blocks)
    least = smallest(profile, allowed, host_update=True, host_budget=RAM * 10**9)
    return float("inf") if least is None else least.device_bytes


def longest(low: Profile, high: Profile, card: int) -> int:
    """Return the most tokens, in steps, for which ``card`` GB are enough; 0: not even for one step."""
    bounds = [0, MOST]
    while bounds[1] - bounds[0] > STEP:
        middle = sum(bounds) // 2 // STEP * STEP
        fits = needed(at(middle, low, high)) <= card * 1e9
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
    flops = head * (1 + back)
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
            rows.append({"way": way, "tile_tokens": tile, "longest": lengths})
            print(rows[-1], flush=True)
        if way in PLANNED:
            profile = at(PLANNED[way], *pair)
            plan = make_plan(
                profile, Settings(memory=CARDS[-1] * 10**9, host_memory=f"{RAM}GB", solver_time_limit=options.seconds)
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
