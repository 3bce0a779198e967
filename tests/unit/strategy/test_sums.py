"""Checkpoints whose bits have turned, or that are not this run's: one sentence, and the tensor is named."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.serialization import config

from lt_offload import OffmateStrategy
from lt_offload.errors import ConfigError
from lt_offload.strategy.checkpoint import files, sums
from lt_offload.strategy.checkpoint.files import load
from lt_offload.strategy.checkpoint.foreign import check_checkpoint, check_optimizer, check_weights, loading_state
from tests.support.trainers import fit, seeded_module


def contents() -> dict[str, Any]:
    weight = torch.arange(1 << 19, dtype=torch.float32)
    states = {0: {"exp_avg": torch.ones(3), "step": torch.tensor(4.0)}}
    return {
        "state_dict": {"a": weight, "tied": weight[:2], "b.c": torch.zeros(0)},
        "optimizer_states": [{"state": states}],
    }


def flip(path: Path, content: bytes) -> None:
    """Turn a bit in the middle of ``content`` within the file."""
    data = bytearray(path.read_bytes())
    assert data.count(content) == 1
    data[data.index(content) + len(content) // 2] ^= 4
    path.write_bytes(data)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


@pytest.fixture(params=["ours", "torch"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    target = tmp_path / "a b.ckpt"
    (files.save if request.param == "ours" else torch.save)(contents(), target)
    return target


def test_a_bit_that_has_turned_is_found_and_its_tensor_is_named(path: Path) -> None:
    sums.check(path, files.load(path))
    saved = contents()
    flip(path, bytes_of(saved["optimizer_states"][0]["state"][0]["exp_avg"]))
    loaded = files.load(path)
    sums.check(path, loaded, only="state_dict")
    with pytest.raises(ConfigError, match=r"a b.ckpt' is damaged: optimizer_states.0.state.0.exp_avg is not what was"):
        sums.check(path, loaded)
    flip(path, bytes_of(saved["state_dict"]["a"]))
    with pytest.raises(ConfigError, match=r"is damaged: state_dict.a and 1 more is not"):
        sums.check(path, files.load(path))
    with pytest.raises(ConfigError, match=r"is damaged: state_dict.a is not"):
        sums.check(path, files.load(path), only="state_dict")


def test_what_is_no_tensor_has_a_sum_too(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        [pickled] = [name for name in archive.namelist() if name.endswith("data.pkl")]
        flip(path, archive.read(pickled)[-40:])
    with pytest.raises(ConfigError, match=f"{pickled} is not what was written|cannot be read"):
        sums.check(path, files.load(path), only="state_dict")


@pytest.fixture
def without_sums() -> Iterator[None]:
    config.save.compute_crc32 = False
    yield
    config.save.compute_crc32 = True


def test_files_without_sums_are_taken_as_they_are(tmp_path: Path, without_sums: None) -> None:
    for name, old in (("new", False), ("old", True)):
        torch.save(contents(), tmp_path / name, _use_new_zipfile_serialization=not old)
        sums.check(tmp_path / name, files.load(tmp_path / name))


def test_training_does_not_go_on_from_a_damaged_file_and_validation_needs_its_weights_only(tmp_path: Path) -> None:
    run = fit(OffmateStrategy(memory="10MB"), max_steps=1)
    path = tmp_path / "run.ckpt"
    run.trainer.save_checkpoint(path)
    saved = files.load(path)
    flip(path, bytes_of(saved["optimizer_states"][0]["state"][0]["exp_avg"]))
    with pytest.raises(ConfigError, match=r"is damaged: optimizer_states.0.state.0.exp_avg"):
        fit(OffmateStrategy(memory="10MB"), max_steps=2, ckpt=path)
    run.trainer.validate(run.module, ckpt_path=path, verbose=False)
    name, weight = next((n, w) for n, w in saved["state_dict"].items() if w.ndim > 1)
    flip(path, bytes_of(weight))
    with pytest.raises(ConfigError, match=f"is damaged: state_dict.{name}"):
        run.trainer.validate(seeded_module(), ckpt_path=path, verbose=False)


def model(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width))


def stepped(module: nn.Module, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer = kind(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


SOUND: dict[str, Any] = {"pytorch-lightning_version": "2.6.0", "state_dict": {}, "loops": {}, "optimizer_states": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"cannot be read \(EOFError: .*\): it is incomplete"),
        (b"plain text", "cannot be read .*: it is incomplete, or no checkpoint"),
        (b"PK\x03\x04" + bytes(200), "cannot be read"),
        (b"\x02\0\0\0\0\0\0\0{}", "is a safetensors file"),
    ],
)
def test_files_that_are_no_checkpoints(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "x.ckpt", weights_only=True)


def test_a_folder_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; give a .ckpt file"):
        load(tmp_path, weights_only=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "holds a list"),
        ({}, "holds nothing, not the state of a training"),
        ({"a.weight": torch.ones(1)}, "holds a model's weights alone"),
        ({"model": {}, "epoch": 3}, "holds model, epoch, not the state"),
        (SOUND | {"state_dict": [1]}, "is damaged: its 'state_dict' is a list"),
        (SOUND | {"optimizer_states": {}}, "is damaged: its 'optimizer_states' is a dict"),
    ],
)
def test_other_content(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ConfigError, match=message):
        check_checkpoint(load(tmp_path / "x.ckpt", weights_only=True), tmp_path / "x.ckpt")
    check_checkpoint(SOUND, "sound.ckpt")


def test_weights_of_another_model() -> None:
    state = model().state_dict()
    check_weights(state, model().state_dict())
    with pytest.raises(ConfigError, match=r"0\.weight has shape \(3, 4\) there and \(5, 4\) here"):
        check_weights(state, model(5).state_dict())
    with pytest.raises(ConfigError, match=r"it has no 2\.weight \(2 tensors are missing, 0 are not in this model\)"):
        check_weights(state, nn.Sequential(*model(), nn.Linear(3, 3)).state_dict())
    more = state | {"extra": torch.ones(1)}
    with pytest.raises(ConfigError, match="has a tensor that this model does not have: extra"):
        check_weights(more, state)
    check_weights(more, state, strict=False)


def test_states_of_another_optimizer() -> None:
    optimizer = stepped(model())
    check_optimizer(optimizer, optimizer.state_dict())
    with pytest.raises(ConfigError, match=r"has groups of \[4\] tensors, AdamW has groups of \[2\] here"):
        check_optimizer(torch.optim.AdamW(nn.Linear(4, 3).parameters()), optimizer.state_dict())
    with pytest.raises(ConfigError, match="written with another optimizer than AdamW: they differ in .*momentum"):
        check_optimizer(optimizer, stepped(model(), torch.optim.SGD).state_dict())
    with pytest.raises(ConfigError, match=r"AdamW state of tensor 0: exp_avg has shape \(5, 4\), not \(3, 4\)"):
        check_optimizer(optimizer, stepped(model(5)).state_dict())
    for broken in ({}, {"state": {}, "param_groups": 3}, {"state": {}, "param_groups": [{"params": [[]]}]}, 7):
        with pytest.raises(ConfigError, match="is damaged"):
            check_optimizer(optimizer, broken)


def test_what_an_optimizer_does_not_take_is_said() -> None:
    optimizer = stepped(model())
    state = optimizer.state_dict()
    state["state"][0]["step"] = [1]
    with pytest.raises(ConfigError, match="state of AdamW cannot be loaded"), loading_state(optimizer):
        optimizer.load_state_dict(state)
