"""Files that several processes fill are archives that torch and others read: aligned, with sums, of any size."""

from __future__ import annotations

import os
import threading
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.compat.torch import address_of
from lt_offload.distributed.letters import Letters
from lt_offload.errors import CheckpointError, ProcessError
from lt_offload.strategy.checkpoint import archive, files, sums
from lt_offload.strategy.checkpoint.several import FilePart, NewFile, _fill


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


class Copies:
    """The host copies of one of two processes: the second one owns what the first one's checkpoint calls ``b``."""

    def __init__(self, checkpoint: dict[str, Any], rank: int) -> None:
        self.checkpoint, self.rank = checkpoint, rank

    def saved_by_others(self) -> dict[int, tuple[int, Any]]:
        return {address_of(self.checkpoint["b"].untyped_storage()): (1, (0, None))}

    def memory(self, copy: Any) -> torch.UntypedStorage:
        assert copy == (0, None)
        return self.checkpoint["b"].untyped_storage()  # type: ignore[no-any-return]


class Pair:
    """What two threads say to each other, in the place of ``Ranks``."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}
        self.values: dict[str, Any] = {}
        self.barrier = threading.Barrier(2, timeout=30)
        self.failed: str | None = None

    # A store
    def clone(self) -> Pair:
        return self

    def set(self, key: str, text: str) -> None:
        self.said[key] = text.encode()

    def get(self, key: str) -> bytes:
        return self.said[key]

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self.said

    def delete_key(self, key: str) -> None:
        del self.said[key]


class Side:
    """One of the two."""

    size = 2

    def __init__(self, pair: Pair, rank: int) -> None:
        self.pair, self.rank = pair, rank
        self.letters = Letters(pair, "run", self.check)

    def check(self) -> None:
        if self.pair.failed:
            raise ProcessError(self.pair.failed)

    def together(self, work: Callable[[], Any]) -> list[Any]:
        self.pair.values[str(self.rank)] = work()
        self.pair.barrier.wait()
        return [self.pair.values[str(rank)] for rank in range(2)]

    def share_file(self, make: Callable[[], int], by: int) -> int:
        if self.rank == by:
            self.pair.values["file"] = make()
        self.pair.barrier.wait()
        return self.pair.values["file"] if self.rank == by else os.dup(self.pair.values["file"])


def both(path: Path, second: Callable[[FilePart], None]) -> list[BaseException | None]:
    """Let two threads write; return their errors."""
    pair, errors = Pair(), [None, None]

    def run(rank: int) -> None:
        content = {"a": torch.full((10,), float(rank)), "b": torch.full((10,), 5.0 + rank)}
        side: Any = Side(pair, rank)
        copies: Any = Copies(content, rank)
        try:
            part = FilePart(side, side.letters, path, content, copies)
            if rank == 0:
                part.write(part.records, files._as_it_is)
            else:
                second(part)
        except BaseException as error:
            errors[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert pair.said == {}, "letters that nobody takes away would stay in the store"
    return errors  # type: ignore[return-value]


def test_each_writes_what_is_its_own(tmp_path: Path) -> None:
    assert both(tmp_path / "of both", lambda part: part.write(part.records, files._as_it_is)) == [None, None]
    found = torch.load(tmp_path / "of both", weights_only=True)
    assert found["a"].tolist() == [0.0] * 10
    assert found["b"].tolist() == [6.0] * 10
    assert [path.name for path in tmp_path.iterdir()] == ["of both"]


def test_what_one_cannot_write_leaves_nothing_and_is_what_both_say(tmp_path: Path) -> None:
    def full(part: FilePart) -> None:
        os.close(part._descriptor)  # a file that cannot be written to
        part._descriptor = os.open("/dev/full", os.O_WRONLY)
        part.write(part.records, files._as_it_is)

    first, second = both(tmp_path / "full", full)
    assert isinstance(second, CheckpointError)
    assert "the disk is full" in str(second)
    assert isinstance(first, ProcessError)
    assert str(first) == f"process 1 failed: {second}"
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_given_up_is_told(tmp_path: Path) -> None:
    first, second = both(tmp_path / "given up", lambda part: part.close())
    assert second is None
    assert str(first) == f"process 1 failed: its part of {tmp_path / 'given up'} was given up"
    assert list(tmp_path.iterdir()) == []
