"""Small tokenizers of the kinds that models have: byte-level BPE, text split in each way, and SentencePiece's BPE."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tests.support.tiny import CHAT_TEMPLATE

CORPUS = ["the quick brown fox doesn't jump over the 12 lazy dogs, says she! ", "föx 345\n\n  x = the[12]; don't"] * 20
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
SPACE = "\u2581"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _REST,
    "qwen2": _LETTERS + r"\p{N}" + _REST,
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
}


@cache
def build(kind: str, add_prefix_space: bool = False) -> Any:
    """Return a tokenizer of ``kind`` with fewer than 400 tokens."""
    from transformers import PreTrainedTokenizerFast

    inner = _pieces(kind) if kind.startswith("sentencepiece") else _bytes(kind, add_prefix_space)
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **roles)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _bytes(kind: str, add_prefix_space: bool) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=kind not in SPLITS)
    first: dict[str, Any] = {"gpt-2": [], "smollm": [pre_tokenizers.Digits(individual_digits=True)]}
    first |= {name: [pre_tokenizers.Split(Regex(split), "isolated")] for name, split in SPLITS.items()}
    steps = [*first[kind], whole]
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else whole
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    return inner


def _pieces(kind: str) -> Any:
    """Return a tokenizer as Llama 2 (with a space in front of the text) or Gemma (``bare``) has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

    bare = kind.endswith("bare")
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", SPACE)
    learned.train_from_iterator(
        [word for text in CORPUS for word in text.replace(" ", f" {SPACE}").split(" ")],
        trainers.BpeTrainer(vocab_size=100, show_progress=False),
    )
    merges = [tuple(merge) for merge in json.loads(learned.to_str())["model"]["merges"]]
    if bare:  # several spaces are joined before anything else
        merges = [(SPACE, SPACE), *(merge for merge in merges if merge != (SPACE, SPACE))]
    symbols = dict.fromkeys([*sorted({one for pair in merges for one in "".join(pair)}), *map("".join, merges)])
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *symbols]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", SPACE)
    inner.normalizer = space if bare else normalizers.Sequence([normalizers.Prepend(SPACE), space])
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(SPECIAL)
    if bare:
        inner.add_tokens([AddedToken(SPACE * 2, normalized=False)])
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return inner
