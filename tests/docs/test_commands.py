"""The commands of the documentation are those of the command line, and its YAML is recipes."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from lt_offload.cli import recipes
from lt_offload.cli.app import App
from lt_offload.cli.main import main
from lt_offload.cli.static.settings import parse
from lt_offload.cli.table import VERBS, Verb
from tests.docs import pages

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tensorboardX.*"),
]

COMMANDS = {command: where for where, command in pages.commands()}
MAKEFILE = (pages.ROOT / "Makefile").read_text(encoding="utf-8")
CONSTRAINED = ("pip install", "cd ")
"""Other commands that a page may have; nothing is installed by a test."""
LAUNCHERS = ("torchrun ", "srun ", "MASTER_ADDR=")
"""What starts the processes of several machines; only the arguments of the first can be read here."""


def starting(*words: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(words)]


def test_blocks_have_a_language_and_only_known_ones() -> None:
    for page in pages.PAGES:
        fences = len(re.findall(r"^ *```", pages.read(page), flags=re.MULTILINE))
        assert fences == 2 * sum(block.page == page for block in pages.blocks()), page
    assert {block.language for block in pages.blocks()} <= set(pages.LANGUAGES)


def test_commands_are_of_known_kinds() -> None:
    known = set(starting("lt-finetune ", "make ", "python -m ", "python docs/", *CONSTRAINED, *LAUNCHERS))
    assert [f"{where}: {command}" for command, where in COMMANDS.items() if command not in known] == []


def test_torchrun_knows_its_options() -> None:
    commands = starting("torchrun ")
    assert commands
    for command in commands:
        read = get_args_parser().parse_args(shlex.split(command)[1:])
        assert read.training_script == "train.py"


def test_warnings_of_the_site_are_errors() -> None:
    (recipe,) = re.findall(r"^docs:.*\n\t(.*)", MAKEFILE, flags=re.MULTILINE)
    assert "mkdocs build --strict" in recipe
    assert "quiet" not in recipe, "mkdocs counts only warnings that it shows"


def test_targets_and_programs_are_there() -> None:
    for command in starting("make "):
        targets = [word for word in command.split()[1:] if "=" not in word]
        assert all(re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE) for target in targets), command
    for page in pages.PAGES:
        for program in re.findall(r"python (docs/\S+)", pages.read(page)):
            assert (pages.ROOT / program).is_file(), f"{page}: {program}"
        for module in re.findall(r"python -m (scripts[\w.]*)", pages.read(page)):
            assert importlib.util.find_spec(module) is not None, f"{page}: {module}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what commands name."""
    monkeypatch.chdir(tmp_path)
    for name in ("my.json", "my.jsonl"):
        Path(name).write_text("[]")
    main(["cp", "llama2-7b-12gb", "mine.yaml"])
    run = Path("runs") / "llama2-7b-12gb-20260101-120000"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(Path("mine.yaml").read_text())
    return tmp_path


@pytest.mark.parametrize("command", starting("lt-finetune "))
def test_settings_and_verbs_are_accepted(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parse what takes time, run what takes none."""
    words = [word for word in shlex.split(command)[1:] if word not in ("--quiet", "--debug")]
    if words[-1].endswith(("--help", ".help", "--version")):
        assert main(words) == 0, capsys.readouterr().err
        return
    verb = VERBS[words[0] if words[0] in VERBS else "fit"]
    if verb.recipe:
        accept(verb, words[words[0] == verb.name :])
    else:
        parse(verb, words[1:])
    if verb.name in ("ls", "cp"):
        assert main([word.replace("mine.yaml", "other.yaml") for word in words]) == 0, capsys.readouterr().err


def accept(verb: Verb, words: list[str]) -> None:
    """Parse a command as the program does; raises if a setting is unknown or of the wrong type."""
    files = recipes.chain(recipes.find(words[0]))
    flags = [word for word in words[1:] if word not in ("--resume", "--help", "--print_config")]
    App(verb.load(), files[-1], files, flags)


@pytest.mark.parametrize("block", pages.blocks("yaml"), ids=str)
def test_yaml_is_a_recipe_or_part_of_one(block: pages.Block, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = folder / "part.yaml"
    part.write_text(block.text)
    given = yaml.safe_load(block.text)
    whole = folder / "whole.yaml"
    whole.write_text("base: [mine.yaml, part.yaml]\n" if "model" not in given or "base" not in given else block.text)
    assert main(["check", str(whole)]) == 0, capsys.readouterr().err
