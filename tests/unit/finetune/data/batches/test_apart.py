"""Packed documents are trained as if each were alone.

That nothing of one document reaches another is a matter of bits: they do not change with the other's tokens. At
another place of a row a document's sums are in another order, so there everything is computed in float64, what models
do in float32 included, and compared as float32, whose digits that rounding does not reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches import Collate
from lt_offload.finetune.data.formats import IGNORED, Example
from lt_offload.finetune.data.sequences import Documents, check_packing, sequences_of

WINDOW = 4
"""Of sliding attention; documents are longer."""
SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HALF_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi": {"resid_pdrop": 0.0},
    "phi3": {"sliding_window": WINDOW, "resid_pdrop": 0.0},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **HALF_SLIDING},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, **HALF_SLIDING},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **HALF_SLIDING},
}
EAGER_ONLY = {"gemma2"}
LENGTH = 16
PLACES = [(kind, how) for kind in KINDS for how in ("eager", "sdpa") if how == "eager" or kind not in EAGER_ONLY]


@cache
def model(kind: str, attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = AutoConfig.for_model(kind, **SIZES | KINDS[kind])
    check_packing(config, max_length=LENGTH)
    torch.manual_seed(1)
    made: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return made.train()


def document(length: int, seed: int) -> Example:
    ids = torch.randint(3, 67, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Example(ids=ids, labels=[IGNORED] * (length // 3) + ids[length // 3 :])


def batch(*documents: Example) -> dict[str, Tensor]:
    """Return a batch of as many rows as best fit needs for the ``documents``."""
    made = Documents.from_examples(documents)
    rows = sequences_of(made, LENGTH, True)
    return Collate(0, LENGTH, True)([rows[number] for number in range(len(rows))])


def computed(net: nn.Module, tokens: dict[str, Tensor], of: slice = slice(None)) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return logits and losses of each token, and the gradients of the summed losses, in columns ``of``."""
    inputs = {name: tensor for name, tensor in tokens.items() if name != "labels"}
    logits: Tensor = net(**inputs, use_cache=False).logits
    shifted = nn.functional.pad(tokens["labels"], (0, 1), value=IGNORED)[:, 1:]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), shifted, reduction="none")[:, of]
    net.zero_grad()
    losses.sum().backward()
    return logits[:, of].detach(), losses.detach(), [parameter.grad.clone() for parameter in net.parameters()]


def equal(left: Any, right: Any) -> bool:
    return all(torch.equal(*pair) for pair in zip([*left[:2], *left[2]], [*right[:2], *right[2]], strict=True))


@pytest.mark.parametrize(("kind", "attention"), PLACES)
def test_nothing_of_a_neighbour_arrives(kind: str, attention: str) -> None:
    net = model(kind, attention)
    first, second = slice(0, 9), slice(9, 16)
    whole = batch(document(9, 1), document(7, 2))
    assert whole["input_ids"].shape == (1, LENGTH)
    assert equal(computed(net, whole, first), computed(net, batch(document(9, 1), document(7, 3)), first))
    assert equal(computed(net, whole, second), computed(net, batch(document(9, 4), document(7, 2)), second))
    # What is left of a row is such a neighbour, too: the first document is as if it were alone.
    assert equal(computed(net, whole, first), computed(net, batch(document(9, 1)), first))
    assert not equal(computed(net, whole), computed(net, batch(document(9, 1), document(7, 3))))


@pytest.mark.parametrize(("kind", "attention"), PLACES)
def test_losses_and_gradients_are_those_of_documents_alone(
    kind: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    net = model(kind, attention, torch.float64)
    documents = [document(length, seed=length) for length in (5, 9, 7, 11, 4)]
    together = batch(*documents)
    assert len(together["input_ids"]) == 3
    _, losses, gradients = computed(net, together)
    expected: list[Tensor] = []
    total = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for each in documents:
        alone = {"input_ids": torch.tensor([each.ids]), "labels": torch.tensor([each.labels])}
        _, own, grads = computed(net, alone)
        expected += [own]
        total = [before + grad for before, grad in zip(total, grads, strict=True)]
    learned = torch.cat([own.flatten() for own in expected])
    assert rounded(losses[losses != 0].sort().values).equal(rounded(learned[learned != 0].sort().values))
    for gradient, sums in zip(gradients, total, strict=True):
        unit = sums.abs().max()
        assert rounded(2 + gradient / unit).equal(rounded(2 + sums / unit))
    # The mean of the model's own loss is over the learned tokens of all documents.
    mean = net(**together, use_cache=False).loss
    assert rounded(mean).equal(rounded(learned.sum() / learned.count_nonzero()))


def rounded(numbers: Tensor) -> Tensor:
    assert numbers.dtype == torch.float64
    return numbers.to(torch.empty(0).dtype)


def refused() -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    way_out = r"set data\.pack=false .* or data\.pack=wrapped"
    for kind in ("bloom", "mpt", "mamba", "falcon", "opt", "qwen3_next"):
        yield kind, {}, {}, f"models of type {kind!r} are not known to keep the documents of a row apart; {way_out}"
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    yield "llama", {"rope_parameters": rope}, {"max_length": 17}, r"set data\.max_length=16 or less, or data\.pack=fal"
    flash = {"attention": "flash_attention_2", "batch_size": 2}
    yield "llama", {}, flash, r"model\.attention=flash_attention_2 .* data\.batch_size is 2; set data\.batch_size=1"


@pytest.mark.parametrize(("kind", "shape", "settings", "message"), list(refused()))
def test_models_that_would_read_across_documents(
    kind: str, shape: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    config = AutoConfig.for_model(kind, **shape)
    with pytest.raises(ConfigError, match=message):
        check_packing(config, **{"max_length": 16} | settings)
