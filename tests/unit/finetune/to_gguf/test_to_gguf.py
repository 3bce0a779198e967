"""Models of every family that the recipes name, as GGUF files: what other readers find in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.cli.verbs.export import write as export
from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.weights.gguf import FAMILIES
from tests.unit.finetune.to_gguf import tokenizers

gguf = pytest.importorskip("gguf")

TEXT = "the quick brown föx 12 345\n\n  don't!"
SHAPE: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BLOOM = {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 400, "pad_token_id": 3}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-bpe", SHAPE | {"rope_theta": 5e5}),
    "mistral": ("sentencepiece", SHAPE | {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", SHAPE | {"rope_theta": 1e6}),
    "qwen3": ("qwen2", SHAPE | {"head_dim": 128, "tie_word_embeddings": True}),
    "phi": ("gpt-2", SHAPE | {"partial_rotary_factor": 0.5}),
    "phi3": ("sentencepiece", SHAPE),
    "gemma2": ("sentencepiece-bare", SHAPE | GEMMA),
    "gemma3_text": ("sentencepiece-bare", SHAPE | GEMMA | {"num_hidden_layers": 6}),
    "bloom": ("bloom", BLOOM),
}
"""The tokenizer that goes with each, and a configuration; where readers take a default, it is that."""


def build(family: str, **overrides: Any) -> Any:
    """A random model; its numbers are those of bfloat16, of which one more than a norm's weight is one of float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SETTINGS[family][1] | overrides)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 32).round() / 256)
    return model.eval()


def written(family: str, folder: Path, **settings: Any) -> tuple[Any, Any, Path]:
    model, tokenizer = build(family), tokenizers.build(SETTINGS[family][0])
    return model, tokenizer, export(model, tokenizer, folder / "one.gguf", format="gguf", **settings)


def tensors(path: Path) -> dict[str, Any]:
    """The tensors of a file as numbers, by name."""
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(path).tensors
    }


def said(path: Path, key: str) -> Any:
    return gguf.GGUFReader(path).fields[key].contents()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "phi"])  # which transformers lacks
def test_transformers_reads_the_same_model(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer, path = written(family, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    state = theirs.state_dict()
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])] == []
    ids = torch.arange(3, 120)[None]
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=ids).logits, model(input_ids=ids).logits)
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    if family != "bloom":  # whose way to split text transformers does not read
        assert again.tokenize(TEXT) == tokenizer.tokenize(TEXT)
    assert again.get_vocab().items() >= tokenizer.get_vocab().items()
    assert again.chat_template == tokenizer.chat_template


