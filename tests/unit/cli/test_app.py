from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lt_offload.cli.app import App, explain
from lt_offload.cli.main import main
from lt_offload.cli.recipes import chain
from lt_offload.cli.verbs.check import check
from tests.support.commands import fails

RECIPE = """\
# A tiny model on a little text
base: configs/base.yaml
trainer:
  accelerator: cpu
  strategy: auto
  max_steps: 6
  num_sanity_val_steps: -1
  val_check_interval: 6
  check_val_every_n_epoch: null
  limit_val_batches: 2
model:
  name: {model}
  lr: 0.01
data:
  path: {folder}/text.txt
  max_length: 32
  batch_size: 2
  validation_share: 0.2
  sample_prompt: the quick
"""


def run_folder(tmp_path: Path) -> Path:
    [folder] = (tmp_path / "runs").iterdir()
    return folder


@pytest.mark.slow
def test_a_run_leaves_a_folder_that_can_be_resumed_validated_sampled_and_exported(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([recipe, "--trainer.max_steps", "4", "--trainer.val_check_interval", "4"]) == 0
    out = capsys.readouterr().out
    assert "held-out loss" in out
    assert "the quick" in out
    folder = run_folder(tmp_path)
    assert folder.name.startswith("tiny-")
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.yaml", "metrics.csv", "samples.jsonl", "summary.json", "environment.json", "report.html", "checkpoints",
        "tensorboard",
    }  # fmt: skip
    assert list((folder / "tensorboard").glob("events*"))
    metrics = (folder / "metrics.csv").read_text()
    assert {"train_loss", "val_loss", "lr", "tokens_per_s", "trained_tokens_per_s"} <= set(
        metrics.splitlines()[0].split(",")
    )
    checkpoint = folder / "checkpoints" / "step4.ckpt"
    assert checkpoint.is_file()

    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert "base" not in saved
    assert saved["trainer"]["max_steps"] == 4
    assert "ckpt_path" not in saved

    config = str(folder / "config.yaml")
    first = validated(capsys, config)
    after = validated(capsys, config, "--ckpt_path", str(checkpoint))
    assert after < first
    assert f"{first:.4f} -> {after:.4f}" in out

    assert main(["generate", config, "--ckpt_path", str(checkpoint), "--max_new_tokens", "64"]) == 0
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[-1])
    assert (sample["step"], capsys.readouterr().out) == (4, sample["text"] + "\n")

    assert main(["export", config, "--ckpt_path", str(checkpoint), "--output", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    exported = validated(capsys, config, "--model.name", str(tmp_path / "out"))
    assert exported == pytest.approx(after, abs=1e-6)


def validated(capsys: pytest.CaptureFixture[str], *args: str) -> float:
    assert main(["validate", *args]) == 0
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if "val_loss" in line]
    return float(line.split()[1])


def test_data_are_shown_without_weights(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM.from_pretrained", None)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["data", recipe, "--samples", "1", "--save", str(tmp_path / "data.html")]) == 0
    out = capsys.readouterr().out
    assert "«" in out
    assert "as text (column text)" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= max(80, len(f"saved: {tmp_path / 'data.html'}"))
    assert "<html>" in (tmp_path / "data.html").read_text()
    assert "end the name with one of .html" in fails(capsys, "data", recipe, "--save", str(tmp_path / "data.pdf"))
    assert "samples=-1 is too small" in fails(capsys, "data", recipe, "--samples", "-1")


def test_columns_are_named_by_a_flag(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.csv").write_text("who,question,answer\nme,a cat,a rat\n")
    line = fails(capsys, "data", recipe, "--data.path", "rows.csv")
    flag = re.search(r"(--data.columns) '(.*)'", line)
    assert flag is not None
    assert main(["data", recipe, "--data.path", "rows.csv", *flag.groups(), "--data.format", "alpaca"]) == 0
    assert "1 rows as alpaca (columns question, answer)" in " ".join(capsys.readouterr().out.split())


def test_print_config_is_a_recipe(recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left:
        main([recipe, "--print_config", "--model.lora.r", "4"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    settings = yaml.safe_load(printed)
    assert (
        settings["model"]["lora"].items()
        >= {"r": 4, "alpha": 16, "dropout": 0.0, "target_modules": "all-linear"}.items()
    )
    assert main(["check", "again.yaml"]) == 0


def test_check_looks_at_local_data_and_the_architecture(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", recipe]) == 0
    assert "every setting is known" in capsys.readouterr().out
    assert "does not exist" in fails(capsys, "check", recipe, "--data.validation_path", "gone.json")
    line = fails(capsys, "check", recipe, "--model.architecture", "phi2", "--data.max_length", "4096")
    assert "set it to 2048 or less" in line


def test_generate_needs_something_to_continue(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "generate needs --prompt" in fails(capsys, "generate", recipe, "--data.sample_prompt", "null")
    assert "prompt is empty" in fails(capsys, "generate", recipe, "--prompt", "")


def test_a_setting_can_come_from_several_files(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("more.yaml").write_text("data: {batch_size: 3}\n")
    Path("child.yaml").write_text(f"base: [{recipe}, configs/lora.yaml, configs/bf16.yaml]\nmodel: {{lr: 0.5}}\n")
    with pytest.raises(SystemExit):
        main(["child.yaml", "--config", "more.yaml", "--data.max_length", "16", "--print_config"])
    settings: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    assert settings["model"]["lr"] == 0.5
    assert settings["model"]["dtype"] == "bfloat16"
    assert settings["model"]["lora"]["r"] == 8
    assert settings["data"]["batch_size"] == 3
    assert settings["data"]["max_length"] == 16


def test_long_errors_of_the_parser_become_one_line() -> None:
    union = (
        "Parser key \"a.b\":\n  Does not validate against any of the Union subtypes\n  Subtypes: [int, <class 'X'>]\n"
        "  Errors:\n    - Expected a <class 'int'>\n    - the useful one\n      on two lines\n"
        "  Given value type: <class 'str'>\n  Given value: x"
    )
    assert explain(union, []) == "a.b: the useful one on two lines"
    assert explain("unrecognized arguments: --model.lr=3 --x", ["--model.lr_", "--data.lr"]) == (
        "unknown setting 'model.lr'; did you mean data.lr?"
    )
    assert explain("something else\n  entirely", []) == "something else entirely"


@pytest.mark.parametrize("shown", [True, False])
def test_progress_can_be_left_out(recipe: str, shown: bool) -> None:
    app = App(check, Path(recipe), chain(Path(recipe)), ["--trainer.enable_progress_bar", str(shown).lower()])
    assert (app.trainer.progress_bar_callback is not None) == shown
