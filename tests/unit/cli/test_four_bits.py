"""``model.quantize`` on the command line: plans without weights, and folders that are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lt_offload.cli.main import main
from lt_offload.finetune import load
from lt_offload.finetune.module import FineTune, LoraArgs
from lt_offload.model.forms import open_weights
from lt_offload.schema.plan import Plan
from tests.parity.models import quantized
from tests.support import tiny
from tests.support.commands import fails

pytestmark = pytest.mark.slow

RECIPE = """\
base: configs/base.yaml
trainer: {{accelerator: cpu, strategy: {{init_args: {{memory: 600MB}}}}}}
model: {{name: {model}, dtype: bfloat16}}
data: {{path: text.txt, max_length: 32, batch_size: 2}}
"""
FLAGS = ("--model.quantize", "nf4", "--model.lora.r", "2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.model(tmp_path / "model", **quantized.SIZES)


def test_a_plan_knows_the_size_of_four_bits(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, *FLAGS, "--hardware", "rtx-3060", "--save", "plan.json"]) == 0
    plan = Plan.load("plan.json")
    packed = 64 * 64 // 2
    assert packed in [size for group in plan.groups if group.payload == "weight" for size in group.sizes]
    message = fails(capsys, "plan", recipe, "--model.quantize", "nf4")
    assert "model.quantize=nf4 needs model.lora or model.adapter" in message


def test_a_merged_folder_has_what_four_bits_stand_for(recipe: str) -> None:
    assert main(["export", recipe, *FLAGS, "--output", "merged"]) == 0
    torch.manual_seed(0)
    module = FineTune("model", dtype="bfloat16", quantize="nf4", lora=LoraArgs(r=2))
    expected = open_weights(module.build()).merge_and_unload()  # type: ignore[operator]
    found = load.load_model("merged", dtype="bfloat16")
    for name, parameter in expected.named_parameters():  # new adapters add nothing
        assert torch.equal(found.get_parameter(name), parameter)


def test_a_run_of_four_bits_is_read_again(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*FLAGS, "--trainer.default_root_dir", "run", "--trainer.max_steps")
    assert main([recipe, *flags, "1"]) == 0
    state = torch.load(next(Path("run/checkpoints").glob("step1*.ckpt")), weights_only=True)["state_dict"]
    assert state
    assert [name for name in state if ".lora_" not in name] == []
    assert main(["validate", "run"]) == 0
    assert "val_loss" in capsys.readouterr().out
    assert main(["generate", "run", "--prompt", "the", "--max_new_tokens", "2"]) == 0
    assert main(["run", "--resume", "--trainer.max_steps", "2", "--trainer.max_epochs", "2"]) == 0
    assert "steps 2" in " ".join(capsys.readouterr().out.split())
