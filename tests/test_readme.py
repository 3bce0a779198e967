"""The README is true: its commands exist, its code runs (on a tiny model), its tables are what the code says."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload import limits
from lt_offload.cli import recipes
from lt_offload.cli.main import main
from lt_offload.cli.table import VERBS
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.plan.settings import PLANNERS
from tests.support import models, tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) for line in block.splitlines()]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*tensorboardX.*", "ignore:.*smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:(?s).*(Jsonargparse|was deprecated in v4).*:DeprecationWarning"),
]


def test_a_fresh_machine_takes_two_commands() -> None:
    assert COMMANDS[:2] == ["make quickstart", "make test"]
    assert [command for command in COMMANDS if not command.startswith("lt-finetune")] == COMMANDS[:2]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in COMMANDS[:2]:
        assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("lt-finetune")])
def test_commands_are_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run what takes no time; check the settings of what does."""
    monkeypatch.chdir(tmp_path)
    Path("my.json").write_text("[]")
    args = shlex.split(command)[1:]
    if args[0] not in ("ls", "cp", "check"):
        options = {"plan": ["--hardware", "--report", "--memory", "--sweep", "--save"]}.get(args[0], [])
        args = [arg for arg in args if arg not in (*VERBS, "--resume")]
        for option in options:
            if option in args:
                del args[args.index(option) : args.index(option) + 2]
        args = ["check", *args]
    elif args[0] == "check":
        main(["cp", "llama2-7b-12gb", args[1]])
    assert main(args) == 0, capsys.readouterr().err


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """What the snippets take for granted."""
    folder = tiny.model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    model = models.build()
    return {
        "module": FineTune(str(folder)),
        "datamodule": FineTuneData(str(folder), path=str(tmp_path / "text.txt"), max_length=32, batch_size=2),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        "batches": [models.batch(model, seed=seed) for seed in (0, 0, 0)],
    }


@pytest.mark.parametrize("code", CODE, ids=[f"snippet{index}" for index in range(len(CODE))])
def test_code_runs(code: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = names["model"](**names["batches"][0]).loss.item()
    exec(compile(code, "README.md", "exec"), names)
    if "trainer" in names:
        assert names["trainer"].global_step == 10
    elif "plan" in names:
        assert names["plan"].predicted.device_peak_bytes <= 6e9
    else:
        assert names["model"](**names["batches"][0]).loss.item() < before


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ([\w.]+)", README))))
def test_programs_that_made_the_numbers_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


def test_there_is_code_for_every_way_in() -> None:
    assert len(CODE) == 4


def test_what_is_not_supported_is_the_table_of_limits() -> None:
    table = README.partition("<!-- limits -->\n")[2].partition("\n<!-- /limits -->")[0]
    assert table == limits.markdown()


def table(first_column: str) -> dict[str, str]:
    """The last column of a table whose first one holds code, by that."""
    rows = README.partition(f"| {first_column} |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `([\w-]+)` \| [^|]* \| ([^|]+) \|$", rows, flags=re.MULTILINE))


def test_every_planner_is_listed() -> None:
    assert set(table("planner")) == set(PLANNERS) - {"auto"}


def test_every_recipe_is_listed_with_its_budget() -> None:
    rows = table("recipe")
    assert set(rows) == set(recipes.shipped())
    for name, budget in rows.items():
        text = recipes.shipped()[name].read_text(encoding="utf-8")
        assert re.search(rf"memory: {budget.split()[0]}\s?{budget.split()[1]}\b", text)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
