"""Files that several processes fill are archives that torch and others read: aligned, with sums, of any size."""

from __future__ import annotations

import os
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lt_offload.compat.torch import address_of
from lt_offload.strategy.checkpoint import archive, files, sums
from lt_offload.strategy.checkpoint.archive import NewFile, Record


def test_torch_reads_it_as_its_own(tmp_path: Path) -> None:
    shared = torch.arange(10.0)
    content = {
        "a": shared,
        "same": shared[2:5],
        "b": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.empty(0),
        "n": 7,
    }
    files.save(content, tmp_path / "ours")
    torch.save(content, tmp_path / "torchs")
    for mapped in (False, True):
        found = torch.load(tmp_path / "ours", weights_only=True, mmap=mapped)
        expected = torch.load(tmp_path / "torchs", weights_only=True, mmap=mapped)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], expected[k]) for k in ("a", "same", "b", "none"))
        assert found["n"] == 7
        assert address_of(found["a"].untyped_storage()) == address_of(found["same"].untyped_storage())
    with zipfile.ZipFile(tmp_path / "ours") as ours, zipfile.ZipFile(tmp_path / "torchs") as torchs:
        assert ours.testzip() is None
        same = {name.partition("/")[2] for name in ours.namelist()}
        assert {name.partition("/")[2] for name in torchs.namelist()} >= same
        assert "data.pkl" in same
    sums.check(tmp_path / "ours", files.load(tmp_path / "ours"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "torchs"]


def written(path: Path, monkeypatch: pytest.MonkeyPatch, *records: Record) -> None:
    """Write ``records``, whose bytes in storages stay holes of the file: they take neither disk nor time."""
    monkeypatch.setattr(archive, "_records_of", lambda _: list(records))
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    new = NewFile(path, {})
    holes = [record for record in new.records if record.content is None]
    small = [record for record in new.records if record.content is not None]
    new.write(small, nullcontext, lambda: {hole.offset: 0 for hole in holes})


def test_tensors_and_files_of_more_than_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = torch.arange(5).numpy().tobytes()
    large, path = Record("data/0", None, None, 2**32 + 100), tmp_path / "large"
    version = Record("version", "3\n", None, 2)
    written(path, monkeypatch, large, Record("data/1", small, None, len(small)), version)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\7", large.offset + 2**32 + 99)
    with zipfile.ZipFile(path) as read:
        by_name = {entry.filename: entry for entry in read.infolist()}
        assert by_name["archive/data/0"].file_size == 2**32 + 100
        assert by_name["archive/data/1"].header_offset > 2**32
        assert read.read("archive/data/1") == small
    reader = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record("data/1") == small
    with path.open("rb") as file:
        assert os.pread(file.fileno(), 1, reader.get_record_offset("data/0") + 2**32 + 99) == b"\7"
