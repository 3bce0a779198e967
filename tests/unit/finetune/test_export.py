from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.export import export
from lt_offload.finetune.module import LoraArgs, add_lora
from tests.support import models, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.model(tmp_path_factory.mktemp("model")))


def test_what_is_exported_is_what_is_loaded(folder: str, tmp_path: Path) -> None:
    model = load.load_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    export(model, load.load_tokenizer(folder), tmp_path / "out")
    again = load.load_model(str(tmp_path / "out"))
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert load.load_tokenizer(str(tmp_path / "out")).get_vocab() == load.load_tokenizer(folder).get_vocab()


@pytest.mark.parametrize("merge", [True, False])
def test_adapters(folder: str, tmp_path: Path, merge: bool) -> None:
    model = add_lora(load.load_model(folder), LoraArgs(r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.eval()
    batch = models.batch(model, padding=False)
    with torch.no_grad():
        expected = model(**batch).logits
    export(model, load.load_tokenizer(folder), tmp_path / "out", merge=merge)
    if merge:
        with torch.no_grad():
            logits = load.load_model(str(tmp_path / "out")).eval()(**batch).logits
        assert torch.allclose(logits, expected, atol=1e-5)
    else:
        assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
        assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("occupied", ["file", "folder"])
def test_nothing_is_overwritten(folder: str, tmp_path: Path, occupied: str) -> None:
    target = tmp_path / "out"
    if occupied == "folder":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        target.write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        export(load.load_model(folder), load.load_tokenizer(folder), target)
