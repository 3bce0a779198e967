"""The public surface: which names there are, and what importing them costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lt_offload

PUBLIC = [
    "AdamW",
    "CheckpointError",
    "ConfigError",
    "ExactResume",
    "InfeasibleError",
    "ModelError",
    "OffloadError",
    "OffloadedTrainerMixin",
    "OffmateStrategy",
    "OverBudget",
    "Plan",
    "PlanError",
    "Profile",
    "Trace",
    "UnsupportedError",
    "accelerated",
    "chunked_loss_reference",
    "hf_trainer",
    "micro_batched_reference",
    "offloaded",
    "open_weights",
    "profile",
    "profile_config",
    "simulate",
    "solve",
    "store_weights",
    "tile_tokens",
]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_all_is_pinned() -> None:
    assert lt_offload.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(lt_offload))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads_and_is_documented(name: str) -> None:
    value = getattr(lt_offload, name)
    assert callable(value)
    assert value.__doc__


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="lt_offload.*no attribute 'stretch'"):
        lt_offload.stretch  # noqa: B018


def test_import_is_light() -> None:
    heavy = ("torch", "numpy", "pydantic", "lightning", "pytorch_lightning", "transformers", "pulp", "rich", "yaml")
    loaded = json.loads(python("import lt_offload, json, sys; print(json.dumps(sorted(sys.modules)))"))
    assert not set(heavy) & set(loaded)
    assert {name for name in loaded if name.startswith("lt_offload")} == {
        "lt_offload",
        "lt_offload.strategy",
        "lt_offload.strategy.namespaces",
        "lt_offload.strategy.register",
        "lt_offload.errors",
    }


def test_planning_names_import_no_torch() -> None:
    loaded = python(
        "import sys, lt_offload; lt_offload.solve, lt_offload.Plan, lt_offload.simulate; print('torch' in sys.modules)"
    )
    assert loaded.strip() == "False"


def test_profile_is_a_function() -> None:
    with pytest.raises(TypeError, match="sample_batch"):
        lt_offload.profile(object())  # type: ignore[call-arg]


def test_version_is_the_projects() -> None:
    from pathlib import Path

    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{lt_offload.__version__}"' in project


def test_releases_of_attackers_are_never_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]])
    of_lightning = [each for each in wanted if each.name in ("lightning", "pytorch-lightning")]
    assert len(of_lightning) == 2
    for each in of_lightning:
        assert [v for v in ("2.6.1", "2.6.2", "2.6.3", "2.6.4") if v in each.specifier] == ["2.6.1", "2.6.4"]


def test_the_table_of_versions_is_the_projects() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        each.name: each.specifier
        for each in map(Requirement, [*project["dependencies"], *extras["lora"], *extras["bnb"]])
    }
    kept = dict(line.split("==") for line in (root / "constraints.txt").read_text().splitlines() if "==" in line)
    table = (root / "docs" / "index.md").read_text().partition("| | Python |")[2].splitlines()
    names, (oldest, ours) = _cells(table[0]), map(_cells, table[2:4])
    assert project["requires-python"] == f">={oldest[1]}"
    for name, least, version in zip(names, oldest[2:], ours[2:], strict=True):
        assert f">={least}" in str(wanted[name]).split(",")
        assert kept[name] == version


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_extra_of_the_documentation_has_what_breaks_the_lines_of_signatures() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert "ruff" in [Requirement(text).name for text in project["optional-dependencies"]["docs"]]


FIT = """
import json, sys
import lightning.pytorch as L, torch, lt_offload
from torch import nn

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = L.Trainer(strategy=lt_offload.OffmateStrategy(memory="1MB"), accelerator="cpu", max_epochs=1, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(2, 8)))
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.long
def test_what_serves_the_trainers_of_transformers_is_not_loaded_by_lightnings() -> None:
    loaded = json.loads(python(FIT).splitlines()[-1])
    assert "lt_offload.strategy.offmate" in loaded
    foreign = {"lt_offload.hf", "transformers.trainer", "trl", "accelerate", "peft"}
    assert foreign.isdisjoint(loaded)
