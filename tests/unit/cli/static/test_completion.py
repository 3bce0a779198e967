"""Completion: what the static tables answer, and that bash's own machinery gets it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lt_offload.cli import recipes
from lt_offload.cli.main import main
from lt_offload.cli.static.completion import FILES, answers
from lt_offload.cli.static.pages import SETTINGS, entries
from lt_offload.cli.table import VERBS

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gen", ["generate", FILES]),
        ("--q", ["--quiet"]),
        ("quickst", ["quickstart", FILES]),
        ("plan phi2", ["phi2-8gb", FILES]),
        ("plan quickstart --mem", ["--memory"]),
        ("quickstart --model.lora.d", ["--model.lora.dropout", "--model.lora.dora"]),
        ("quickstart --res", ["--resume"]),
        ("quickstart --model.dtype ", ["float32", "bfloat16"]),
        ("quickstart --data.pack ", ["true", "false", "wrapped"]),
        ("quickstart --model.dtype=b", ["--model.dtype=bfloat16"]),
        ("quickstart --model.compile_blocks t", ["true"]),
        ("quickstart --data.path ", [FILES]),
        ("quickstart --data.path=", [FILES]),
        ("plan quickstart --hardware rtx-3060-", ["rtx-3060-12gb"]),
        ("quickstart --trainer.strategy.planner off", ["offmate"]),
        ("cp quick", ["quickstart", FILES]),
        ("cp quickstart ", [FILES]),
        ("doctor --", ["--save", "--help"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("help pl", ["plan"]),
        ("quickstart --no.such ", [FILES]),
    ],
)
def test_what_a_word_can_become(line: str, expected: list[str]) -> None:
    assert answers(line.split(" ")) == expected


@pytest.mark.parametrize("flag", ["--resume", "--explain", "--quiet", "--wandb"])
def test_other_flags_follow_one_that_needs_no_value(flag: str) -> None:
    assert {"--resume", "--model.lr"} <= set(answers(["quickstart", flag, ""]))


def test_everything_can_be_completed() -> None:
    assert {*VERBS, *recipes.shipped()} <= set(answers([""]))
    assert {f"--{key}" for key in entries(SETTINGS)} <= set(answers(["quickstart", "--"]))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Defines the program and its completion, as a shell's start-up file would."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "lt-finetune"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lt_offload.cli.main "$@"\n')
    program.chmod(0o755)
    return f'export PATH={folder}:$PATH PYTHONPATH={ROOT}; eval "$(lt-finetune completion bash)"'


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(script: str, tmp_path: Path) -> None:
    """The function that is registered, called as bash does: words split at = as well."""
    (tmp_path / "mine.yaml").touch()
    cases = [
        ("valid", "validate "),
        ("mine", "mine.yaml "),
        ("quickstart --model.lora.target_m", "--model.lora.target_modules "),
        ("quickstart --model.dtype=bf", "bfloat16 "),
        ("quickstart --model.dtype bf", "bfloat16 "),
        ("quickstart --data.path mi", "mine.yaml "),
        ("quickstart --data.path=mi", "mine.yaml "),
        ("quickstart --model.compile_blocks=", "true false"),
    ]
    lines = [script, "complete -p lt-finetune"]
    for line, _ in cases:
        typed = f"lt-finetune {line}"
        lines.append(f"COMP_LINE='{typed}'; COMP_POINT={len(typed)}; _python_argcomplete lt-finetune")
        lines.append('echo "${COMPREPLY[@]}"')
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ), check=True,
    )  # fmt: skip
    first, *told = done.stdout.splitlines()
    assert first.endswith("-F _python_argcomplete lt-finetune")
    assert [line.strip() for line in told] == [expected.strip() for _, expected in cases]


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_what_their_shell_can_read(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "lt-finetune" in text
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
    assert main(["completion", "csh"]) == 2
    assert "SHELL='csh' is none of its values; did you mean zsh" in capsys.readouterr().err
