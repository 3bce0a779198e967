"""Checkpoints that are not this run's: one sentence, from a Trainer too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload.errors import ConfigError
from lt_offload.strategy.checkpoint.files import load
from lt_offload.strategy.checkpoint.foreign import check_checkpoint, check_optimizer, check_weights, loading_state


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
