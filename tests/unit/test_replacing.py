"""What is written beside a file or a folder, and takes its place at the end or never."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lt_offload
from lt_offload.errors import ConfigError
from lt_offload.replacing import SUFFIX, new_folder, new_part, remove_leftovers, replacing, save_text, writing

PACKAGE = Path(lt_offload.__file__).parent


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


def test_a_text_that_has_no_room_is_refused_in_one_sentence_and_the_old_one_is_kept(tmp_path: Path) -> None:
    file, limits = tmp_path / "made" / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    assert save_text(file, "old\r\n") == file
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=f"'{file}' cannot be written: File too large; make room, or choose"):
            save_text(file, "new" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == b"old\r\n"
    assert os.listdir(file.parent) == ["file"]
    with pytest.raises(ConfigError, match=re.escape("made/file/below' cannot be written: File exists; make")):
        save_text(file / "below", "")
    with pytest.raises(ConfigError, match="is a folder; add the name of a file"):
        save_text(tmp_path, "")


def test_links_stay_and_devices_are_written_to(tmp_path: Path) -> None:
    link, device = tmp_path / "link", tmp_path / "device"
    link.symlink_to("file")
    device.symlink_to("/dev/full")
    for text in ("old", "new"):
        assert save_text(link, text) == link
        assert (tmp_path / "file").read_text() == text
    assert link.is_symlink()
    with pytest.raises(ConfigError, match="device' cannot be written: No space left on device; make room"):
        save_text(device, "new")
    with pytest.raises(ConfigError, match="'x' cannot be written: sorry; make"), writing(Path("x")):
        raise OSError("sorry")


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call, set[object]]]:
    """Name, call and constant arguments of each call below ``tree``."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            yield name, call, {one.value for one in call.args if isinstance(one, ast.Constant)}


def test_texts_are_written_by_the_one_function_and_read_in_a_named_encoding() -> None:
    writing, nameless = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for name, call, constants in calls(ast.parse(path.read_text(encoding="utf-8"))):
            if name == "write_text" or (name == "open" and constants & {"w", "wt", "x"}):
                writing.add(path.name)
            plain = name == "open" and isinstance(call.func, ast.Name)
            texts = name in ("read_text", "write_text") or (plain and not constants & {"rb", "wb"})
            if texts and not any(keyword.arg == "encoding" for keyword in call.keywords):
                nameless.add(f"{path.name}:{call.lineno}")
    assert writing == {"replacing.py"}
    assert not nameless


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
        save_text(tmp_path / "file", "text")
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
    save_text(tmp_path / "file", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".killed{SUFFIX}", "file"]


def test_nothing_is_overwritten_that_must_be_new(tmp_path: Path) -> None:
    tmp_path = tmp_path / "made"
    save_text(tmp_path / "file", "old", new=True)
    with pytest.raises(FileExistsError):
        save_text(tmp_path / "file", "new", new=True)
    with pytest.raises(UnicodeEncodeError):
        save_text(tmp_path / "other", "\ud800", new=True)
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_names_may_be_as_long_as_the_system_takes_them(tmp_path: Path) -> None:
    save_text(tmp_path / ("ä" * 127), "text")
    assert [path.name for path in tmp_path.iterdir()] == ["ä" * 127]
