"""What is written beside a file or a folder, and takes its place at the end or never."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lt_offload.replacing import SUFFIX, new_folder, new_part, remove_leftovers, replacing, write_text


def test_a_file_and_an_empty_folder_are_replaced_at_the_end(tmp_path: Path) -> None:
    file, folder = tmp_path / "made" / "file", tmp_path / "folder"
    folder.mkdir()
    for text in ("old", "new"):
        with replacing(file) as new:
            new.write_text(text)
            assert not file.exists() if text == "old" else file.read_text() == "old"
    with replacing(folder) as new:
        new.mkdir()
        (new / "inside").touch()
        assert not any(folder.iterdir())
    assert file.read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "inside", "made"]


def test_what_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("old")
    folder.mkdir()
    (folder / "inside").touch()
    with pytest.raises(UnicodeEncodeError), replacing(file) as new:
        new.write_text("\ud800", encoding="utf-8")  # when the file is there already
    with pytest.raises(OSError, match="not empty"), replacing(folder) as new:
        new.mkdir()
    assert file.read_text() == "old"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "inside"]


WRITER = """
import sys
from pathlib import Path
from lt_offload.replacing import replacing
with replacing(Path(sys.argv[1])) as new:
    new.mkdir()
    (new / "half").touch()
    print("writes", flush=True)
    sys.stdin.read()
"""


def test_who_writes_next_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "folder")]
    killed, living = (subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2))
    with killed, living:
        for process in (killed, living):
            assert process.stdout is not None
            assert process.stdout.readline() == b"writes\n"
        killed.kill()
        killed.wait()
        assert len(list(tmp_path.glob(f".folder.*{SUFFIX}/folder/half"))) == 2
        write_text(tmp_path / "file", "text")
        assert len(list(tmp_path.glob(f".folder.*{SUFFIX}/folder/half"))) == 1
    assert living.returncode == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "half"]


def test_a_part_that_was_taken_for_a_leftover_is_made_again(tmp_path: Path) -> None:
    """Another process may clean up between making a part and locking it."""
    made: list[Path] = []

    def make(path: Path) -> int:
        made.append(path)
        descriptor = new_folder(path)
        if len(made) == 1:
            remove_leftovers(tmp_path)
        return descriptor

    part, descriptor = new_part(tmp_path / "folder", make)
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [part] == made[1:]
    os.close(descriptor)
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_locks_all_is_written_and_leftovers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems of clusters refuse them."""

    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    (tmp_path / f".killed{SUFFIX}").touch()
    write_text(tmp_path / "file", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".killed{SUFFIX}", "file"]


def test_links_stay_and_pipes_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for text in ("old", "new"):
        assert write_text(tmp_path / "link", text) == tmp_path / "link"
        assert (tmp_path / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()
    reading, writing = os.pipe()
    write_text(Path(f"/dev/fd/{writing}"), "text")
    assert os.read(reading, 10) == b"text"
    os.close(reading)
    os.close(writing)


def test_names_may_be_as_long_as_the_system_takes_them(tmp_path: Path) -> None:
    write_text(tmp_path / ("ä" * 127), "text")
    assert [path.name for path in tmp_path.iterdir()] == ["ä" * 127]
