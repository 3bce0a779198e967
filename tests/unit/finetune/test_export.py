from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from lt_offload.cli.verbs.export import write as export
from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.adapters import LoraArgs, add_lora
from lt_offload.finetune.module import FineTune
from tests.support import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.model(tmp_path_factory.mktemp("model"), chat=True))


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(3, 40)[None]).logits
    return result


def scrambled(model: Any) -> Any:
    """Give every trainable parameter of ``model`` other values, as training does."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_what_is_exported_is_what_is_loaded(folder: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = scrambled(load.load_model(folder))
    expected = logits(model)
    model.generation_config.max_new_tokens = 7
    target = export(model, load.load_tokenizer(folder), tmp_path / "out", max_shard_size="20KB")
    assert target == tmp_path / "out"
    assert len(list(target.glob("*.safetensors"))) > 1
    assert torch.equal(logits(load.load_model(str(target))), expected)
    theirs = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(logits(theirs), expected)
    assert theirs.config.use_cache
    assert not model.config.use_cache
    assert GenerationConfig.from_pretrained(target).max_new_tokens == 7
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert tokenizer.get_vocab() == load.load_tokenizer(folder).get_vocab()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "no scratch folder is left"


def test_weights_are_cast(folder: str, tmp_path: Path) -> None:
    model = scrambled(load.load_model(folder))
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    export(model, load.load_tokenizer(folder), tmp_path / "out", dtype="bfloat16")
    again = load.load_model(str(tmp_path / "out"), dtype="bfloat16")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    large = load.load_model(folder)
    torch.nn.init.constant_(large.get_input_embeddings().weight, 1e6)
    with pytest.raises(ConfigError, match=r"float16 cannot hold the values of model\.embed_tokens\.weight"):
        export(large, load.load_tokenizer(folder), tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()


ADAPTERS = {
    "lora": LoraArgs(r=2),
    "dora": LoraArgs(r=2, dora=True),
    "rslora": LoraArgs(r=4, rslora=True, target_modules=r".*\.(q|v)_proj", bias="all"),
    "embeddings": LoraArgs(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # what peft asks transformers
@pytest.mark.parametrize(
    ("kind", "tied"), [("lora", True), ("dora", False), ("rslora", True), ("embeddings", True), ("embeddings", False)]
)
def test_adapters_are_merged_or_written_as_peft_reads_them(kind: str, tied: bool, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = str(tiny.model(tmp_path / "base", tie_word_embeddings=tied, attention_bias=True))
    tokenizer = load.load_tokenizer(base)
    model = scrambled(add_lora(load.load_model(base), ADAPTERS[kind]))
    expected = logits(model)
    export(model, tokenizer, tmp_path / "adapter", format="adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert torch.equal(logits(theirs), expected)
    taken_up = FineTune(base, adapter=str(tmp_path / "adapter")).build()
    assert torch.equal(logits(taken_up), expected)
    trained = [[n for n, p in one.named_parameters() if p.requires_grad] for one in (model, taken_up)]
    assert trained[0] == trained[1]
    export(model, tokenizer, tmp_path / "merged")
    merged = load.load_model(str(tmp_path / "merged"))
    assert torch.equal(logits(merged), logits(theirs.merge_and_unload()))
    assert torch.allclose(logits(merged), expected, atol=1e-4)


@pytest.mark.parametrize("format", ["hf", "gguf"])
@pytest.mark.parametrize("occupied", ["file", "folder"])
def test_nothing_is_overwritten(folder: str, tmp_path: Path, occupied: str, format: Any) -> None:
    target = tmp_path / "out"
    if occupied == "folder":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        target = tmp_path / ("out.gguf" if format == "gguf" else "out")
        target.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        export(load.load_model(folder), load.load_tokenizer(folder), target, format=format)
    assert (target / "notes.txt" if occupied == "folder" else target).read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "out was not written: the disk is full"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "out was not written: the disk is full"),
        # A file of more than 4 GB, on many a stick.
        (SafetensorError("I/O error: File too large (os error 27)"), "out' cannot be written: File too large; choose"),
    ],
)
def test_a_disk_that_is_full_leaves_nothing(
    error: Exception, message: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(ConfigError, match=message):
        export(load.load_model(folder), load.load_tokenizer(folder), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_is_a_model_name(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = scrambled(load.load_model(folder))
    expected = logits(model)
    path = export(model, load.load_tokenizer(folder), tmp_path / "out", format="gguf")
    assert path == tmp_path / "out" / "model.gguf"
    assert torch.equal(logits(load.load_model(str(path))), expected)
    assert "Converting model.gguf once" in capsys.readouterr().out
    ours, theirs = load.load_tokenizer(folder), load.load_tokenizer(str(path))
    assert capsys.readouterr().out == ""
    assert theirs("the quick brown föx 12 345\n\n  !").input_ids == ours("the quick brown föx 12 345\n\n  !").input_ids
    assert theirs.chat_template == ours.chat_template
    (tmp_path / "text.gguf").write_text("mine")
    with pytest.raises(ConfigError, match="is no GGUF file, whatever its name says"):
        load.load_model(str(tmp_path / "text.gguf"))
    damaged = tmp_path / "damaged.gguf"
    shutil.copyfile(path, damaged)
    with damaged.open("r+b") as file:
        file.truncate(damaged.stat().st_size // 2)
    with pytest.raises(ConfigError, match=r"damaged\.gguf.* cannot be loaded"):
        load.load_model(str(damaged))


def test_what_gguf_does_not_hold(folder: str, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = load.load_tokenizer(folder)
    refused = r"writes models of the types llama, mistral, .* and this is a gpt2 model; .*convert_hf_to_gguf\.py"
    with pytest.raises(ConfigError, match=refused):
        export(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), tokenizer, tmp_path / "out", format="gguf")
    with pytest.raises(ConfigError, match=r"--format hf writes a folder, and '.*out\.gguf' is the name of a GGUF file"):
        export(load.load_model(folder), tokenizer, tmp_path / "out.gguf")
    with pytest.raises(ConfigError, match="--quantize q8_0 is for GGUF files"):
        export(load.load_model(folder), tokenizer, tmp_path / "out", quantize="q8_0")
    assert not (tmp_path / "out").exists()
