"""Tokenizers as GGUF files have them: byte-level BPE and SentencePiece's BPE, as their families use them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lt_offload.errors import ConfigError
from lt_offload.finetune.weights.to_gguf.families import CONVERTER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _LETTERS + r"\p{N}" + _REST: "qwen2",
    r" ?[^(\s|[.,!?…。，、।۔،])]+": "bloom",
}
"""What llama.cpp calls byte-level tokenizers that split text by these expressions first."""
_SPACE = "\u2581"
"""What stands for a space in SentencePiece's tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """A tokenizer in the words of GGUF."""

    model: str
    """``llama``: SentencePiece's BPE; ``gpt2``: byte-level BPE."""
    splitting: str
    content: dict[str, Any]
    """What the tokenizer says of itself."""


def describe_tokens(tokenizer: Any) -> Tokens:
    """Return what ``tokenizer`` is.

    Raises:
        ConfigError: if it is none that is known here.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    if content and content["model"]["type"] == "BPE":
        if content["model"].get("byte_fallback"):
            return Tokens(model="llama", splitting="default", content=content)
        splitting = _splitting(content["pre_tokenizer"] or {})
        if splitting is not None and (content["normalizer"] or {"type": "NFC"})["type"] == "NFC":
            return Tokens(model="gpt2", splitting=splitting, content=content)
    raise ConfigError(f"--format gguf does not know a tokenizer like this model's; {CONVERTER}")


def _splitting(first: dict[str, Any]) -> str | None:
    """Return what llama.cpp calls a tokenizer whose text is split like that, None if it is not known here."""
    steps: list[dict[str, Any]] = first.get("pretokenizers", [first] if first else [])
    kinds = [step["type"] for step in steps]
    if any(step.get("add_prefix_space") for step in steps if step["type"] == "ByteLevel"):
        return None
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]:
        return _SPLITS.get(steps[0]["pattern"].get("Regex"))
    return None


def write_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, *, rows: int, stops: tuple[int, ...]) -> None:
    """Tell ``writer`` about ``tokenizer``.

    Args:
        writer: of the package ``gguf``.
        tokenizer: of the model.
        rows: how many tokens the model's embeddings have; those that the tokenizer has not get a name.
        stops: tokens that end an answer.

    Raises:
        ConfigError: see :func:`describe_tokens`; or if the tokenizer has more tokens than the model.
    """
    described = describe_tokens(tokenizer)
    names, kinds = _named(tokenizer, described, rows)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described.content["model"]["merges"]]
    writer.add_tokenizer_model(described.model)
    writer.add_tokenizer_pre(described.splitting)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    if described.model == "llama" or not merges:  # llama.cpp joins what has the best score, others by order of merges
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), rank)
        writer.add_token_scores([-float(ranks.get(name, len(merges))) for name in names])
    if merges:
        writer.add_token_merges(merges)
    for role in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{role}_token_id")
        if index is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    # The format has room for one token that ends a turn, beside the one that ends the text.
    others = [index for index in stops if index != tokenizer.eos_token_id]
    if others:
        writer.add_eot_token_id(others[0])
    # This is tried out: whether a tokenizer adds tokens is in its class, its settings or its post-processor.
    sample = tokenizer("a").input_ids
    writer.add_add_bos_token(sample[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(sample[-1] == tokenizer.eos_token_id)
    if described.model == "llama":
        bare: list[str] = tokenizer.tokenize("a")
        writer.add_add_space_prefix(bare[0].startswith(_SPACE))
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if isinstance(template, str):
        writer.add_chat_template(template)


def _named(tokenizer: PreTrainedTokenizerBase, described: Tokens, rows: int) -> tuple[list[str], list[int]]:
    """Return the name and the kind of each of the model's tokens."""
    import gguf

    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if max(vocabulary.values()) >= rows:
        raise ConfigError(
            f"--format gguf: the tokenizer has {max(vocabulary.values()) + 1} tokens, and the model's embeddings have "
            f"{rows} rows; name the model's own tokenizer with data.tokenizer"
        )
    by_id = {index: token for token, index in vocabulary.items()}
    added = {token["content"]: token["special"] for token in described.content["added_tokens"]}
    names, kinds = [], []
    for index in range(rows):
        name = by_id.get(index, f"[PAD{index}]")
        kind = _kind(name, index in by_id, added, described.content["model"], gguf.TokenType)
        if described.model == "llama" and kind == gguf.TokenType.USER_DEFINED:
            name = name.replace(_SPACE, " ")  # llama.cpp looks for these in the text as it is
        names.append(name)
        kinds.append(kind)
    return names, kinds


def _kind(token: str, known: bool, added: dict[str, bool], model: dict[str, Any], types: Any) -> int:
    if not known:
        return int(types.UNUSED)
    if token == model.get("unk_token") and model.get("byte_fallback"):
        return int(types.UNKNOWN)
    if token in added:
        return int(types.CONTROL if added[token] else types.USER_DEFINED)
    if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
        return int(types.BYTE)
    return int(types.NORMAL)
