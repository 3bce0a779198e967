"""What computes a layer: compiled layers on the command line, and what compiling needs, looked for before training."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lt_offload.cli.main import main
from lt_offload.errors import ConfigError
from lt_offload.finetune import kernels
from lt_offload.finetune.module import FineTune
from lt_offload.schema.plan import Plan
from tests.parity.engine.test_compiled import QUICKLY
from tests.support import tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)

RECIPE = """\
base: configs/base.yaml
trainer: {{accelerator: cpu, strategy: {{init_args: {{memory: 600MB}}}}}}
model: {{name: {model}}}
data: {{path: text.txt, max_length: 32, batch_size: 2}}
"""
COMPILED = ("--model.compile_blocks", "true")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    Path("small.yaml").write_text(RECIPE.format(model=tiny.model(tmp_path / "model")))
    with torch._inductor.config.patch(QUICKLY):
        yield "small.yaml"
    torch._dynamo.reset()


@pytest.mark.long
def test_a_plan_knows_that_blocks_are_compiled(recipe: str) -> None:
    def planned(*flags: str) -> Plan:
        assert main(["plan", recipe, *flags, "--hardware", "rtx-3060", "--save", "plan.json"]) == 0
        return Plan.load("plan.json")

    assert planned(*COMPILED).predicted.iteration_s < planned().predicted.iteration_s


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--model.lora.r", "2")], ids=["full", "lora"])
def test_a_run_is_read_again_with_and_without_it(
    recipe: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ("--trainer.default_root_dir", "run", "--trainer.max_steps")
    assert main([recipe, *flags, *COMPILED, *steps, "1"]) == 0
    state = torch.load(next(Path("run/checkpoints").glob("step1*.ckpt")), weights_only=True)["state_dict"]
    assert state
    assert not any("_orig_mod" in name for name in state)
    assert main(["run", "--resume", "--trainer.max_steps", "2", "--trainer.max_epochs", "2"]) == 0
    assert "steps          2" in capsys.readouterr().out
    assert main(["validate", "run", "--model.compile_blocks", "false"]) == 0
    assert "val_loss" in capsys.readouterr().out


def test_a_missing_compiler_is_an_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"compile_blocks=true needs a C\+\+ compiler: install g\+\+"):
        FineTune(folder, compile_blocks=True).build()
    FineTune(folder).build()


def test_a_gpu_needs_triton_and_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package triton"):
        kernels.check_compiler()
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None if name != "clang" else "/usr/bin/clang")
    kernels.check_compiler()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="a C compiler, as gcc"):
        kernels.check_compiler()
