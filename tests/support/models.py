"""Tiny Hugging Face models, seeded, for every test that needs a real architecture."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from tests import fake_cuda

FAMILIES = ("llama", "llama-tied", "phi", "phi3", "mistral", "bloom")
VOCAB = 97
HIDDEN = 32
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 1024}
"""Of models for GPUs: weights of a few layers are more than what an allocator maps at once."""
if fake_cuda.enabled() or not torch.cuda.is_available():
    WIDE |= {"hidden_size": 128, "intermediate_size": 384}  # and where nothing is mapped they take less time


def build(
    family: str = "llama",
    *,
    layers: int = 3,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    lora: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> nn.Module:
    """Return a causal language model of ``family`` in training mode; ``overrides`` go to its config.

    Leaves the random numbers as they are when it is made anew.
    """
    torch.manual_seed(seed)
    key = repr((family, layers, dropout, dtype, lora, seed, sorted(overrides.items())))
    if key not in _built:
        _built[key] = _build(family, layers, dropout, dtype, lora, overrides), torch.get_rng_state()
    model, after = _built[key]
    torch.set_rng_state(after)
    return copy.deepcopy(model)


_built: dict[str, tuple[nn.Module, torch.Tensor]] = {}
"""Making a model, above all with LoRA, takes longer than many a test of it."""


def _build(
    family: str, layers: int, dropout: float, dtype: torch.dtype, lora: bool, overrides: dict[str, Any]
) -> nn.Module:
    import transformers

    prefix = family.split("-")[0].capitalize()
    text = "Text" if prefix == "Gemma3" else ""  # the other configuration is that of a model with images
    config = getattr(transformers, f"{prefix}{text}Config")(**_config(family, layers, dropout) | overrides)
    model: nn.Module = getattr(transformers, f"{prefix}ForCausalLM")(config).to(dtype)
    if lora:
        model = adapted(model, dropout, "all-linear" if family != "bloom" else ["query_key_value", "dense"])
    return model.train()


def adapted(model: Any, dropout: float = 0.0, targets: str | list[str] = "all-linear") -> nn.Module:
    """Return ``model`` with adapters that have gradients from the first step on."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():  # peft asks transformers with a deprecated name
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero otherwise, and lora_A would have no gradient
            nn.init.normal_(parameter, std=0.02)
    return model  # type: ignore[no-any-return]


def _config(family: str, layers: int, dropout: float) -> dict[str, Any]:
    common = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    common |= {
        "use_cache": False,
        "tie_word_embeddings": family in ("llama-tied", "bloom"),
        "attention_dropout": dropout,
    }
    if family == "bloom":
        return common | {"n_layer": layers, "n_head": 4, "hidden_dropout": dropout}
    common |= {"num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 48}
    common |= {"max_position_embeddings": 64, "attn_implementation": "sdpa"}
    if family in ("gemma2", "gemma3"):
        common |= {"head_dim": 8, "sliding_window": 8}
    if family == "gemma2":
        common |= {"query_pre_attn_scalar": 8, "attn_implementation": "eager", "final_logit_softcapping": 3.0}
    if family.startswith("llama") or family in ("mistral", "gemma2", "gemma3", "cohere", "granite"):
        return common | {"num_key_value_heads": 2}
    return common | {"resid_pdrop": dropout, "embd_pdrop": dropout}


def batch(
    model: nn.Module, *, batch_size: int = 2, sequence_length: int = 12, padding: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return token ids with labels for ``model``; with ``padding`` the last row is padded at its end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch_size, sequence_length), generator=generator)
    mask = torch.ones_like(ids)
    if padding:
        mask[-1, sequence_length - sequence_length // 4 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    device = next(model.parameters()).device
    batch = {"input_ids": ids.masked_fill(mask == 0, 0), "labels": labels}
    if padding:
        batch["attention_mask"] = mask
    return {name: tensor.to(device) for name, tensor in batch.items()}
