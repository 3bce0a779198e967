"""What is written beside a file or a folder, and takes its place at the end or never."""

from __future__ import annotations

from pathlib import Path

import pytest

from lt_offload.replacing import replacing


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