def test_phi_is_written_as_it_is(tmp_path: Path) -> None:
    model, _, path = written("phi", tmp_path)
    found = tensors(path)
    parts = {"self_attn.q_proj": "attn_q", "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
    for name, target in parts.items():
        for kind in ("weight", "bias"):
            stored = found.pop(f"blk.1.{target}.{kind}")
            assert torch.equal(stored, model.get_parameter(f"model.layers.1.{name}.{kind}"))
    assert torch.equal(found["output.bias"], model.lm_head.bias)
    assert torch.equal(found["token_embd.weight"], model.model.embed_tokens.weight)
    assert sum(tensor.numel() for tensor in tensors(path).values()) == sum(p.numel() for p in model.parameters())
    assert said(path, "phi2.rope.dimension_count") == 4


def test_scaled_rotary_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = build("llama", rope_parameters=LLAMA3, rope_theta=None)
    path = export(model, tokenizers.build("llama-bpe"), tmp_path / "one.gguf", format="gguf")
    size = model.config.head_dim
    plain = 5e5 ** -(torch.arange(0, size, 2) / size)
    factors = tensors(path)["rope_freqs.weight"]
    assert factors.min() == 1
    assert factors.max() == 8
    assert torch.allclose(plain / factors, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    with pytest.raises(ConfigError, match=r"scales its rotary embeddings \(rope_freqs\.weight\), which transfo"):
        load.load_model(str(path))
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    model = build("llama", rope_parameters=linear, rope_theta=None)
    path = export(model, tokenizers.build("llama-bpe"), tmp_path / "two.gguf", format="gguf")
    assert said(path, "llama.rope.scaling.factor") == 2
    with pytest.raises(ConfigError, match=r"scales its rotary embeddings \(linear\)"):
        load.load_config(str(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits(family: str, tmp_path: Path) -> None:
    model, tokenizer, path = written(family, tmp_path, quantize="q8_0")
    whole = tensors(export(model, tokenizer, tmp_path / "whole.gguf", format="gguf"))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert set(kinds.values()) == {"Q8_0", "F32"}
    for name, tensor in tensors(path).items():
        if kinds[name] == "F32":
            assert torch.equal(tensor, whole[name])
        else:
            step = whole[name].reshape(-1, 32).abs().amax(1, keepdim=True) / 127
            error = (tensor - whole[name]).reshape(-1, 32).abs() / step
            assert error.max() < 0.57, "half a step, and what the scale loses in float16 at the 127th"


@pytest.mark.parametrize("form", ["q4_1", "q4_0"])
def test_four_bits(form: Any, tmp_path: Path) -> None:
    model, tokenizer, path = written("llama", tmp_path, quantize=form)
    whole = tensors(export(model, tokenizer, tmp_path / "whole.gguf", format="gguf"))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q8_0"
    assert set(kinds.values()) == {form.upper(), "Q8_0", "F32"}
    assert said(path, "general.file_type") == gguf.LlamaFileType[f"MOSTLY_{form.upper()}"]
    for name, tensor in tensors(path).items():
        if kinds[name] == form.upper():
            rows, error = whole[name].reshape(-1, 32), (tensor - whole[name]).reshape(-1, 32).abs()
            least, most = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
            # Sixteen values from the least to the most; or symmetric ones, of which the positive side has one less.
            step, worst = (
                ((most - least) / 15, 0.52) if form == "q4_1" else (rows.abs().amax(1, keepdim=True) / 8, 1.01)
            )
            assert (error / step).max() < worst


def test_what_files_say(tmp_path: Path) -> None:
    _, tokenizer, path = written("gemma3_text", tmp_path)
    assert said(path, "gemma3.attention.sliding_window") == 4096
    assert said(path, "tokenizer.ggml.add_space_prefix") is False
    assert said(path, "tokenizer.ggml.add_bos_token") is True
    assert said(path, "tokenizer.ggml.add_eos_token") is False
    names, kinds = said(path, "tokenizer.ggml.tokens"), said(path, "tokenizer.ggml.token_type")
    assert len(names) == len(kinds) == 400, "one per row of the embeddings"
    assert names[-1] == "[PAD399]"
    held = {names[index]: gguf.TokenType(kind).name for index, kind in enumerate(kinds)}
    assert held["<unk>"] == "UNKNOWN"
    assert held["<0x0A>"] == "BYTE"
    assert held["</s>"] == "CONTROL"
    assert held["  "] == "USER_DEFINED"
    assert held["[PAD399]"] == "UNUSED"
    model = build("mistral", sliding_window=64)
    model.generation_config.eos_token_id = [2, 7]
    path = export(model, tokenizers.build("sentencepiece"), tmp_path / "other.gguf", format="gguf")
    assert said(path, "llama.context_length") == 64, "llama.cpp knows no windows there"
    assert said(path, "tokenizer.ggml.add_space_prefix") is True
    assert said(path, "tokenizer.ggml.eot_token_id") == 7


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope of type dyna"),
        ("llama", {"attention_bias": True}, "llama models with attention_bias=True"),
        ("llama", {"hidden_act": "relu"}, "the activation relu"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm=True"),
        ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar=64, which is not head_dim=256"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 6}, "layer_types other than"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    family: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"{message}.*; .*convert_hf_to_gguf\.py"):
        export(build(family, **overrides), tokenizers.build(SETTINGS[family][0]), tmp_path / "x.gguf", format="gguf")
    assert list(tmp_path.iterdir()) == []


def test_tokenizers_that_are_refused(tmp_path: Path) -> None:
    odd = tokenizers.build("gpt-2", add_prefix_space=True)
    with pytest.raises(ConfigError, match="does not know a tokenizer like this model's"):
        export(build("llama"), odd, tmp_path / "x.gguf", format="gguf")
    with pytest.raises(ConfigError, match="the tokenizer has .* tokens, and the model's embeddings have 100 rows"):
        export(build("llama", vocab_size=100), tokenizers.build("gpt-2"), tmp_path / "x.gguf", format="gguf")
    assert list(tmp_path.iterdir()) == []
