"""The public surface: which names there are, and what importing them costs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from types import ModuleType

import pytest

import lt_offload

PUBLIC = [
    "AdamW",
    "CheckpointError",
    "ConfigError",
    "ExactResume",
    "InfeasibleError",
    "ModelError",
    "OffloadError",
    "OffmateStrategy",
    "OverBudget",
    "Plan",
    "PlanError",
    "Profile",
    "Trace",
    "UnsupportedError",
    "offloaded",
    "profile",
    "profile_config",
    "simulate",
    "solve",
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
        "lt_offload._register",
        "lt_offload.errors",
    }


def test_planning_names_import_no_torch() -> None:
    loaded = python(
        "import sys, lt_offload; lt_offload.solve, lt_offload.Plan, lt_offload.simulate; print('torch' in sys.modules)"
    )
    assert loaded.strip() == "False"


def test_profile_is_package_and_function() -> None:
    types = importlib.import_module("lt_offload.profile.types")
    assert isinstance(lt_offload.profile, ModuleType)
    assert lt_offload.profile.types is types
    assert lt_offload.Profile is types.Profile
    with pytest.raises(TypeError, match="sample_batch"):
        lt_offload.profile(object())


@pytest.mark.parametrize(
    "code",
    [
        "import lt_offload.profile.types as t, lt_offload; print(callable(lt_offload.profile), t.Profile.__name__)",
        "from lt_offload import profile; print(callable(profile), profile.Profile.__name__)",
        "import lt_offload; print(callable(lt_offload.profile), lt_offload.profile.Profile.__name__)",
    ],
)
def test_profile_works_in_every_import_order(code: str) -> None:
    assert python(code).strip() == "True Profile"


def test_version_is_the_projects() -> None:
    from pathlib import Path

    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{lt_offload.__version__}"' in project
