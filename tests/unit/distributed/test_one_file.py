"""Files that several processes fill are archives that torch and others read: aligned, with sums, of any size."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.compat.torch import address_of
from lt_offload.strategy.checkpoint import archive, files, sums
from lt_offload.strategy.checkpoint.several import NewFile, _fill


def by_file(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write ``checkpoint`` by itself."""
    new = NewFile(path, checkpoint, {}, 1)
    new.finish(_fill(new.descriptor, new.own, files._as_it_is))


def test_torch_reads_it_as_its_own(tmp_path: Path) -> None:
    shared = torch.arange(10.0)
    content = {
        "a": shared,
        "same": shared[2:5],
        "b": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.empty(0),
        "n": 7,
    }
    by_file(tmp_path / "ours", content)
    files.save(content, tmp_path / "torchs")
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


def test_offsets_that_torch_can_compute_are_not_promised(tmp_path: Path) -> None:
    by_file(tmp_path / "ours", {"a": torch.arange(10.0), "b": torch.arange(7)})
    with torch.utils.serialization.config.patch({"load.calculate_storage_offsets": True}):
        found = torch.load(tmp_path / "ours", mmap=True, weights_only=True)
    assert torch.equal(found["b"], torch.arange(7))


def test_a_bit_that_is_turned_is_noticed(tmp_path: Path) -> None:
    by_file(tmp_path / "ours", {"state_dict": {"a": torch.arange(100.0)}})
    with zipfile.ZipFile(tmp_path / "ours") as ours:
        at = next(entry.header_offset for entry in ours.infolist() if entry.filename.endswith("data/0"))
    with (tmp_path / "ours").open("r+b") as file:
        file.seek(at + 200)
        byte = file.read(1)
        file.seek(at + 200)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ValueError, match=r"state_dict\.a is not what was written"):
        sums.check(tmp_path / "ours", files.load(tmp_path / "ours"))


def test_tensors_and_files_of_more_than_4_gib(tmp_path: Path) -> None:
    """The bytes are holes of the file, so that they take neither disk nor time."""
    small = torch.arange(5).numpy().tobytes()
    entries = archive.lay_out([("data/0", 2**32 + 100), ("data/1", len(small)), ("version", 2)])
    contents = {entry.data: content for entry, content in zip(entries, (b"", small, b"3\n"), strict=True)}
    crcs = {at: zlib.crc32(content) for at, content in contents.items()}
    with (tmp_path / "large").open("w+b") as file:
        for entry in entries:
            assert entry.data % archive.ALIGNMENT == 0
            os.pwrite(file.fileno(), contents[entry.data], entry.data)
            os.pwrite(file.fileno(), entry.local(crcs[entry.data]), entry.header)
        os.pwrite(file.fileno(), b"\7", entries[0].data + 2**32 + 99)
        os.pwrite(file.fileno(), archive.contents(entries, crcs), archive.end_of(entries))
    with zipfile.ZipFile(tmp_path / "large") as large:
        by_name = {entry.filename: entry for entry in large.infolist()}
        assert by_name["archive/data/0"].file_size == 2**32 + 100
        assert by_name["archive/data/1"].header_offset > 2**32
        assert large.read("archive/data/1") == small
    reader = torch._C.PyTorchFileReader(str(tmp_path / "large"))
    assert reader.get_record("data/1") == small
    with (tmp_path / "large").open("rb") as file:
        assert os.pread(file.fileno(), 1, reader.get_record_offset("data/0") + 2**32 + 99) == b"\7"


def test_more_records_than_16_bits_count(tmp_path: Path) -> None:
    entries = archive.lay_out([(f"data/{i}", 1) for i in range(70_000)] + [("version", 2)])
    whole = bytearray(archive.end_of(entries))
    crcs = {}
    for entry in entries:
        content = b"3\n" if entry.nbytes == 2 else b"x"
        crcs[entry.data] = zlib.crc32(content)
        whole[entry.header : entry.data + entry.nbytes] = entry.local(crcs[entry.data]) + content
    (tmp_path / "many").write_bytes(whole + archive.contents(entries, crcs))
    with zipfile.ZipFile(tmp_path / "many") as many:
        assert len(many.infolist()) == 70_001
        assert many.read("archive/data/69999") == b"x"
    assert torch._C.PyTorchFileReader(str(tmp_path / "many")).get_record("data/65535") == b"x"


# -- two processes, as two threads ------------------------------------------------------------------------------------
