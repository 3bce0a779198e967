"""Frozen parts, vocabularies and adapters by their settings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.cli.verbs.export import write as export
from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.adapters import LoraArgs, add_lora
from lt_offload.finetune.module import FineTune
from tests.support import models, tiny
from tests.unit.finetune.conftest import data, trainer


@pytest.fixture(scope="module")
def adapter(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = add_lora(load.load_model(folder), LoraArgs(r=2))
    return export(model, load.load_tokenizer(folder), tmp_path_factory.mktemp("adapters") / "one", format="adapter")


def trained(**settings: Any) -> set[str]:
    return {name for name, parameter in FineTune(**settings).build().named_parameters() if parameter.requires_grad}


def test_patterns_say_what_is_trained(folder: str) -> None:
    everything = trained(name=folder)
    layer = {name for name in everything if name.startswith("model.layers.1.")}
    norms = {name for name in everything if "norm" in name}
    assert layer < everything
    assert norms < everything
    assert trained(name=folder, train_only=["model.layers.1"]) == layer
    assert trained(name=folder, train_only=["model.layers.1.*"]) == layer
    assert trained(name=folder, freeze=["model.layers.1"]) == everything - layer
    assert trained(name=folder, freeze=["*norm.weight", r"model\.layers\.[1-9]\..*"]) == everything - layer - norms
    assert trained(name=folder, train_only=["model.layers.1"], freeze=["*norm*"]) == layer - norms
    assert trained(name=folder, train_only=["lm_head"]) == {"model.embed_tokens.weight"}, "they are one tensor"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": ["model.layer.0"]}, r"model\.freeze=\['model\.layer\.0'\]: no parameter .* is 'model\.layers\.0'"),
        (
            {"train_only": ["model.layers.1"], "freeze": ["*norm*", "lm_head"]},
            r"'lm_head' changes nothing with model\.train_only=\['model\.layers\.1'\]",
        ),
        ({"train_only": ["*.q_prj.*"]}, r"model\.train_only=.* no parameter is called '\*\.q_prj\.\*'"),
        ({"freeze": ["(unclosed"]}, "no parameter is called"),
        ({"freeze": ["model"]}, "leaves nothing to be trained"),
        ({"freeze": ["model"], "lora": LoraArgs()}, "has no use with adapters"),
        ({"train_only": ["model"], "adapter": "some"}, "has no use with adapters"),
        ({"lora": LoraArgs(), "adapter": "some"}, "model.adapter='some' brings its own settings"),
        ({"lora": LoraArgs(alpha=0)}, r"model\.lora\.alpha=0 is too small"),
        ({"lora": LoraArgs(dropout=1.0)}, r"model\.lora\.dropout=1\.0 is no probability below 1"),
        (
            {"lora": LoraArgs(bias="all")},
            "model.lora.bias=all changes nothing, as the model has no biases; set it to none",
        ),
        ({"lora": LoraArgs(dora=True), "quantize": "nf4"}, "model.quantize=nf4 is not offered with DoRA"),
        ({"lora": LoraArgs(target_modules=[])}, r"model\.lora\.target_modules is empty"),
        ({"lora": LoraArgs(target_modules=["q_proj", "v_prj"])}, "no layer is called 'v_prj'; did you mean v_proj"),
        ({"lora": LoraArgs(modules_to_save=["head"])}, r"modules_to_save=\['head'\]: no layer is called 'head'"),
        ({"lora": LoraArgs(target_modules="(x")}, r"model\.lora\.target_modules='\(x'"),
        ({"lora": LoraArgs(target_modules="nothing")}, r"model\.lora\.target_modules='nothing'"),
        ({"adapter": "./nowhere"}, r"model\.adapter='\./nowhere' is not a folder"),
        ({"new_tokens": ["<a>", "<b>", "<a>"]}, "has '<a>' twice"),
        ({"new_tokens": [" "]}, "' ' is no token"),
    ],
)
def test_settings_that_name_nothing_or_contradict_each_other(folder: str, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FineTune(folder, **settings).build()


def test_damaged_and_foreign_adapters(folder: str, adapter: Path, tmp_path: Path) -> None:
    def build(path: Path, name: str = folder) -> None:
        FineTune(name, adapter=str(path)).build()

    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json and no adapter_model\.safetensors"):
        build(tmp_path / "empty")
    for number, (file, content, message) in enumerate(
        [
            ("adapter_model.safetensors", b"xyz", "its weights cannot be read"),
            ("adapter_config.json", b"{", r"adapter_config\.json cannot be read"),
            ("adapter_config.json", b'{"peft_type": "IA3"}', "adapters of type 'IA3'; only those of type 'LORA'"),
            ("adapter_config.json", b"[]", "cannot be read"),
        ]
    ):
        target = tmp_path / str(number)
        target.mkdir()
        for path in adapter.iterdir():
            (target / path.name).write_bytes(content if path.name == file else path.read_bytes())
        with pytest.raises(ConfigError, match=message):
            build(target)
    with pytest.raises(ConfigError, match="is of another model: size mismatch"):
        build(adapter, str(tiny.model(tmp_path / "wide", hidden_size=64)))
    with pytest.raises(ConfigError, match=r"does not fit this model: .* has no .*layers\.1.* set model\.name to"):
        build(adapter, str(tiny.model(tmp_path / "flat", num_hidden_layers=1)))


def test_new_tokens_get_embeddings_around_the_mean(folder: str) -> None:
    module = FineTune(folder, new_tokens=["<a>", "<b>"])
    before, after = load.load_model(folder).get_input_embeddings().weight, module.build()
    grown: Any = after.get_input_embeddings().weight  # type: ignore[operator]
    assert grown.shape[0] == before.shape[0] + 2
    assert torch.equal(grown[:-2], before)
    assert torch.allclose(grown[-1], before.mean(0), atol=1e-2)
    assert after.get_output_embeddings().weight is grown  # type: ignore[operator]
    with torch.device("meta"):
        assert FineTune(folder, new_tokens=["<a>"]).build(init="random").config.vocab_size == before.shape[0] + 1  # type: ignore[union-attr]
    tokenizer = load.load_tokenizer(folder, ["<a>", "<b>", "x"])
    assert tokenizer("x<b>").input_ids[-1] == before.shape[0] + 1
    assert len(tokenizer) == before.shape[0] + 2


def test_another_tokenizer_with_more_tokens(folder: str, text: str, tmp_path: Path) -> None:
    """It is an error, before the weights are loaded where there are data, unless its rows are asked for."""
    load.load_tokenizer(folder, ["<a>", "<b>"]).save_pretrained(tmp_path)
    other = {"tokenizer": str(tmp_path)}
    said = (
        r"has 261 tokens, and the model 259 embeddings: {} would be new and random, .* or set model.resize_vocab=true"
    )
    with pytest.raises(ConfigError, match=said.format(2)):
        FineTune(folder, **other).build()
    for new in ([], ["<b>"]):
        module = FineTune(folder, new_tokens=new)
        with pytest.raises(ConfigError, match=said.format(2 - len(new))):
            trainer(1).fit(module, datamodule=data(folder, text, new_tokens=new, **other))
        assert module.model is None
    for settings in ({"resize_vocab": True}, {"new_tokens": ["<a>", "<b>"]}, {"init": "random"}):
        model: Any = FineTune(folder, **other, **settings).build()
        assert model.config.vocab_size == 261


def test_embeddings_of_new_tokens_that_adapters_leave_are_told(folder: str) -> None:
    with pytest.warns(UserWarning, match=r"adapters leave embed_tokens as it is; .*modules_to_save=\[embed_tokens\]"):
        FineTune(folder, new_tokens=["<a>"], lora=LoraArgs(r=2)).build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FineTune(folder, new_tokens=["<a>"], lora=LoraArgs(r=2, modules_to_save=["embed_tokens"])).build()
        FineTune(folder, new_tokens=["x"], lora=LoraArgs(r=2)).build()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_kind_of_adapter_on_every_family(family: str, dora: bool) -> None:
    model = add_lora(models.build(family), LoraArgs(r=2, alpha=4, dora=dora, rslora=dora))
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    assert any("magnitude" in name for name in trainable) == dora
    assert model.training
    model(**models.batch(model)).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
