"""Runs ``lt-finetune`` in the tests' own process."""

from __future__ import annotations

import pytest

from lt_offload.cli.main import main


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the error line of a command that must fail on account of its user."""
    capsys.readouterr()
    assert main(args) == 2
    captured = capsys.readouterr().err
    assert "Traceback" not in captured
    [line] = [line for line in captured.splitlines() if line.startswith("error: ")]
    return line
