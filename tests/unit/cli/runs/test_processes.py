"""The command line in several processes: one voice, one folder, the numbers of one process that accumulates."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lt_offload.cli.app import App
from lt_offload.cli.main import main
from lt_offload.cli.recipes import chain, find
from lt_offload.cli.table import VERBS
from lt_offload.finetune import processes
from lt_offload.report.runs import read_run
from tests.parity.several.training import HANG, free_port

RECIPE = """\
base: configs/base.yaml
trainer:
  accelerator: cpu
  strategy: ddp
  max_steps: 4
  num_sanity_val_steps: -1
  check_val_every_n_epoch: null
model: {{name: {model}, lr: 0.01}}
data: {{path: {folder}/text.txt, max_length: 32, batch_size: 2, sample_prompt: the quick, cache_dir: {folder}/cache}}
"""


@pytest.fixture
def recipe(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"the quick brown fox jumps over {n} lazy dogs. " for n in range(30)))
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(model=model, folder=tmp_path))
    return "tiny.yaml"


OURS = ["--trainer.strategy", "offmate", "--trainer.strategy.memory", "4MB", "--trainer.strategy.planner", "l2l"]
"""Plans whole batches: in parts they would be rounded in another way."""


def in_two(recipe: str, machines: int, *settings: str) -> tuple[str, str]:
    """Train in two processes, on one machine by Lightning's launcher or started by hand on two; what the first says."""
    numbers = ["--trainer.devices", str(2 // machines), "--trainer.num_nodes", str(machines)]
    command = [sys.executable, "-m", "lt_offload.cli.main", recipe, *numbers, *settings]
    port = free_port()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if machines > 1 else {}
    started = []
    for number in range(machines):
        environment = os.environ | meeting | ({"NODE_RANK": str(number)} if machines > 1 else {})
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        said = [process.communicate(timeout=HANG) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * machines, said
    return said[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "machines"), [([], 1), (OURS, 1), (OURS, 2)], ids=["ddp", "offmate", "offmate on two machines"]
)
def test_a_recipe_trains_in_two_processes(
    strategy: list[str], machines: int, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ["--trainer.strategy", "auto", "--trainer.accumulate_grad_batches", "2"]
    alone += ["--trainer.val_check_interval", "8"]
    assert main([recipe, *alone, "--trainer.default_root_dir", "alone"]) == 0
    capsys.readouterr()
    out, err = in_two(recipe, machines, "--trainer.val_check_interval", "4", *strategy)
    for said in ("starting PyTorch", "1 rows as text", "held-out loss before training", "step 4/4"):
        assert err.count(said) == 1
    assert out.count("done") == 1
    assert re.search(r"  processes +2; ", out)
    [folder] = (tmp_path / "runs").iterdir()
    found, expected = read_run(folder), read_run("alone")
    weights, others = (
        torch.load(run.path / "checkpoints/step4.ckpt", weights_only=True)["state_dict"] for run in (found, expected)
    )
    assert all(torch.equal(weights[name], others[name]) for name in others)
    assert found.curves["train_loss"] == expected.curves["train_loss"]
    assert [(sample.step, sample.text) for sample in found.samples] == [
        (sample.step, sample.text) for sample in expected.samples
    ]
    assert len((folder / "samples.jsonl").read_text().splitlines()) == len(
        Path("alone/samples.jsonl").read_text().splitlines()
    )
    [part], [other] = found.parts, expected.parts
    assert (part.tokens, part.trained_tokens) == (other.tokens, other.trained_tokens)
    assert json.loads((folder / "environment.json").read_text())["torch"] == torch.__version__
    # Stock ddp does not say how long it waits for others.
    expected_times = [(rank, socket.gethostname()) for rank in range(2)] if strategy else []
    assert [(one.rank, one.host) for one in part.processes] == expected_times
    assert all(0 < one.waited_s < one.step_s for one in part.processes)
    assert bool(re.search(r"  waiting +", out)) == bool(strategy)
    assert ("waiting for others" in (folder / "report.html").read_text()) == bool(strategy)

    capsys.readouterr()
    more = ["--trainer.max_steps", "8", "--trainer.max_epochs", "-1", "--trainer.accumulate_grad_batches", "2"]
    more += ["--trainer.val_check_interval", "8", "--trainer.num_nodes", "1"]
    # Four updates of 2 x 2 of 42 sequences were made.
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # it is said as one of the run
        assert main([str(folder), "--resume", "--trainer.strategy", "auto", "--trainer.devices", "1", *more]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "2 processes, now there is 1: its epoch goes on with the 26 of 42 sequences that were not trained on" in said
    assert "step 8/8" in said


@pytest.mark.parametrize("devices", ["2", "-1"])
def test_one_process_answers_where_several_have_trained(recipe: str, devices: str) -> None:
    verb = VERBS["generate"].load()
    app = App(verb, Path(recipe), chain(find(recipe)), ["--trainer.devices", devices, "--trainer.accelerator", "cpu"])
    assert app.trainer.world_size == 1


def test_others_leave_it_to_the_first_process_to_speak(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(processes, "rank", lambda: 1)
    monkeypatch.setattr("time.sleep", waited.append)
    assert main(["ls", "--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("error: process 1: ")
    assert len(waited) == 1


@pytest.mark.slow
def test_the_first_process_ends_the_others() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = [other]
    processes.end_others(SimpleNamespace(strategy=SimpleNamespace(launcher=SimpleNamespace(procs=started))))
    assert other.poll() is not None
    assert started == [], "Lightning, which watches them, sees none that has failed"
    processes.end_others(SimpleNamespace(strategy=SimpleNamespace(launcher=None)))


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_the_environment_tells_who_speaks_before_lightning_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning_utilities.core.rank_zero")
    for variable in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert processes.is_first()
    monkeypatch.setenv(name, "1")
    assert not processes.is_first()
