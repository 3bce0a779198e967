"""Rows of the embeddings for all tokens of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lt_offload.errors import ConfigError
from lt_offload.finetune.weights.hub import without_advice


def check_tokens(tokens: Sequence[str]) -> None:
    """Raise ``ConfigError`` for new tokens that are empty or doubled."""
    for token in tokens:
        if not token.strip():
            raise ConfigError(f"model.new_tokens={list(tokens)!r}: {token!r} is no token; leave it out")
    twice = [token for index, token in enumerate(tokens) if token in tokens[:index]]
    if twice:
        raise ConfigError(f"model.new_tokens={list(tokens)!r} has {twice[0]!r} twice; leave one out")


def check_rows(rows: int, tokens: int, *, added: int, tokenizer: str) -> None:
    """Raise ``ConfigError`` if a model with ``rows`` would get more random ones than were ``added`` on purpose.

    ``tokens`` are all those of ``tokenizer``, with the added ones.
    """
    more = tokens - rows - added
    if more > 0:
        raise ConfigError(
            f"the tokenizer of {tokenizer} has {tokens:,} tokens, and the model {rows:,} embeddings: {more:,} would be "
            "new and random, so that it is hardly this model's tokenizer; set data.tokenizer to that, name new tokens "
            "in model.new_tokens, or set model.resize_vocab=true if all of them are to be trained"
        )


def resize(model: Any, tokens: int) -> None:
    """Let ``model`` have at least ``tokens`` embeddings, and as many logits.

    New rows are drawn around the mean of the others, as transformers does it.
    """
    weight = model.get_input_embeddings().weight
    if tokens > weight.shape[0]:
        with without_advice():
            # On meta there are no numbers of which a mean could be taken.
            model.resize_token_embeddings(tokens, mean_resizing=not weight.is_meta)
        model._lt_offload_grown = True


def has_grown(model: Any) -> bool:
    """Return whether :func:`resize` has added embeddings to ``model``."""
    return bool(getattr(model, "_lt_offload_grown", False))


def names_of_embeddings(model: Any) -> list[str]:
    """Return the last names of the modules whose rows are tokens: input embeddings, and logits if they are not tied."""
    wanted = [model.get_input_embeddings()]
    output = model.get_output_embeddings()
    if output is not None and output.weight is not wanted[0].weight:
        wanted.append(output)
    return [name.rpartition(".")[2] for name, module in model.named_modules() if any(module is one for one in wanted)]
