"""The command line on the device of --device: from a model folder to a conversation, and runs that are interrupted."""

from __future__ import annotations

import csv
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lt_offload
from lt_offload.cli.main import main
from lt_offload.finetune import kernels
from lt_offload.finetune.module import FineTune
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.gpu.loops.bench import LOOPS
from tests.gpu.machine import between
from tests.gpu.target import Target
from tests.gpu.users.runs import equal_updates
from tests.support import tiny

pytestmark = [
    *LOOPS,
    pytest.mark.only("cuda", "fake"),
    pytest.mark.filterwarnings("ignore:.*settings to control TF32.*"),
]

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6}
"""60 MB of weights: what an allocator maps at once is little of a budget for that."""

RECIPE = """\
base: configs/base.yaml
trainer:
  accelerator: gpu
  deterministic: true
  strategy: {init_args: {memory: 2GB, solver_time_limit: 2}}
  max_steps: 4
  max_epochs: -1
  num_sanity_val_steps: 0
  val_check_interval: 2
  check_val_every_n_epoch: null
  limit_val_batches: 2
model: {name: model, lr: 0.001, dropout: 0.1}
data: {path: chat.jsonl, max_length: 64, batch_size: 4}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and conversations that have nothing to say."""
    made = tmp_path_factory.mktemp("cli")
    tiny.model(made / "model", chat=True, **SIZES)
    rows = [
        [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": f"{i} is a number."}]
        for i in range(40)
    ]
    (made / "chat.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    return made


@pytest.fixture
def recipe(folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(folder)
    Path("small.yaml").write_text(RECIPE)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield "small.yaml"
    signal.signal(signal.SIGINT, before)


def planned(recipe: str, target: Target) -> str:
    """Return the file of a plan that has to copy."""
    if not Path("tight.json").is_file():
        # It validates first, so that the profile's context has the kernels of validation, too.
        measured = ["--trainer.max_steps", "1", "--trainer.num_sanity_val_steps", "1"]
        assert main([recipe, *measured, "--trainer.default_root_dir", "measured"]) == 0
        profile = Profile.load("measured/profile.json")
        switches: dict[str, Any] = {"host_update": equal_updates(target.torch_device), "solver_time_limit": 2.0}
        plan = lt_offload.solve(profile, memory=between(profile, 0.4, **switches), **switches)
        assert any(op.lane in ("h2d", "d2h") for op in plan.ops), plan.explain()
        plan.save("tight.json")
    return "tight.json"


def losses(run: str) -> list[tuple[str, str]]:
    with Path(run, "metrics.csv").open(encoding="utf-8") as file:
        return [(row["train_loss"], row["val_loss"]) for row in csv.DictReader(file)]


def test_from_a_model_folder_to_a_conversation(
    recipe: str, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = ["new", "model", "--data", "chat.jsonl", "--memory", "2GB", "--method", "full"]
    assert main([*new, "--output", "written.yaml"]) == 0
    for verb in ("check", "data", "plan"):
        assert main([verb, "written.yaml"]) == 0

    plan = planned(recipe, target)
    assert main([recipe, "--trainer.strategy.plan", plan, "--trainer.default_root_dir", "ours"]) == 0
    assert main([recipe, "--trainer.strategy", "auto", "--trainer.default_root_dir", "stock"]) == 0
    assert losses("ours") == losses("stock")
    assert len(losses("ours")) == 6
    ours, stock = (torch.load(f"{run}/checkpoints/step4.ckpt", map_location="cpu") for run in ("ours", "stock"))
    assert all(torch.equal(value, stock["state_dict"][name]) for name, value in ours["state_dict"].items())
    capsys.readouterr()
    assert main(["compare", "ours", "stock"]) == 0
    assert "bit for bit" in " ".join(capsys.readouterr().out.split())

    assert main(["validate", "ours"]) == 0
    assert main(["generate", "ours", "--prompt", "what", "--max_new_tokens", "3"]) == 0
    assert main(["export", "ours", "--output", "merged"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert main(["chat", "ours", "--max_new_tokens", "3"]) == 0
    assert main(["ls"]) == 0


STAND_IN = """\
from tests.parity.models.liger import Norm as LigerRMSNormFunction
from tests.parity.models.liger import SiluMul as LigerGELUMulFunction
from tests.parity.models.liger import SiluMul as LigerSiLUMulFunction
"""


@pytest.mark.filterwarnings("default:training goes on with other kernels:UserWarning")
def test_kernels_of_liger_are_used_where_they_are_installed(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the package is not, its place takes one that computes the same in plain operations, without Triton."""
    steps = ("--trainer.max_steps", "2", "--trainer.limit_val_batches", "0", "--model.dropout", "null")
    run = [recipe, *steps, "--trainer.strategy.host_update", "false", "--trainer.default_root_dir"]
    assert main([*run, "without", "--model.kernels", "null"]) == 0
    assert "Kernels:" not in capsys.readouterr().out
    if kernels.find_spec("liger_kernel") is None:
        (tmp_path / "liger_kernel").mkdir()
        (tmp_path / "liger_kernel/__init__.py").touch()
        (tmp_path / "liger_kernel/ops.py").write_text(STAND_IN)
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "Python.h").touch()
        find = kernels.find_spec
        monkeypatch.setattr(kernels, "find_spec", lambda name: find(name) or name == "triton")
        monkeypatch.setattr(kernels.sysconfig, "get_path", lambda name: str(tmp_path))
    assert main([*run, "with"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "kernels those of Liger for norms and gated MLPs" in said
    assert any(note.startswith("kernels: those of Liger") for note in Plan.load("with/plan.json").notes)
    stock = [recipe, *steps, "--trainer.strategy", "auto", "--trainer.default_root_dir", "stock_with"]
    assert main(stock) == 0
    ours, same, other = (
        torch.load(f"{folder}/checkpoints/step2.ckpt", map_location="cpu")
        for folder in ("with", "stock_with", "without")
    )
    assert all(torch.equal(value, same["state_dict"][name]) for name, value in ours["state_dict"].items())
    assert not all(torch.equal(value, other["state_dict"][name]) for name, value in ours["state_dict"].items())
    assert "kernels" not in other
    # Where training goes on without them, that is said, as the numbers are others.
    assert main(["with", "--resume", "--trainer.max_steps", "3", "--model.kernels", "null"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "other kernels than the checkpoint's" in said
    assert "now they are transformers' own" in said
    assert "planned again: layers compute with other kernels" in said


def test_memory_of_a_stock_run_counts_the_context(recipe: str, target: Target) -> None:
    """As that of ours does: ``compare`` shows them side by side."""
    assert main([recipe, "--trainer.strategy", "auto", "--trainer.default_root_dir", "counted"]) == 0
    with Path("counted/metrics.csv").open(encoding="utf-8") as file:
        peaks = [float(row["device_peak_gb"]) for row in csv.DictReader(file) if row["device_peak_gb"]]
    free, total = torch.cuda.mem_get_info(target.torch_device)
    context = total - free - torch.cuda.memory_reserved(target.torch_device)
    states = 4 * sum(value.nbytes for value in FineTune("model").build().state_dict().values())
    assert max(peaks) * 1e9 > context + states


def test_plain_training_and_ours_are_verified_to_be_equal(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a quarter of the memory, or in the least that a plan needs beside CUDA's context."""
    capsys.readouterr()
    assert main(["verify", recipe, "--steps", "4"]) == 0
    posted = capsys.readouterr().out.splitlines()[-1]
    assert posted.startswith("EQUAL bit for bit: model, 4 steps of ")
    assert "(driver " in posted


def test_pairs_are_learned_as_in_plain_training(recipe: str, target: Target) -> None:
    """By DPO, whose references are made before the training; and on from a checkpoint."""
    rows = [{"prompt": f"what is {i}?", "chosen": f" {i} is a number.", "rejected": " a word"} for i in range(40)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--data.path", "pairs.jsonl", "--data.format", "preference", "--data.pack", "false"]
    flags += ["--model.lora.r", "4", "--model.dropout", "0", "--model.schedule", "constant"]
    flags += ["--trainer.strategy.memory", "800MB"]
    host_update = str(equal_updates(target.torch_device)).lower()
    ours = [recipe, *flags, "--trainer.strategy.host_update", host_update, "--trainer.default_root_dir", "pairs"]
    assert main([*ours, "--trainer.max_steps", "2"]) == 0
    assert main(["pairs", "--resume", "--trainer.max_steps", "4"]) == 0
    stock = [recipe, *flags[:-2], "--trainer.strategy", "auto", "--trainer.default_root_dir", "pairs_stock"]
    assert main(stock) == 0
    weights, expected = (
        torch.load(f"{run}/checkpoints/step4.ckpt", map_location="cpu")["state_dict"]
        for run in ("pairs", "pairs_stock")
    )
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    assert losses("pairs")[-1] == losses("pairs_stock")[-1]
    assert main(["validate", "pairs"]) == 0
