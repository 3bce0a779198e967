"""GGUF's words for the families of models that the recipes name, and how their tensors differ from ours.

The package ``gguf`` knows the format and the names of tensors. This file has what llama.cpp computes for each
architecture without being told: whatever a configuration says otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lt_offload.errors import ConfigError

CONVERTER = (
    "export a folder (--format hf) and convert it with llama.cpp's convert_hf_to_gguf.py, which knows more of them"
)
_GEMMA3_PATTERN = 6
"""Every layer of this number attends to everything, and those in between to a sliding part."""
_GEMMA3_LOCAL_BASE = 10000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How models of one type of transformers are written."""

    architecture: str
    """As the package ``gguf`` calls it."""
    activation: str
    """What llama.cpp computes between the matrices of an MLP."""
    odd: Callable[[Any], Iterator[str]] = lambda config: iter(())
    """Yields what a configuration asks for and llama.cpp does not compute, each in a few words."""
    describe: Callable[[Any, Any], None] = lambda writer, config: None
    """Tells a writer what only this family has."""
    stored: Callable[[str, Tensor, Any], Tensor] = lambda name, tensor, config: tensor
    """A tensor, by its name in transformers, as the file has it."""
    ropes: tuple[str, ...] = ("default", "linear")
    """Types of rotary embeddings."""
    windows: bool = False
    """Whether llama.cpp knows of sliding windows; else what it can compute ends where the window does."""


