"""Floating point operations of a training step, per token.

Two counts of Chowdhery et al., PaLM (2022), appendix B: 6 N for the products with weights, 12 L H Q T for attention
scores, with N weights, L layers of H heads of Q numbers, and T tokens per sequence. Whatever is computed again counts
nothing, so that a share of the device's rate says how much of it training gets.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch import nn

from lt_offload.model.forms.layer import pieces_of, stored_of

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Entries of a model's configuration that say that a token meets only some of the weights."""


def flops_per_token(model: nn.Module, sequence_length: int) -> float | None:
    """Return the floating point operations that training on one token takes, with attention scores.

    Scores of tokens that a causal mask hides are counted, as PaLM does. Of a model whose configuration does not name
    its layers and heads, the products with weights alone are counted. None for mixtures of experts, where a token meets
    an unknown part of the weights.
    """
    products = product_flops_per_token(model)
    if products is None:
        return None
    config: Any = next((own for m in model.modules() if (own := getattr(m, "config", None)) is not None), None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = range(_number(text, "num_hidden_layers"))
    # Layers may have heads of their own (Gemma 4), which the configuration of the whole model refuses to name.
    by_layer = getattr(text, "per_layer_config", None)
    width = 0  # of all heads of all layers together
    for layer in (by_layer[i] if by_layer else text for i in layers):
        heads = _number(layer, "num_attention_heads")
        width += heads * (_number(layer, "head_dim") or _number(layer, "hidden_size") // max(heads, 1))
    return products + 12.0 * sequence_length * width


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def product_flops_per_token(model: nn.Module) -> float | None:
    """Return the floating point operations that training on one token takes, without attention scores and recomputing.

    Two per weight that is in a product for the forward, two for the gradient of its input, and two for its own gradient
    if it is trained: 6 N where everything is trained. Tables that are looked up only are in no product. Returns none
    for mixtures of experts, where a token meets an unknown part of the weights.
    """
    if any((getattr(getattr(m, "config", None), name, None) or 0) > 1 for m in model.modules() for name in _EXPERTS):
        return None
    users: Counter[int] = Counter()
    tables: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] += 1
            if isinstance(module, nn.Embedding):
                tables.add(id(parameter))
    stored = [(module, name, one) for module in model.modules() for name, one in stored_of(module).items()]
    total = 4.0 * sum(math.prod(one.shape) for _, _, one in stored)
    pieces = {id(piece) for module, name, _ in stored for piece in pieces_of(module, name)}
    for parameter in (parameter for parameter in model.parameters() if id(parameter) not in pieces):
        shape = getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)
        # A tied table is the head's matrix, too: left out, the head's product would not count.
        if len(shape) < 2 or (id(parameter) in tables and users[id(parameter)] == 1):
            continue
        total += math.prod(shape) * (6 if parameter.requires_grad else 4)
    return total
