"""The command line with the offmate strategy: what a run shows, and one clear error for whatever cannot work."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lt_offload.cli.main import main
from lt_offload.cli.verbs import doctor
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.run import summary
from lt_offload.schema.explain import brief
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import HardwareProfile
from lt_offload.schema.trace import Trace
from tests.support import tiny
from tests.support.reports.pages import plain

pytestmark = pytest.mark.slow

RECIPE = """\
base: configs/base.yaml
trainer:
  accelerator: cpu
  strategy: {{init_args: {{memory: 2MB}}}}
  max_steps: 3
  num_sanity_val_steps: -1
  val_check_interval: 3
  check_val_every_n_epoch: null
  limit_val_batches: 2
model: {{name: {model}, lr: 0.01}}
data: {{path: {folder}/text.txt, max_length: 32, batch_size: 2, sample_prompt: the quick}}
"""


def test_a_run_shows_measured_beside_planned(
    recipe: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(summary, "run_gains", lambda *_: print("planning with more") or ())
    assert main([recipe, "--trainer.default_root_dir", "run"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("  try it"), "the last thing to be read"
    for name in ("held-out loss", "tokens/s", "iteration", "device peak", "RAM peak", "sample", "try it"):
        assert f"  {name}  " in captured.out
    assert re.search(r"device budget +2 MB\n", captured.out)
    plan = Plan.load("run/plan.json")
    assert plan.budget_bytes == 2_000_000
    # Lightning's logger writes to standard error, or to pytest's handler if that was there before Lightning
    said = captured.err + caplog.text
    assert brief(plan) in said
    assert "tensors updated on" not in said, "the table is for those who ask"
    names = {path.name for path in Path("run").iterdir()}
    assert names >= {
        "config.yaml", "profile.json", "plan.json", "trace.json", "trace.perfetto.json", "metrics.csv", "samples.jsonl",
        "summary.json", "environment.json", "report.html", "checkpoints", "tensorboard",
    }  # fmt: skip
    page = plain(Path("run/report.html").read_text())
    for title in ("Training", "Samples", "Planned and measured", "Where the time went", "One iteration", "Decisions"):
        assert f" {title} " in page

    Path("again").mkdir()
    replay = [recipe, "--trainer.default_root_dir", "again", "--trainer.strategy.plan", "run/plan.json"]
    caplog.clear()
    assert main([*replay, "--explain"]) == 0
    assert Plan.load("again/plan.json") == plan
    second = capsys.readouterr()
    assert plan.explain().strip() in second.err + caplog.text
    losses = [
        [line for line in second.out.splitlines() if "held-out" in line],
        [line for line in captured.out.splitlines() if "held-out" in line],
    ]
    assert losses[0][0].split() == losses[1][0].split()


@pytest.mark.filterwarnings("always:.*loss of step . is not finite")
def test_a_run_whose_loss_is_not_finite_is_not_done(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([recipe, "--trainer.default_root_dir", "run", "--model.lr", "1e10"]) == 3  # attention's scores overflow
    said, told = capsys.readouterr()
    assert told.count("not finite") == 1
    assert "begin again with a lower --model.lr (it is 1e+10) or --trainer.gradient_clip_val 1\n" in told
    assert "done, in vain" in said
    assert "not finite since step" in said
    assert "try it" not in said
    page = plain(Path("run/report.html").read_text())
    assert "The run failed after step 3: the loss is not finite since step" in page


@pytest.mark.parametrize(
    ("args", "messages"),
    [
        (["--trainer.strategy.memory", "100KB"], ["memory=100", "is enough"]),
        (["--trainer.strategy.host_memory", "50KB"], ["host_memory=50"]),
        (["--trainer.strategy.plan", "other.json"], ["other.json"]),
        (["--trainer.num_nodes", "2"], ["num_nodes=2 needs MASTER_ADDR, MASTER_PORT, NODE_RANK"]),
        (["--trainer.gradient_clip_val", "-1.0"], ["gradient_clip_val=-1.0 must be more than 0"]),
        (["--trainer.gradient_clip_algorithm", "best"], ["gradient_clip_algorithm", "best"]),
        (["--trainer.accumulate_grad_batches", "0"], ["accumulate_grad_batches"]),
        (["--trainer.precision", "64-true"], ["Trainer(precision='64-true')", "bf16-mixed"]),
        (["--trainer.strategy.batch_size", "best"], ["batch_size"]),
        (["--trainer.strategy.planner", "best"], ["planner"]),
    ],
)
def test_one_clear_error_before_training(
    recipe: str, args: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "other.json" in args:
        plan_of_another_model("other.json")
    capsys.readouterr()
    assert main([recipe, *args]) == 2
    captured = capsys.readouterr().err
    assert "Traceback" not in captured
    error = captured[captured.index("error: ") :]
    for message in messages:
        assert message in error
    assert not list(Path().glob("runs/*/metrics.csv"))


def test_a_run_that_fails_leaves_a_report(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(module: FineTune, *args: object) -> None:
        if module.global_step == 2:
            raise RuntimeError("the cat is on the keyboard")

    monkeypatch.setattr(FineTune, "on_train_batch_end", broken)
    assert main([recipe, "--trainer.default_root_dir", "run"]) == 1
    assert "how far the run came: run/report.html" in capsys.readouterr().err
    page = plain(Path("run/report.html").read_text())
    assert "The run failed after step 2: RuntimeError: the cat is on the keyboard." in page


QUICK = ["--trainer.default_root_dir", "run", "--trainer.strategy", "auto", "--trainer.limit_val_batches", "0"]


def test_a_run_whose_report_cannot_be_written_is_told_all_the_same(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(summary, "write_report", full)
    assert main([recipe, *QUICK]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("  try it")
    assert "error: OSError: the disk is full" in captured.err


def test_a_callback_that_leaves_is_no_interrupt(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FineTune, "on_train_batch_end", lambda *_: sys.exit(3))
    with pytest.raises(SystemExit, match="3"):
        main([recipe, *QUICK])
    assert "interrupted" not in capsys.readouterr().err


def test_a_run_with_windows_and_clipping(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    windows = ["--trainer.accumulate_grad_batches", "4", "--trainer.gradient_clip_val", "0.5"]
    assert main([recipe, "--trainer.default_root_dir", "run", *windows]) == 0
    plan = Plan.load("run/plan.json")
    assert (plan.window, plan.delayed) == (4, True)
    assert Trace.load("run/trace.json").iteration_time > 0
    assert "gradients added up" in Path("run/report.html").read_text()
    assert "micro-batches" in capsys.readouterr().out

    machine = ["--hardware", "rtx-3060", "--memory", "1GB"]
    assert main(["plan", recipe, *machine, *windows, "--explain", "--report", "plan.html", "--trace", "t.json"]) == 0
    assert "per window of 4 micro-batches" in capsys.readouterr().out
    auto = ["--trainer.strategy.batch_size", "auto", "--trainer.strategy.solver_time_limit", "2"]
    assert main(["plan", recipe, *machine, *windows[:2], *auto, "--save", "auto.json"]) == 0
    plan = Plan.load("auto.json")
    assert plan.window * plan.batch_size == 4 * 2


def test_a_run_that_chooses_its_batch_size(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    auto = ["--trainer.strategy.batch_size", "auto", "--trainer.strategy.solver_time_limit", "5"]
    args = ["--trainer.default_root_dir", "run", "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    assert main([recipe, *auto, *args]) == 0
    plan = Plan.load("run/plan.json")
    assert plan.batch_size in [point.batch_size for point in plan.batch_curve]
    assert f"{plan.batch_size}, chosen from {len(plan.batch_curve)} sizes" in capsys.readouterr().out
    # The text is 56 sequences of 32 tokens, 3 of them held out.
    assert max(point.batch_size for point in plan.batch_curve) <= 53


def test_a_plan_with_the_best_batch_size(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(recipe).write_text(Path(recipe).read_text().replace("memory: 2MB", "solver_time_limit: 1, batch_size: auto"))
    assert main(["plan", recipe, "--hardware", "rtx-3060", "--memory", "1GB", "--save", "plan.json"]) == 0
    captured = capsys.readouterr()
    plan = Plan.load("plan.json")
    assert "Batch sizes:" in captured.out
    assert any(f"batch_size={plan.batch_size} gives " in note for note in plan.notes)
    assert "planning for batch_size=" in captured.err
    assert main(["plan", recipe, "--hardware", "rtx-3060", "--sweep", "memory=1GB:2GB"]) == 2
    assert "batch_size='auto' cannot be combined with a sweep" in capsys.readouterr().err


def plan_of_another_model(path: str) -> None:
    assert main(["plan", "tiny.yaml", "--model.architecture", other(), "--hardware", "v100", "--save", path]) == 0


def other() -> str:
    [line] = [line for line in Path("tiny.yaml").read_text().splitlines() if line.startswith("model:")]
    folder = Path(line.partition("name: ")[2].partition(",")[0])
    values = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3, "max_position_embeddings": 64}
    Path("other-model.json").write_text(json.dumps(values))
    # The V100's context alone is larger than 2 MB, so the plan is made for the whole card.
    text = Path("tiny.yaml").read_text().replace("memory: 2MB", "memory: null")
    Path("tiny.yaml").write_text(text)
    return "other-model.json"


def test_a_model_without_blocks(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import GPT2Config

    Path("flat").mkdir()
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=259, n_positions=64)
    Path("flat/config.json").write_text(json.dumps(config.to_dict() | {"n_layer": 0}))
    args = ["--model.name", "./flat", "--model.init", "random", "--data.tokenizer", tokenizer()]
    assert main([recipe, *args]) == 2
    error = capsys.readouterr().err
    assert "error: " in error
    assert "block" in error[error.index("error: ") :]


def tokenizer() -> str:
    return str(tiny.tokenizer(Path("tokenizer")))


def test_plan_without_hardware_measures_this_machine(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, "--memory", "3MB", "--save", "plan.json"]) == 0
    captured = capsys.readouterr()
    assert "measuring copies" in captured.err
    plan = Plan.load("plan.json")
    assert plan.budget_bytes == 3_000_000
    assert plan.estimated


def test_doctor_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert "host to device" in captured.out
    assert "TFLOP/s" in captured.out
    assert "measuring this machine" in captured.err


def test_doctor_tells_what_a_card_can_do() -> None:
    card = HardwareProfile(
        name="card",
        device_bytes=12 * 10**9,
        host_bytes=64 * 10**9,
        pinnable_bytes=0,
        h2d_bytes_per_s=10.4e9,
        d2h_bytes_per_s=9e9,
        flops_per_s={"float32": 8.08e12},
    )
    rows = dict(doctor.rows(card))
    assert rows["device memory"] == "12 GB"
    assert rows["host to device, other direction busy"] == "10.4 GB/s"
    assert rows["device to host, other direction busy"] == "9 GB/s"
    assert rows["matrix products, float32"] == "8.08 TFLOP/s"
    assert rows["RAM that may be pinned"] == "0 B"
    assert "RAM that may be pinned" not in dict(doctor.rows(replace(card, name="emulated")))
