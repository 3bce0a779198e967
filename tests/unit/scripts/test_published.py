"""What published tables say of where they are from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import common


def test_the_commit_says_whether_the_package_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *args], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "lt_offload").mkdir()
    git("init")
    git("commit", "--allow-empty", "--message", "first")
    (tmp_path / "notes.txt").write_text("not planned with")
    clean = common.now()
    (tmp_path / "lt_offload" / "solve.py").write_text("x = 1\n")
    assert common.now()["commit"] == f"{clean['commit']}-dirty"
    assert common.when(clean) == f"{clean['date']} at commit {clean['commit']}"
