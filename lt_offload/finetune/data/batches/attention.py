"""Models that keep packed documents apart.

A packed row has several documents, and ``position_ids`` that begin again with each of them. ``transformers`` makes the
mask that keeps them apart from these alone, if a model asks it for its mask, passes the positions on, and mixes
tokens nowhere else. Others read across documents without a word, so that only models that were tried are let through.
"""

from __future__ import annotations

from typing import Any

from lt_offload.errors import ConfigError

PACKABLE = frozenset(
    {
        "apertus", "arcee", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text",
        "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "granitemoe", "helium",
        "hunyuan_v1_dense", "llama", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo",
        "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
    }
)  # fmt: skip
"""Model types with which a test found a document's logits equal, bit for bit, whatever the other documents are.

In a mixture of experts logits change by the rounding of the experts' batches, as with any other row of a batch.
"""

_VARYING_ROPE = ("dynamic", "longrope")
"""Rotations that change for a whole batch once one of its documents is longer than the model was trained for."""


def check_packing(config: Any, *, max_length: int, attention: str | None = None, batch_size: int = 1) -> None:
    """Check that a model keeps packed documents apart.

    Args:
        config: the model's.
        max_length: tokens of a row.
        attention: implementation of attention, if one is chosen.
        batch_size: rows of a batch.

    Raises:
        ConfigError: if it does not, or if nobody has tried.
    """
    way_out = (
        "set data.pack=false (data.group_by_length=true keeps padding small), or data.pack=wrapped for running text, "
        "where documents may read each other"
    )
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in PACKABLE:
        raise ConfigError(
            f"data.pack=true: models of type {kind!r} are not known to keep the documents of a row apart; {way_out}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if rope.get("rope_type") in _VARYING_ROPE and trained is not None and max_length > trained:
        raise ConfigError(
            f"data.pack=true: beyond {trained} tokens this model turns positions differently for all documents of a "
            f"batch; set data.max_length={trained} or less, or data.pack=false"
        )
    if attention is not None and attention.startswith("flash_attention") and batch_size > 1:
        raise ConfigError(
            f"data.pack=true: model.attention={attention} finds documents where a batch is one row, and "
            f"data.batch_size is {batch_size}; set data.batch_size=1 (a larger data.max_length packs as many tokens), "
            "or model.attention=sdpa"
        )
