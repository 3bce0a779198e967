"""What ``--help`` says is what the parser takes, and is said without importing anything slow."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from lt_offload import OffmateStrategy
from lt_offload.cli import recipes
from lt_offload.cli.app import App
from lt_offload.cli.main import main
from lt_offload.cli.static import pages
from lt_offload.cli.static import settings as static
from lt_offload.cli.static.pages import SETTINGS, entries, groups
from lt_offload.cli.static.settings import LINKED, lightning_version, parse, values
from lt_offload.cli.table import VERBS, Verb
from lt_offload.cli.verbs.check import check
from lt_offload.errors import ConfigError
from scripts.docs import help


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert main(args) == 0
    return capsys.readouterr().out


def test_the_pages_are_what_the_docstrings_say() -> None:
    made, stored = help.pages(), {name: pages.page(name) for name in help.pages()}
    if f"Lightning {lightning_version()}." not in groups()["trainer"]:  # whose docstrings are others then
        made[SETTINGS], stored[SETTINGS] = (
            text.partition("\ntrainer: ")[0] for text in (made[SETTINGS], stored[SETTINGS])
        )
    assert [name for name, text in made.items() if stored[name] != text] == [], "run python -m scripts.docs.help"


def test_settings_of_another_lightning_are_left_to_its_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    [described] = re.findall(r"Of Lightning ([\d.]+)\.\n", groups()["trainer"])
    monkeypatch.setattr(static, "lightning_version", lambda: described)
    unknown = ["--trainer.other_setting", "1"]
    with pytest.raises(ConfigError, match=r"unknown setting 'trainer\.other_setting'"):
        static.check([], unknown, VERBS["fit"])
    monkeypatch.setattr(static, "lightning_version", lambda: "2.5.9")
    static.check([], unknown, VERBS["fit"])
    with pytest.raises(ConfigError, match=r"unknown setting 'trainer\.strategy\.memry'"):
        static.check([], ["--trainer.strategy", "offmate", "--trainer.strategy.memry", "1"], VERBS["fit"])


def test_settings_are_the_parsers_own() -> None:
    files = recipes.chain(recipes.find("quickstart"))
    parser = App(check, files[-1], files, []).parser
    theirs = {action.dest for action in parser._actions if action.dest.split(".")[0] in ("model", "data", "trainer")}
    theirs = {key for key in theirs if not key.endswith((".help", "+"))} - {"model", "data", "trainer", *LINKED}
    own = {key for key in entries(SETTINGS) if not key.startswith(("trainer.strategy.", "model.lora"))}
    assert own == {key for key in theirs if not key.startswith("model.lora")}
    strategy = {key.rpartition(".")[2] for key in entries(SETTINGS) if key.startswith("trainer.strategy.")}
    assert strategy == set(inspect.signature(OffmateStrategy.__init__).parameters) - {"self"}


def test_every_setting_has_a_meaning() -> None:
    assert [key for key, entry in entries(SETTINGS).items() if not entry.about] == []


def test_the_program_names_every_verb_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--help")
    assert [name for name in VERBS if f"\n  {name} " not in text] == []
    for code in (0, 1, 2, 3, 130, 141, 143):
        assert f"\n  {code:>3}  " in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_the_help_of_a_verb_names_its_words_and_flags(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, verb.name, "--help")
    assert text.startswith("usage: lt-finetune ")
    parameters = inspect.signature(verb.load()).parameters.values()
    assert ("app" in {parameter.name for parameter in parameters}) == verb.recipe
    flags = [f"--{one.name}" for one in parameters if one.kind is one.KEYWORD_ONLY]
    words = [one.name.upper() for one in parameters if one.kind is not one.KEYWORD_ONLY and one.name != "app"]
    assert [name for name in (*flags, *words) if f"\n  {name}" not in text] == []
    assert text == said(capsys, "help", verb.name)


def test_the_help_of_a_recipe_has_every_setting_with_its_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text("base: recipes/quickstart.yaml\nmodel: {lr: 0.5}\ndata: {pack: false}\n")
    text = said(capsys, str(tmp_path / "own.yaml"), "--data.batch_size", "3", "--help")
    for line in (
        "--model.lr X = 0.5",
        "--data.pack true|false|wrapped = false",
        "--data.batch_size N = 3",
        "--trainer.strategy.memory TEXT|N|X|null = 430MB",
        "--trainer.strategy TEXT|OBJECT = lt_offload.OffmateStrategy",
        "--model.dtype float32|bfloat16 = float32",
        "--model.dropout X|null = null",
        "--print_config",
    ):
        assert f"  {line}\n" in text
    words = set(text.replace(",", " ").split())
    assert [key for key in entries(SETTINGS) if f"--{key}" not in words and key.rpartition(".")[2] not in words] == []


def test_groups_and_single_settings_are_explained_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "quickstart", "--model.lora.help")
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  --")] == [
        f"--{key}" for key in entries(SETTINGS) if key == "model.lora" or key.startswith("model.lora.")
    ]
    assert "rank of the adapters. Default: 8." in text
    assert "--model.lr X = 5e-05" in said(capsys, "quickstart", "--model.lr.help")
    text = said(capsys, "--data.help")
    assert text.startswith("Text or")
    assert "the data begin again. And validation_path" in " ".join(text.split()), "not the first sentence alone"
    assert main(["quickstart", "--modle.help"]) == 2
    assert "did you mean model" in capsys.readouterr().err
    for name in groups():
        assert said(capsys, f"--{name}.help")


def test_narrow_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = said(capsys, "quickstart", "--help")
    assert [line for line in text.splitlines() if len(line) > 60 and " = " not in line] == []


def test_values_of_the_last_file_and_the_last_flag_count(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("trainer: {strategy: {class_path: offmate, init_args: {memory: 1GB}}}\nmodel: {lora: {r: 4}}\n")
    second.write_text("trainer: {strategy: {init_args: {memory: 2GB}}}\n")
    found = values([first, second], ["--model.lora.r=2", "--data.pack", "false"])
    assert found == {
        "trainer.strategy": "offmate",
        "trainer.strategy.memory": "2GB",
        "model.lora.r": 2,
        "data.pack": False,
    }


# -- words and flags of verbs without a recipe -----------------------------------------------------------------------


def test_words_and_flags_may_be_mixed() -> None:
    line = ["llama3-8b", "--memory=3GB", "--method", "lora", "--data", "-x"]
    assert parse(VERBS["new"], line) == (["llama3-8b"], {"memory": "3GB", "method": "lora", "data": "-x"})
    assert parse(VERBS["cp"], ["a", "b"]) == parse(VERBS["compare"], ["a", "b"]) == (["a", "b"], {})
    assert parse(VERBS["ls"], ["--json"]) == ([], {"json": True})
    assert parse(VERBS["ls"], ["--json", "false"]) == ([], {"json": False})


@pytest.mark.parametrize(
    ("verb", "line", "message"),
    [
        ("new", "", "new needs MODEL: lt-finetune new MODEL"),
        ("new", "a --memory", "--memory needs a value"),
        ("new", "a --memory --data", "--memory needs a value"),
        ("new", "a --memry 1", "unknown flag --memry; did you mean --memory?"),
        ("new", "a --method loar", "--method='loar' is none of its values; did you mean lora or qlora?"),
        ("new", "a --method zzz", "choose auto, full"),
        ("ls", "--json maybe", "ls: maybe is one word too many"),
    ],
)
def test_mistakes_in_words_and_flags(verb: str, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(VERBS[verb], line.split())
    assert message in str(error.value)
