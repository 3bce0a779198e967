"""A small random model with a tokenizer whose tokens are bytes, made without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_tiny(folder: Path, *, chat_template: str | None = None, **settings: Any) -> Path:
    """Save a Llama with random weights, of a few MB, and its tokenizer into ``folder``; return it.

    Args:
        folder: made where there is none.
        chat_template: of the tokenizer, if it is to have one.
        settings: of :class:`transformers.LlamaConfig`, in place of the small ones here.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    tokens = {"vocab_size": 259, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**small | tokens | heads | settings)).save_pretrained(folder)
    return save_byte_tokenizer(folder, chat_template=chat_template)


def save_byte_tokenizer(folder: Path, *, chat_template: str | None = None) -> Path:
    """Save a tokenizer whose 259 tokens are three special ones and the bytes into ``folder``; return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, **special)  # type: ignore[no-untyped-call]
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder
