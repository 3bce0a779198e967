"""Every shipped recipe: parsed, planned without weights, and trained on a scaled-down model of its architecture."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lt_offload.cli import recipes
from lt_offload.cli.main import main
from lt_offload.plan import check
from lt_offload.profiling.hardware import load_hardware
from lt_offload.resources import shipped_files, shipped_root
from lt_offload.schema.explain import brief
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.units import parse_bytes
from tests import sampling
from tests.support import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:Experiment logs directory.*"),
    pytest.mark.filterwarnings("ignore:(?s).*(Jsonargparse|was deprecated in v4).*:DeprecationWarning"),
]

NAMES = list(recipes.shipped())
EXPECTED = {
    "quickstart", "bloom-3b-12gb", "llama2-7b-12gb", "llama2-13b-24gb", "llama3-8b-12gb", "mistral-7b-12gb",
    "phi2-8gb", "phi3-mini-12gb",
}  # fmt: skip
ONE_OF_EACH = ("bloom-3b-12gb", "llama3-8b-12gb", "mistral-7b-12gb", "phi2-8gb", "phi3-mini-12gb")
"""One recipe for each architecture."""
SMALL = {
    "hidden_size": 64,
    "n_embed": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 259,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def header(name: str) -> list[str]:
    lines = recipes.shipped()[name].read_text().splitlines()
    return [line for line in lines if line.startswith("#")]


def settings(name: str, *, gpu: bool = False) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    files = recipes.chain(recipes.shipped()[name])
    for file in [*files, *(recipes.for_gpu(files) if gpu else [])]:
        merge(merged, yaml.safe_load(file.read_text()))
    return merged


def merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def test_the_recipes_are_there() -> None:
    assert set(NAMES) >= EXPECTED


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short_and_says_what_it_is_and_how_to_run_it(name: str) -> None:
    lines = recipes.shipped()[name].read_text().splitlines()
    assert len(lines) <= 30
    description, run, plan = header(name)[:3]
    assert 30 < len(description) < 120
    assert run.strip("# ").startswith(f"lt-finetune {name}")
    assert plan.strip("# ").startswith(f"lt-finetune plan {name}")
    memory = re.search(r"-(\d+)gb$", name)
    if memory:
        assert settings(name)["trainer"]["strategy"]["init_args"]["memory"] == f"{memory[1]}GB"


@pytest.mark.parametrize("name", NAMES)
def test_check_accepts_every_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", name]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(p.stem for p in (shipped_root() / "configs" / "data").glob("*.yaml")))
def test_check_accepts_every_piece_for_data(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: [configs/base.yaml, configs/data/{name}.yaml, configs/bf16.yaml, configs/lora.yaml]\n"
        "model: {name: some/model}\ndata: {path: some/data}\n"
    )
    assert main(["check", str(recipe)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", sampling.some(NAMES, 4))
def test_the_command_in_the_header_plans_the_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hardware = re.search(r"--hardware (\S+)", header(name)[2])
    assert hardware
    card = hardware[1]
    # The figures in the header are of plans that were searched for 30 s: a short search on a busy machine finds others.
    args = ["plan", name, "--hardware", card, "--save", "plan.json", "--trainer.strategy.solver_time_limit", "2"]
    # Where there is more RAM a short search may take it: a machine with the RAM of the header must be enough.
    promised = re.search(r"\(about (\d+) GB of RAM", header(name)[0])
    there = load_hardware(card).host_bytes
    host_bytes = min(1.1e9 * int(promised[1]), there) if promised else there
    args += ["--trainer.strategy.host_memory", str(int(host_bytes))]
    assert main(args) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    plan = Plan.load("plan.json")
    budget = parse_bytes(settings(name, gpu=True)["trainer"]["strategy"]["init_args"]["memory"])
    assert plan.budget_bytes == min(budget, load_hardware(card).device_bytes)
    assert plan.estimated
    assert plan.predicted.device_peak_bytes <= budget
    assert plan.predicted.host_peak_bytes <= host_bytes
    assert plan.batch_size == settings(name)["data"]["batch_size"]
    assert plan.sequence_length == settings(name)["data"]["max_length"]
    assert brief(plan) in captured.out
    simulated = re.search(r"Simulated there: ([\d.]+) s per iteration", header(name)[-1])
    assert simulated or name == "quickstart"
    if simulated:
        assert 0.85 * float(simulated[1]) <= plan.predicted.iteration_s <= 1.6 * float(simulated[1])
        assert plan.predicted.lower_bound_s <= 1.01 * float(simulated[1])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.tokenizer(tmp_path_factory.mktemp("tokenizer")))


VARIANTS = [(name, "full") for name in NAMES]
VARIANTS += sampling.grid(ONE_OF_EACH, ("lora", "bf16"))


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_a_scaled_down_model_trains_two_steps(
    name: str, variant: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    merged = settings(name)
    full = shipped_files("configs/models", ".json")[merged["model"]["architecture"]]
    values = json.loads(full.read_text())
    Path("small.json").write_text(json.dumps({k: SMALL.get(k, v) for k, v in values.items()}))
    rows = [{"instruction": f"Count to {n}.", "input": "", "output": "1 2 3"} for n in range(40)]
    Path("rows.json").write_text(json.dumps(rows))
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    data = "text.txt" if merged["data"].get("format", "text") == "text" else "rows.json"
    flags = {"full": [], "lora": ["--model.lora.r", "8"], "bf16": ["--model.dtype", "bfloat16"]}[variant]
    code = main(
        [
            name, *flags, "--model.init", "random", "--model.architecture", "small.json",
            "--data.tokenizer", tokenizer, "--data.path", data, "--data.max_length", "256", "--data.batch_size", "2",
            "--trainer.accelerator", "cpu", "--trainer.strategy.memory", "16MB", "--trainer.max_steps", "2",
            "--trainer.num_sanity_val_steps", "0", "--trainer.val_check_interval", "2",
            "--trainer.limit_val_batches", "1", "--trainer.default_root_dir", "run",
            "--trainer.strategy.solver_time_limit", "5",
        ]
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    with Path("run/metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    plan, profile = Plan.load("run/plan.json"), Profile.load("run/profile.json")
    assert check(plan, profile) == []
    assert profile.dtype == ("bfloat16" if variant == "bf16" else merged["model"]["dtype"])
    assert any(not tensor.trainable for tensor in profile.tensors) == (variant == "lora")
    assert {path.name for path in Path("run").iterdir()} >= {"config.yaml", "trace.json", "report.html", "checkpoints"}
