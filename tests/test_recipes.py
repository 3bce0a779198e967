"""Every shipped recipe: parsed, planned without weights, and trained on a scaled-down model of its architecture."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from lt_offload.cli import recipes
from lt_offload.cli.main import main
from lt_offload.plan import check
from lt_offload.profiling.from_config import load_model_config
from lt_offload.resources import shipped_files, shipped_root
from lt_offload.schema.explain import brief
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.units import parse_bytes
from scripts.common import RESULTS, read_json
from scripts.recipes import headers
from tests import sampling
from tests.support import tiny

NAMES = list(recipes.shipped())
PLANNED = headers.with_plans()
FIGURES = read_json(RESULTS / "recipes.json")["figures"]
PARAMETERS = {
    "bloom-3b": 3_002_557_440,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "gemma4-12b": 11_959_730_224 - 48,
    "gemma4-e2b": 5_123_178_979 - 963 - 18_880_512,
    "gemma4-e4b": 7_996_157_418 - 970 - 55_055_616,
    "gpt-oss-20b": 20_914_757_184,
    "llama2-13b": 13_015_864_320,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "olmoe-1b-7b": 6_919_161_856,
    "phi2": 2_779_683_840,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "phi4-mini": 3_836_021_760,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm3-3b": 3_075_098_624,
    "tinyllama-1.1b": 1_100_048_384,
}
"""What the models' pages on the hub say. Those of Gemma 4 count buffers of one number, and keys and values of layers
that take those of others."""
SMALL = {
    "hidden_size": 64,
    "n_embed": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 259,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 259,
    "hidden_size_per_layer_input": 16,
}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWERS: dict[str, dict[str, Any]] = {
    "vision_config": TOWER | {"head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 16},
    "audio_config": TOWER | {"output_proj_dims": 32, "subsampling_conv_channels": [4, 4]},
}


def scaled_down(values: dict[str, Any]) -> dict[str, Any]:
    small = {k: scaled_down(v) if k == "text_config" else SMALL.get(k, v) for k, v in values.items()}
    return small | {name: values[name] | tower for name, tower in TOWERS.items() if name in values}


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


def test_there_is_one_for_every_common_card_and_for_every_model_that_was_promised() -> None:
    assert len(NAMES) <= 40
    assert {recipes.gigabytes(path) for path in recipes.shipped().values()} == {0, 8, 12, 16, 24}
    models = {settings(name)["model"]["architecture"] for name in NAMES}
    for_plans = {"gemma4-12b", "gemma4-e2b", "mistral-7b", "qwen3-0.6b", "tinyllama-1.1b"}
    assert models >= PARAMETERS.keys() - for_plans


def test_the_list_is_80_columns_wide(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line[2:].split()[0] for line in lines if line.startswith(("  ", "* "))} - {"more"} == set(NAMES)
    assert [line for line in lines if line.startswith("GPU")] == [f"GPU with {n} GB" for n in (8, 12, 16, 24)]


def test_architectures_have_as_many_parameters_as_the_models() -> None:
    found = {}
    for name in shipped_files("configs/models", ".json"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(load_model_config(name))
        found[name] = sum(parameter.numel() for parameter in model.parameters())
    assert found == PARAMETERS


def test_headers_say_what_was_planned() -> None:
    assert set(FIGURES) == set(PLANNED)
    assert headers.wrong(FIGURES) == []


@pytest.mark.parametrize("name", PLANNED)
def test_every_key_of_a_recipe_is_explained(name: str) -> None:
    lines = [line for line in recipes.shipped()[name].read_text().splitlines() if not line.startswith("#")]
    keys = [line for line in lines if not line.endswith(":") and not line.startswith(("base:", "  name:"))]
    assert [line for line in keys if "  # " not in line] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short_and_says_what_it_is_and_how_to_run_it(name: str) -> None:
    lines = recipes.shipped()[name].read_text().splitlines()
    assert len(lines) <= 30
    description, run, plan = header(name)[:3]
    assert 30 < len(description) < 80
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


def quick() -> list[str]:
    """Return the recipes that are planned in seconds: adapters have many operations, windows are planned twice."""
    return [n for n in PLANNED if "lora" not in n and "accumulate_grad_batches" not in settings(n)["trainer"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED if sampling.FULL else sampling.some(quick(), 1))
def test_the_command_in_the_header_plans_the_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    figures = FIGURES[name]
    # The figures are of plans that were searched for long: a short search on a busy machine finds others. Where there
    # is more RAM it may take it: a machine with the RAM of the header must be enough.
    ram = int(1.1 * figures["host_peak_bytes"])
    args = ["plan", name, "--hardware", FIGURES[name]["hardware"], "--save", "plan.json"]
    args += ["--trainer.strategy.solver_time_limit", "10", "--trainer.strategy.host_memory", str(ram)]
    assert main(args) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    plan = Plan.load("plan.json")
    merged = settings(name)
    assert plan.budget_bytes == parse_bytes(merged["trainer"]["strategy"]["init_args"]["memory"])
    assert plan.estimated
    assert plan.predicted.device_peak_bytes <= plan.budget_bytes
    assert plan.predicted.host_peak_bytes <= ram
    assert brief(plan) in captured.out
    again = headers.figures_of(plan) | headers.shown_of(plan)
    assert [again[key] for key in ("samples", "sequence_length")] == [figures["samples"], figures["sequence_length"]]
    assert again["no_offload_s"] == pytest.approx(figures["no_offload_s"], rel=1e-6)
    assert 0.85 * figures["iteration_s"] <= again["iteration_s"] <= 1.6 * figures["iteration_s"]
    assert plan.predicted.lower_bound_s <= 1.01 * figures["iteration_s"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.tokenizer(tmp_path_factory.mktemp("tokenizer")))


def different() -> list[str]:
    """Return recipes that differ in more than sizes, of which nothing is left in a scaled-down model."""
    found: dict[str, str] = {}
    for name in NAMES:
        merged = settings(name)
        model = dict(merged["model"])
        path = shipped_files("configs/models", ".json")[model["architecture"]]
        model |= {"name": json.loads(path.read_text())["model_type"], "architecture": "", "lr": 0, "warmup_steps": 0}
        trainer = {**merged["trainer"], "strategy": {**merged["trainer"]["strategy"]["init_args"], "memory": ""}}
        data = {**merged["data"], "batch_size": 0}
        found.setdefault(json.dumps([model, trainer, data], sort_keys=True), name)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", different())
def test_a_scaled_down_model_trains_two_steps(
    name: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    merged = settings(name)
    full = shipped_files("configs/models", ".json")[merged["model"]["architecture"]]
    values = json.loads(full.read_text())
    Path("small.json").write_text(json.dumps(scaled_down(values)))
    rows = [{"instruction": f"Count to {n}.", "input": "", "output": "1 2 3"} for n in range(40)]
    Path("rows.json").write_text(json.dumps(rows))
    pairs = [{"prompt": f"Count to {n}.", "chosen": "1 2 3", "rejected": "no"} for n in range(40)]
    Path("pairs.json").write_text(json.dumps(pairs))
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    data = {"text": "text.txt", "preference": "pairs.json"}.get(merged["data"].get("format", "text"), "rows.json")
    code = main(
        [
            name, "--model.init", "random", "--model.architecture", "small.json",
            "--data.tokenizer", tokenizer, "--data.path", data, "--data.max_length", "256", "--data.batch_size", "4",
            "--trainer.accelerator", "cpu", "--trainer.strategy.memory", "32MB", "--trainer.max_steps", "2",
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
    assert profile.dtype == merged["model"]["dtype"]
    assert profile.parts == merged["trainer"]["strategy"]["init_args"].get("micro_batches", 1)
    assert plan.accumulate == merged["trainer"].get("accumulate_grad_batches", 1)
    assert any(not tensor.trainable for tensor in profile.tensors) == ("lora" in merged["model"])
    assert {path.name for path in Path("run").iterdir()} >= {"config.yaml", "trace.json", "report.html", "checkpoints"}
