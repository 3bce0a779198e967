"""The README is short and true: two commands, tables that are what the code says, links that lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from lt_offload.cli import recipes
from lt_offload.plan.settings import PLANNERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLANNERS_PAGE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) for line in block.splitlines()]


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_a_fresh_machine_takes_two_commands() -> None:
    assert COMMANDS[:2] == ["make quickstart", "make test"]
    assert [command for command in COMMANDS if not command.startswith("lt-finetune")] == COMMANDS[:2]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in COMMANDS[:2]:
        assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.MULTILINE)


def test_what_is_shown_is_installed() -> None:
    """Adapters are trained with peft; the quickstart's extra brings it, and no other command asks for an extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert any("--model.lora" in command for command in COMMANDS)
    assert "lt-offload[lora]" in extras["quickstart"]
    assert not any("nf4" in command or "qlora" in command or "wandb" in command for command in COMMANDS)


def test_there_is_code_for_every_way_in() -> None:
    assert len(re.findall(r"^```python$", README, flags=re.MULTILINE)) == 3


def table(text: str, first_column: str) -> dict[str, str]:
    """The last column of a table whose first one holds code, by that."""
    rows = text.partition(f"| {first_column} |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `([\w-]+)` \| [^|]* \| ([^|]+) \|$", rows, flags=re.MULTILINE))


def test_every_planner_is_listed() -> None:
    assert set(table(PLANNERS_PAGE, "planner")) == set(PLANNERS) - {"auto"}


def test_recipes_are_listed_with_their_budgets() -> None:
    rows = table(README, "recipe")
    assert "quickstart" in rows
    for name, budget in rows.items():
        text = recipes.shipped()[name].read_text(encoding="utf-8")
        assert re.search(rf"memory: {budget.split()[0]}\s?{budget.split()[1]}\b", text)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https://)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
