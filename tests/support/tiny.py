"""A model folder small enough for every test: byte-level tokenizer and a Llama of two layers, made here, no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(folder: Path, *, chat: bool = False) -> Path:
    """Save a tokenizer whose tokens are bytes into ``folder``."""
    from lt_offload.finetune.weights.tiny import save_byte_tokenizer

    return save_byte_tokenizer(folder, chat_template=CHAT_TEMPLATE if chat else None)


def model(folder: Path, *, chat: bool = False, **overrides: Any) -> Path:
    """Save a random model and its tokenizer into ``folder``."""
    from lt_offload.finetune.weights.tiny import save_tiny

    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    return save_tiny(folder, chat_template=CHAT_TEMPLATE if chat else None, **settings | overrides)
