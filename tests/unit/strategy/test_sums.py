"""Bits of a checkpoint file that have turned: never trained on, and the tensor is named."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config

from lt_offload import OffmateStrategy
from lt_offload.errors import ConfigError
from lt_offload.strategy.checkpoint import files, sums
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
