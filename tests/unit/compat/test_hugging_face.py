"""Each private name of transformers, datasets and TRL is there and does what it is used for."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from lt_offload.compat import hugging_face as compat
from lt_offload.hf.head import _MODULE as HEADS


def test_names_of_models() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    assert compat.is_known(AutoModelForCausalLM, config)
    assert compat.class_of_model(AutoModelForCausalLM, config) is LlamaForCausalLM
    compat.set_attention(config, "sdpa")
    compat.set_name(config, "somebody/something")
    assert config.to_dict()[compat.NAME] == config.name_or_path == "somebody/something"
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    assert model.config._attn_implementation == "sdpa"
    assert compat.is_base(model)
    assert not compat.is_base(torch.nn.Linear(1, 1))
    assert compat.unsplittable(model)
    setattr(model, compat.LOSS_FUNCTION, abs)
    assert model.loss_function is abs
    compat.untie(model)
    assert not model._tied_weights_keys


def test_a_property_of_a_class_names_no_layers() -> None:
    class Wrapper(torch.nn.Module):  # as SentenceTransformer
        @property
        def _no_split_modules(self) -> list[str]:
            return []

    assert compat.unsplittable(Wrapper()) is None


def test_names_of_data() -> None:
    from jinja2 import TemplateSyntaxError

    assert compat.compile_template("{{ messages }}").render(messages="x") == "x"
    with pytest.raises(TemplateSyntaxError):
        compat.compile_template("{% if %}")


def test_names_of_trainers() -> None:
    from transformers import Trainer

    assert callable(Trainer._get_num_items_in_batch)
    heads = pytest.importorskip(HEADS)
    assert hasattr(heads, compat.CHUNKED_LOG_PROBS)


def test_names_of_quantized_configurations() -> None:
    config = importlib.import_module("transformers").BitsAndBytesConfig(load_in_4bit=True)
    assert {compat.STORED_IN_FOUR_BITS, compat.STORED_IN_EIGHT_BITS} <= config.to_dict().keys()


def test_names_of_experts() -> None:
    from tests.parity.models import quantized

    model: Any = quantized.experts("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    assert compat.experts_weights(experts) == ["gate_up_proj", "down_proj"]
    assert compat.experts_weights(model.model.layers[0].mlp) == []
    halves = torch.ones(2, 64)
    assert compat.gated_by(experts, halves).shape == (2, 32)
    config = experts.config
    compat.use_experts(experts, lambda module, hidden, index, weights: hidden + 1)
    assert torch.equal(experts(halves, None, None), halves + 1)
    assert model.model.layers[1].mlp.experts.config is config
    compat.without_experts(experts)
    assert experts.config is config
    assert [*compat.ignored_in_files(model)] == []