def family_of(config: Any) -> Family:
    """Return how a model of ``config`` is written.

    Raises:
        ConfigError: if it is of a family that is not known here, or has something that its family has not.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError(
            f"--format gguf writes models of the types {', '.join(FAMILIES)}, and this is a {config.model_type} model; "
            f"{CONVERTER}"
        )
    activation = activation_of(config)
    odd = [*family.odd(config), *_odd_ropes(config, family)]
    if activation != family.activation:
        odd.append(f"the activation {activation}")
    if odd:
        raise ConfigError(f"--format gguf does not write {config.model_type} models with {odd[0]}; {CONVERTER}")
    return family


def activation_of(config: Any) -> str:
    """Return what is computed between the matrices of an MLP."""
    # The first Gemma says hidden_act, as most do; Gemma 2 and 3 say hidden_activation.
    for key in ("hidden_activation", "hidden_act"):
        if getattr(config, key, None) is not None:
            return str(getattr(config, key))
    return "gelu_new"  # Bloom's own


def rope_of(config: Any) -> dict[str, Any]:
    """Return what ``config`` says about rotary embeddings: of the layers that attend to everything."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def head_size(config: Any) -> int:
    """Return the length of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def describe(writer: Any, config: Any, family: Family) -> None:
    """Tell ``writer`` the shapes of a model of ``config``, and what else its architecture leaves open."""
    heads, inner = config.num_attention_heads, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "seq_length", None) or 2048
    window = _window(config)
    if window is not None and family.windows:
        writer.add_sliding_window(window)
    elif window is not None:
        # Up to the length of its window a model attends to everything anyway: that far llama.cpp computes the same.
        context = min(context, window)
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.layer_norm_epsilon)
    rope = rope_of(config)
    if rope:
        writer.add_rope_dimension_count(int(head_size(config) * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_freq_base(float(rope["rope_theta"]))
        if rope.get("rope_type") == "linear":
            writer.add_rope_scaling_type(_scaling_type("LINEAR"))
            writer.add_rope_scaling_factor(float(rope["factor"]))
    family.describe(writer, config)


def more_tensors(config: Any) -> dict[str, Tensor]:
    """Return the tensors that a file has and the model has not: what Llama 3 divides its rotary frequencies by."""
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = head_size(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return {"rope_freqs.weight": plain / scaled}


def _window(config: Any) -> int | None:
    window = getattr(config, "sliding_window", None)
    return window if window and getattr(config, "use_sliding_window", True) else None


def _scaling_type(name: str) -> Any:
    import gguf

    return gguf.RopeScalingType[name]


def _odd_ropes(config: Any, family: Family) -> Iterator[str]:
    kind = rope_of(config).get("rope_type", "default")
    if kind not in family.ropes:
        yield f"rope of type {kind}"


def _odd_biases(config: Any) -> Iterator[str]:
    for key, where in (("attention_bias", "attention"), ("mlp_bias", "its MLPs")):
        if getattr(config, key, False):
            yield f"biases in {where}"


def _rotated(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Let neighbours in a head be rotated together, as llama.cpp does here, and not the first half with the second."""
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if f".{part}." in name:
            halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _by_part(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Let all queries come first, then all keys, then all values: Bloom has the three of each head together."""
    if ".query_key_value." not in name:
        return tensor
    heads = config.num_attention_heads
    together = tensor.reshape(heads, 3, tensor.shape[0] // heads // 3, *tensor.shape[1:])
    return together.transpose(0, 1).reshape(tensor.shape)


def _odd_bloom(config: Any) -> Iterator[str]:
    if config.apply_residual_connection_post_layernorm:
        yield "apply_residual_connection_post_layernorm"


def _odd_phi(config: Any) -> Iterator[str]:
    if config.qk_layernorm:
        yield "norms of queries and keys (qk_layernorm)"


def _plus_one(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Let norms multiply by what is stored: Gemma adds one to it first."""
    return tensor.float() + 1 if name.endswith("norm.weight") else tensor


def _odd_gemma(config: Any) -> Iterator[str]:
    yield from _odd_biases(config)
    if config.query_pre_attn_scalar != head_size(config):
        yield f"query_pre_attn_scalar={config.query_pre_attn_scalar}, which is not head_dim={head_size(config)}"
    every = 2 if config.model_type == "gemma2" else _GEMMA3_PATTERN
    # llama.cpp is not told which layers attend to everything: it takes the pattern of the published sizes.
    usual = [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(len(config.layer_types))
    ]
    if config.layer_types != usual:
        yield "layer_types other than those of their sizes on the hub"


def _odd_gemma3(config: Any) -> Iterator[str]:
    yield from _odd_gemma(config)
    local = config.rope_parameters["sliding_attention"]
    if local["rope_theta"] != _GEMMA3_LOCAL_BASE or local.get("rope_type", "default") != "default":
        yield f"a rope_theta of {local['rope_theta']:g} in sliding layers"
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            yield key
    if getattr(config, "use_bidirectional_attention", False):
        yield "attention in both directions"


def _describe_gemma2(writer: Any, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _describe_phi3(writer: Any, config: Any) -> None:
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)


_LLAMA_ROPES = ("default", "linear", "llama3")
FAMILIES = {
    "llama": Family(architecture="llama", activation="silu", odd=_odd_biases, stored=_rotated, ropes=_LLAMA_ROPES),
    "mistral": Family(architecture="llama", activation="silu", stored=_rotated),
    "qwen2": Family(architecture="qwen2", activation="silu"),
    "qwen3": Family(architecture="qwen3", activation="silu", odd=_odd_biases),
    "phi": Family(architecture="phi2", activation="gelu_new", odd=_odd_phi, ropes=("default",)),
    "phi3": Family(architecture="phi3", activation="silu", describe=_describe_phi3, ropes=("default",), windows=True),
    "gemma2": Family(
        architecture="gemma2",
        activation="gelu_pytorch_tanh",
        odd=_odd_gemma,
        describe=_describe_gemma2,
        stored=_plus_one,
        ropes=("default",),
        windows=True,
    ),
    "gemma3_text": Family(
        architecture="gemma3", activation="gelu_pytorch_tanh", odd=_odd_gemma3, stored=_plus_one, windows=True
    ),
    "bloom": Family(architecture="bloom", activation="gelu_new", odd=_odd_bloom, stored=_by_part),
}
"""By their type in transformers. SmolLM2 is a llama."""
