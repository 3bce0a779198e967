"""Profiles with published numbers: Llama 2 7B, fp32, 4 x 512 tokens, as in table 2 of OFFMATE (2024), and variants.

The tests of the planner use them as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lt_offload.schema.profile import (
    BlockProfile,
    HardwareProfile,
    OptimizerProfile,
    OptionProfile,
    Profile,
    TensorProfile,
)

GB = 1e9

HIDDEN, INNER, VOCABULARY, TOKENS = 4096, 11008, 32000, 4 * 512
FLOPS = 8.08e12
INTERFACE = TOKENS * HIDDEN * 4

RTX_3060 = HardwareProfile(
    name="RTX 3060",
    device_bytes=int(10 * GB),
    host_bytes=int(128 * GB),
    pinnable_bytes=int(128 * GB),
    h2d_bytes_per_s=10.4 * GB,
    d2h_bytes_per_s=10.4 * GB,
)
RTX_3090 = replace(
    RTX_3060,
    name="RTX 3090",
    device_bytes=int(22 * GB),
    host_bytes=int(256 * GB),
    pinnable_bytes=int(256 * GB),
    h2d_bytes_per_s=18.8 * GB,
    d2h_bytes_per_s=18.8 * GB,
)
ADAM_3060 = OptimizerProfile(name="Adam", host_bytes_per_s=1.1 * GB, device_bytes_per_s=16.6 * GB)
ADAM_3090 = OptimizerProfile(name="Adam", host_bytes_per_s=1.6 * GB, device_bytes_per_s=40.9 * GB)


def option(
    name: Any,
    forward_s: float,
    backward_s: float,
    saved: float,
    offload: float,
    forward_peak: float,
    backward_peak: float,
) -> OptionProfile:
    """An option with sizes in GB that keeps its input."""
    return OptionProfile(
        name=name,
        forward_s=forward_s,
        backward_s=backward_s,
        saved_bytes=int(saved * GB),
        keeps_input=True,
        offload_bytes=int(offload * GB),
        forward_peak_bytes=int(forward_peak * GB),
        backward_peak_bytes=int(backward_peak * GB),
    )


def tensor(name: str, shape: tuple[int, ...], *blocks: int, trainable: bool = True, states: int = 2) -> TensorProfile:
    """An fp32 tensor with ``states`` states of its own size, if it is trainable."""
    size = 4
    for extent in shape:
        size *= extent
    return TensorProfile(
        name=name,
        shape=shape,
        dtype="float32",
        bytes=size,
        trainable=trainable,
        blocks=blocks,
        state_bytes=states * size if trainable else 0,
    )


def layer_tensors(block: int, **kwargs: Any) -> list[TensorProfile]:
    """The nine tensors of a Llama layer."""
    shapes = {
        **{f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
        **{f"mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")},
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    return [tensor(f"model.layers.{block - 1}.{name}", shape, block, **kwargs) for name, shape in shapes.items()]


def layer_block(index: int) -> BlockProfile:
    """A Llama layer."""
    forward = 0.104716
    return BlockProfile(
        name=f"model.layers.{index - 1}",
        kind="layer",
        input_bytes=INTERFACE,
        output_bytes=INTERFACE,
        launch_s=0.05,
        options=(
            option("keep", forward, 2 * forward, 1.25, 0, 0.15, 0.25),
            option("recompute", forward, 3 * forward, 0, 0, 0.45, 1.5),
            option("offload", forward, 2 * forward + 0.009, 0, 0.3147, 0.7647, 1.5),
        ),
    )


def llama7b_b4(layers: int = 32, *, tied: bool = False, **tensor_kwargs: Any) -> Profile:
    """Llama 2 7B with ``layers`` layers on the RTX 3060."""
    head = layers + 1
    embedding = (VOCABULARY, HIDDEN)
    tables = [tensor("model.embed_tokens.weight", embedding, *((0, head) if tied else (0,)), **tensor_kwargs)]
    if not tied:
        tables.append(tensor("lm_head.weight", embedding, head, **tensor_kwargs))
    logits = TOKENS * VOCABULARY * 4 / GB
    return Profile(
        model=f"llama7b-{layers}",
        dtype="float32",
        batch_size=4,
        sequence_length=512,
        tensors=(
            *tables,
            *(t for block in range(1, layers + 1) for t in layer_tensors(block, **tensor_kwargs)),
            tensor("model.norm.weight", (HIDDEN,), head, **tensor_kwargs),
        ),
        blocks=(
            BlockProfile(
                name="model.embed_tokens",
                kind="embedding",
                input_bytes=TOKENS * 8,
                output_bytes=INTERFACE,
                launch_s=0.002,
                options=(option("keep", 0.001, 0.006, 0, 0, 0, 0),),
            ),
            *(layer_block(block) for block in range(1, layers + 1)),
            BlockProfile(
                name="lm_head",
                kind="head",
                input_bytes=INTERFACE,
                output_bytes=0,
                launch_s=0.01,
                options=(option("keep", 0.0664, 0.1329, 2 * logits + 0.067109, 0, logits, logits),),
            ),
        ),
        optimizer=ADAM_3060,
        hardware=RTX_3060,
    )


def scaled(profile: Profile, *, time: float = 1.0, activations: float = 1.0) -> Profile:
    """``profile`` with its computation times and its activation sizes multiplied."""

    def size(count: int) -> int:
        return round(count * activations)

    return replace(
        profile,
        batch_size=round(profile.batch_size * activations),
        blocks=tuple(
            replace(
                block,
                input_bytes=size(block.input_bytes),
                output_bytes=size(block.output_bytes),
                options=tuple(
                    replace(
                        option,
                        forward_s=option.forward_s * time,
                        backward_s=option.backward_s * time,
                        saved_bytes=size(option.saved_bytes),
                        offload_bytes=size(option.offload_bytes),
                        forward_peak_bytes=size(option.forward_peak_bytes),
                        backward_peak_bytes=size(option.backward_peak_bytes),
                    )
                    for option in block.options
                ),
            )
            for block in profile.blocks
        ),
    )


def llama7b_b8_3090() -> Profile:
    """Llama 2 7B, 8 x 512 tokens on the RTX 3090, whose matrix products are 21.7 / 8.08 times as fast."""
    profile = scaled(llama7b_b4(), time=2 * FLOPS / 21.7e12, activations=2)
    return replace(profile, hardware=RTX_3090, optimizer=ADAM_3090)
