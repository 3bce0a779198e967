"""What the documentation lists is what the package has: settings, public names, messages of errors."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lt_offload
from lt_offload.cli import recipes
from lt_offload.cli.app import App
from lt_offload.cli.table import VERBS
from lt_offload.cli.verbs.fit import fit
from lt_offload.strategy.lightning import OffmateStrategy
from scripts.docs import hooks
from scripts.docs.keys import keys
from tests.docs import pages


@cache
def settings() -> str:
    return hooks.on_page_markdown(pages.read("docs/reference.md"))


def test_every_key_of_a_recipe_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = recipes.chain(recipes.find("quickstart"))
    app = App(fit, files[-1], files, ["--model.lora.r", "8"])
    flags = {action.dest for action in app.parser._actions}
    for option in app.parser._option_string_actions:
        flags.add(option.lstrip("-").removesuffix("+"))
    wanted = {name for name in flags if name.startswith(("model.", "data."))}
    wanted = {name for name in wanted if not name.endswith((".help", ".config")) and name != "data.model"}
    assert len(wanted) > 30
    assert {name for name in wanted if f"{{#{name} .key}}" not in settings()} == set()


def test_every_option_of_the_strategy_is_explained() -> None:
    names = [key.key for key in keys("lt_offload.strategy.offmate.OffmateStrategy", "trainer.strategy.")]
    assert len(names) > 10
    assert "trainer.strategy.memory" in names
    for name in names:
        assert f"{{#{name} .key}}" in settings()
    given = {f"trainer.strategy.{name}" for name in inspect.signature(OffmateStrategy).parameters}
    assert set(names) == given


def test_a_parameter_without_a_word_is_an_error() -> None:
    with pytest.raises(ValueError, match="undocumented has no word about value"):
        keys(f"{__name__}.undocumented", "x.")


def undocumented(value: int) -> None:
    """Do nothing.

    Args:
    """


@pytest.mark.parametrize("page", pages.PAGES)
def test_keys_that_a_page_names_are_keys(page: str) -> None:
    text = re.sub(r"^### `.*", "", pages.read(page), flags=re.MULTILINE)  # messages of errors
    named = set(re.findall(r"`(?:--)?((?:model|data|trainer\.strategy)\.[a-z_.]*[a-z])\b(?![(.])", text))
    known = set(re.findall(r"\{#([\w.]+) \.key\}", settings())) | {"trainer.strategy.init_args"}
    assert named - known == set()


def test_every_recipe_is_in_the_table() -> None:
    shown = hooks.on_page_markdown(pages.read("docs/recipes.md"))
    assert {name for name in recipes.shipped() if f"| `{name}` | " not in shown} == set()


def test_every_verb_is_explained() -> None:
    shown = hooks.on_page_markdown(pages.read("docs/reference.md"))
    assert {name for name in VERBS if f"{{#{name}}}" not in shown} == set()


def test_every_public_name_is_in_the_reference() -> None:
    shown = re.findall(r"^::: lt_offload\.(\w+)$", pages.read("docs/reference.md"), flags=re.MULTILINE)
    assert sorted(shown) == sorted(lt_offload.__all__)


ASKED = ("12 GB and 32 GB of RAM", "Windows", "WSL2", "ROCm", "macOS", "MPS", "Fabric", "Several GPUs", "8-bit")
OTHERS = ("Unsloth", "DeepSpeed", "FSDP", "TRL", "LLaMA-Factory", "axolotl")


def test_what_people_ask_is_answered_where_they_look() -> None:
    page = pages.read("docs/faq.md")
    assert [word for word in (*ASKED, *OTHERS) if word not in page] == []
    better = page.partition("## Where another tool is the better choice")[2]
    assert not re.search(r"\d+(\.\d+)? ?(%|x\b|GB|times)", better), "no figure that no script of ours made"
    assert "**Simulated**" in page
    for where in ("README.md", "docs/index.md"):
        assert re.search(r"\]\((docs/)?faq\.md\)", pages.read(where)), where
    assert "- faq.md" in (pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8")


# -- messages ---------------------------------------------------------------------------------------------------------


@cache
def messages() -> str:
    """Every string of the package, one per line, with … where a value goes."""
    found = []
    for path in sorted((pages.ROOT / "lt_offload").rglob("*.py")):
        found += [" ".join(text.split()) for text in _strings(ast.parse(path.read_text(encoding="utf-8")))]
    return "\n".join(found)


def _strings(tree: ast.AST) -> Iterator[str]:
    """Every string but docstrings, those with values in them first."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


QUOTED = re.findall(r"^### `([^`]+)`", pages.read("docs/troubleshooting.md"), flags=re.MULTILINE)


def test_the_page_quotes_messages() -> None:
    assert len(QUOTED) >= 20
    assert min(map(len, QUOTED)) >= 15, "a word or two would be found anywhere"


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_package(message: str) -> None:
    assert message in messages()


def test_no_row_of_the_exit_codes_has_more_cells_than_its_head() -> None:
    rows = [row.replace(r"\|", "") for row in hooks.exit_codes().splitlines()]
    assert len(rows) > 6
    assert {row.count("|") for row in rows} == {3}
