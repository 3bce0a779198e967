"""What ``--help`` says is what the parser takes, and is said without importing anything slow."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lt_offload import OffmateStrategy
from lt_offload.cli import recipes
from lt_offload.cli.app import App
from lt_offload.cli.main import main
from lt_offload.cli.static import help
from lt_offload.cli.static.arguments import parse, usage
from lt_offload.cli.static.definitions import FILE, LIGHTNING, as_file, definition, lightning_version
from lt_offload.cli.static.documented import Documented, Parameter
from lt_offload.cli.static.settings import _LINKED, GROUPS, settings, values
from lt_offload.cli.static.source import arguments, read_definition
from lt_offload.cli.table import VERBS
from lt_offload.cli.verbs.check import check
from lt_offload.errors import ConfigError
from scripts.docs import definitions


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert main(args) == 0
    return capsys.readouterr().out


def test_settings_are_the_parsers_own() -> None:
    files = recipes.chain(recipes.find("quickstart"))
    parser = App(check, files[-1], files, []).parser
    theirs = {action.dest for action in parser._actions if action.dest.split(".")[0] in ("model", "data", "trainer")}
    theirs = {key for key in theirs if not key.endswith((".help", "+"))} - {"model", "data", "trainer", *_LINKED}
    own = {key for key in settings() if not key.startswith("trainer.strategy.")}
    groups = {key for key, setting in settings().items() if setting.parameter.group is not None}
    assert {key for key in own if not any(key.startswith(f"{name}.") for name in groups)} - groups == theirs - groups
    strategy = {key.rpartition(".")[2] for key in settings() if key.startswith("trainer.strategy.")}
    assert strategy == set(inspect.signature(OffmateStrategy.__init__).parameters) - {"self"}


def test_every_setting_of_ours_has_a_meaning() -> None:
    missing = [key for key, setting in settings().items() if not setting.parameter.about]
    assert missing == []


def test_verbs_are_functions_with_a_docstring_and_flags_with_a_meaning() -> None:
    for verb in VERBS.values():
        found = verb.read()
        parameters = inspect.signature(verb.load()).parameters
        assert [parameter.name for parameter in found.parameters] == [name for name in parameters if name != "app"]
        assert ("app" in parameters) == verb.recipe
        assert found.summary
        assert [parameter.name for parameter in found.parameters if not parameter.about] == []


def test_the_program_names_every_verb_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--help")
    assert [name for name in VERBS if f"\n  {name} " not in text] == []
    for code in (0, 1, 2, 130, 141, 143):
        assert f"\n  {code:>3}  " in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_the_help_of_a_verb_names_its_flags(verb: object, capsys: pytest.CaptureFixture[str]) -> None:
    verb = VERBS[verb.name]  # type: ignore[attr-defined]
    text = said(capsys, verb.name, "--help")
    assert text.startswith("usage: lt-finetune ")
    assert [p.name for p in verb.read().parameters if p.kind == "flag" and f"\n  --{p.name}" not in text] == []
    assert text == said(capsys, "help", verb.name)


def test_the_help_of_a_recipe_has_every_setting_with_its_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text("base: recipes/quickstart.yaml\nmodel: {lr: 0.5}\ndata: {pack: false}\n")
    text = said(capsys, str(tmp_path / "own.yaml"), "--data.batch_size", "3", "--help")
    for line in (
        "--model.lr = 0.5",
        "--data.pack = false",
        "--data.batch_size = 3",
        "--trainer.strategy.memory = 430MB",
        "--trainer.strategy = lt_offload.OffmateStrategy",
        "--model.dtype {float32,bfloat16} = float32",
        "--model.dropout = null",
    ):
        assert f"  {line}\n" in text
    words = set(text.replace(",", " ").split())
    assert [key for key in settings() if f"--{key}" not in words and key.rpartition(".")[2] not in words] == []


def test_groups_and_single_settings_are_explained_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "quickstart", "--model.lora.help")
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  --")] == [
        key for key in (f"--{key}" for key in settings()) if key == "--model.lora" or key.startswith("--model.lora.")
    ]
    assert "rank of the adapters. Default: 8." in text
    assert "--model.lr = 5e-05" in said(capsys, "quickstart", "--model.lr.help")
    assert said(capsys, "--data.help").startswith("Text or")
    assert main(["quickstart", "--modle.help"]) == 2
    assert "did you mean model" in capsys.readouterr().err
    for name in GROUPS:
        assert help.of_group(name, [])


def test_narrow_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = said(capsys, "quickstart", "--help")
    assert [line for line in text.splitlines() if len(line) > 60 and " = " not in line] == []


# -- the file of definitions ------------------------------------------------------------------------------------------


def test_the_file_is_what_the_docstrings_say() -> None:
    stored, made = json.loads(FILE.read_text()), json.loads(definitions.text())
    if stored[LIGHTNING] != made[LIGHTNING]:  # its source is read then
        stored, made = ({k: v for k, v in found.items() if not k.startswith(LIGHTNING)} for found in (stored, made))
    assert stored == made, "run python -m scripts.docs.definitions"


def test_lightning_of_another_version_is_read_from_its_source(tmp_path: Path) -> None:
    where, file = GROUPS["trainer"], tmp_path / "definitions.json"
    empty = Documented(name="Trainer", summary="", details="", parameters=())
    file.write_text(as_file({where: empty}))
    assert definition(*where, file) == empty
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(file.read_text()) | {LIGHTNING: "0.1"}))
    assert definition(*where, other) == read_definition(*where)


def test_help_parses_no_source() -> None:
    code = (
        "import sys\n"
        "from lt_offload.cli.main import main\n"
        "assert main(['quickstart', '--help']) == main(['plan', '--help']) == 0\n"
        "assert 'lt_offload.cli.static.source' not in sys.modules or sys.argv[1:] == ['other']\n"
    )
    file = json.loads(FILE.read_text())
    other = [] if lightning_version() == file[LIGHTNING] else ["other"]
    subprocess.run([sys.executable, "-c", code, *other], check=True, stdout=subprocess.DEVNULL)


# -- reading source --------------------------------------------------------------------------------------------------


def test_meanings_of_arguments() -> None:
    text = (
        "One.\n\nArgs:\n    a: the first: with\n        a second line.\n    b (int): second.\n\nReturns:\n    c: no.\n"
    )
    assert arguments(text) == {"a": "the first: with a second line.", "b": "second."}
    assert arguments("Nothing.") == {}


def test_types_are_spelled_out_and_groups_followed() -> None:
    module = read_definition("lt_offload.finetune.module", "FineTune")
    found = {parameter.name: parameter for parameter in module.parameters}
    assert found["init"].choices == ["pretrained", "random"]
    assert found["name"].required
    assert found["lora"].group is not None
    with pytest.raises(LookupError, match="defines no Nothing"):
        read_definition("lt_offload.finetune.module", "Nothing")
    with pytest.raises(LookupError):
        read_definition("no_such_package.module", "Nothing")


def test_values_of_the_last_file_and_the_last_flag_count(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("trainer: {strategy: {class_path: offmate, init_args: {memory: 1GB}}}\nmodel: {lora: {r: 4}}\n")
    second.write_text("trainer: {strategy: {init_args: {memory: 2GB}}}\n")
    found = values([first, second], ["--model.lora.r=2", "--data.pack", "false", "--resume"])
    assert found == {
        "trainer.strategy": "offmate",
        "trainer.strategy.memory": "2GB",
        "model.lora.r": 2,
        "data.pack": False,
    }


# -- words and flags of verbs without a recipe -----------------------------------------------------------------------


def parameter(name: str, kind: str, annotation: str, default: str | None) -> Parameter:
    return Parameter(name, kind, annotation, default, "")


VERB = Documented(
    "make",
    "",
    "",
    (
        parameter("model", "word", "str", None),
        parameter("rest", "words", "str", None),
        parameter("memory", "flag", "str", None),
        parameter("count", "flag", "int | None", "None"),
        parameter("ratio", "flag", "float", "0.5"),
        parameter("fast", "flag", "bool", "False"),
        parameter("kind", "flag", "Literal['full', 'lora'] | None", "None"),
        parameter("also", "flag", "list[str] | None", "None"),
    ),
)


def test_flags_have_the_types_of_the_signature() -> None:
    line = "a b --memory 3GB --count=2 --ratio 1e-3 --fast c --kind lora --also x --also y"
    words, flags = parse(VERB, line.split())
    assert words == ["a", "b", "c"]
    assert flags == {"memory": "3GB", "count": 2, "ratio": 1e-3, "fast": True, "kind": "lora", "also": ["x", "y"]}
    assert parse(VERB, ["a", "--memory", "1", "--fast", "false"]) == (["a"], {"memory": "1", "fast": False})
    assert usage(VERB) == (
        "lt-finetune make MODEL REST ... --memory MEMORY [--count N] [--ratio X] [--fast] [--kind full|lora] "
        "[--also ALSO]"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "make needs --memory and MODEL: lt-finetune make MODEL"),
        ("a --memory", "--memory needs a value"),
        ("a --memory --fast", "--memory needs a value"),
        ("a --memry 1", "unknown flag --memry; did you mean --memory?"),
        ("a --memory 1 --count two", "--count='two' is not of type int"),
        ("a --memory 1 --fast=maybe", "--fast='maybe' is not of type bool"),
        ("a --memory 1 --kind loar", "--kind='loar' is none of its values; did you mean lora?"),
        ("a --memory 1 --kind zzz", "choose full, lora"),
    ],
)
def test_mistakes_in_words_and_flags(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(VERB, line.split())
    assert message in str(error.value)
