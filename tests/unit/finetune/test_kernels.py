"""What computes a layer: compiled layers, Liger's kernels, and what they need, looked for before training."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.cli.main import main
from lt_offload.errors import ConfigError
from lt_offload.finetune import kernels
from lt_offload.finetune.module import FineTune
from lt_offload.model.tiles import tile_tokens
from lt_offload.profiling.from_config import profile_config
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from lt_offload.schema.plan import Plan
from tests.parity.engine.test_compiled import QUICKLY
from tests.parity.models import liger
from tests.support import models, tiny

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

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
    assert "steps 2" in " ".join(capsys.readouterr().out.split())
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
    model = models.build("llama")
    with pytest.raises(ConfigError, match="needs the package triton"):
        kernels.compile_layers(model)
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None if name != "clang" else "/usr/bin/clang")
    kernels.compile_layers(model)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="a C compiler, as gcc"):
        kernels.compile_layers(model)


LIGER: dict[str, tuple[dict[str, Any], str]] = {
    "no GPU": ({"kernels": "liger"}, "kernels=liger needs a GPU"),
    "unknown": ({"kernels": "triton"}, "kernels='triton' is not known; use auto or liger"),
    "both": ({"kernels": "liger", "compile_blocks": True}, "not offered with model.compile_blocks=true"),
}


@pytest.mark.parametrize("name", LIGER)
def test_kernels_that_cannot_be(name: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings, message = LIGER[name]
    with pytest.raises(ConfigError, match=message):
        FineTune(folder, **settings).build()


def test_layers_on_the_cpu_of_a_machine_with_a_gpu_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="kernels=liger needs a GPU"):
        kernels.liger_functions("cpu")
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package liger-kernel: pip install lt-offload\[liger\]"):
        kernels.liger_functions("cuda")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that Liger's kernels need seems to be here; nothing of it is run."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels, "import_module", lambda name: NAMED)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc")
    monkeypatch.setattr(kernels.sysconfig, "get_path", lambda name: "include")
    monkeypatch.setattr(kernels.Path, "is_file", lambda path: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "This GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 6))


class Named:
    """The names of ``liger_kernel.ops``, with what computes on the CPU."""

    LigerRMSNormFunction, LigerSiLUMulFunction, LigerGELUMulFunction = liger.Norm, liger.SiluMul, liger.SiluMul


NAMED = Named()
GPU = torch.device("cuda", 0)

ABSENT: dict[str, tuple[Any, str, Any, str | None]] = {
    "the package": (kernels, "find_spec", lambda name: None, None),
    "a GPU": (torch.cuda, "is_available", lambda: False, None),
    "an old GPU": (torch.cuda, "get_device_capability", lambda *device: (7, 5), "8.0 and later, this has 7.5"),
    "a compiler": (shutil, "which", lambda name: None, "a C compiler"),
    "headers": (kernels.Path, "is_file", lambda path: False, "Python's headers"),
    "another version": (kernels, "import_module", lambda name: object(), "cannot be imported"),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ABSENT)
def test_kernels_are_left_out_where_they_cannot_run(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = models.build("llama").config
    caplog.set_level("INFO", "lightning.pytorch")
    assert kernels.available(config, GPU) is not None
    assert kernels.available(config, torch.device("cpu")) is None
    assert kernels.available(config, None) is None
    assert caplog.messages == []
    where, attribute, value, said = ABSENT[name]
    monkeypatch.setattr(where, attribute, value)
    assert kernels.available(config, GPU) is None
    assert len(caplog.messages) == (said is not None)
    assert (said or "") in "".join(caplog.messages)


@pytest.mark.usefixtures("installed")
def test_a_model_without_kernels_computes_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    assert kernels.available(models.build("bloom").config, GPU) is None
    assert "nothing for models of type 'bloom'" in caplog.messages[0]


def test_plans_count_kernels_where_the_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    config, machine = models.build("llama").config, load_hardware("rtx-3060")
    assert not kernels.expected(config, machine)
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    assert kernels.expected(config, machine)
    assert not kernels.expected(config, None)
    assert not kernels.expected(config, load_hardware("v100"))  # no bfloat16: too old for Triton
    assert not kernels.expected(config, replace(machine, context_bytes=0))  # the emulated device
    assert not kernels.expected(models.build("bloom").config, machine)


@pytest.mark.usefixtures("installed")
def test_plans_for_this_gpu_count_them_if_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    config, machine = models.build("llama").config, replace(load_hardware("rtx-3060"), name="This GPU")
    assert kernels.expected(config, machine)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 5))
    assert not kernels.expected(config, machine)
    assert kernels.expected(config, load_hardware("rtx-3060"))


@pytest.mark.long
def test_plan_says_that_kernels_are_used_by_default(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(*flags: str) -> tuple[Plan, str]:
        assert main(["plan", recipe, *flags, "--hardware", "rtx-3060", "--save", "plan.json"]) == 0
        return Plan.load("plan.json"), " ".join(capsys.readouterr().out.split())

    without, said = planned()
    assert "Kernels:" not in said
    named, said = planned("--model.kernels", "liger")
    assert "Kernels: those of Liger for norms and gated MLPs; numbers are exactly those of the model with them" in said
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    default, said = planned()
    assert "Kernels: those of Liger" in said
    assert default.predicted.no_offload_s == named.predicted.no_offload_s < without.predicted.no_offload_s
    off, said = planned("--model.kernels", "null")
    assert off.predicted.no_offload_s == without.predicted.no_offload_s
    assert "Kernels:" not in said


def test_models_without_kernels_are_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing for models of type 'bloom', but for gemma, "):
        kernels.use_functions(models.build("bloom"), kernels.PLANNED)
    model = models.build("llama")
    model.config.hidden_act = "relu"
    with pytest.raises(ConfigError, match="no gated relu, but silu, swish, gelu_pytorch_tanh"):
        kernels.use_functions(model, kernels.PLANNED)


def test_tiles_of_a_model_with_kernels_are_an_error_that_names_them() -> None:
    model = models.build("llama")
    kernels.use_functions(model, kernels.PLANNED)
    with pytest.raises(ConfigError, match="tile_tokens=5: no part .* set model.kernels=null, or leave it out"):
        tile_tokens(model, 5)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(models.FAMILIES) & set(kernels.FAMILIES)))
def test_kernels_that_are_planned_save_what_those_that_run_save(family: str) -> None:
    machine = replace(load_hardware("rtx-3060"), context_bytes=0)
    model = models.build(family)
    kernels.use_functions(model, liger.FUNCTIONS)
    names = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert any(name.endswith("norm") for name in names)
    assert any(name.endswith("mlp") for name in names)
    expected = profile(
        model,
        models.batch(model, padding=True),
        optimizer=torch.optim.AdamW,
        device="cpu",
        hardware=machine,
        run=lambda batch: model(**batch).loss,
    )

    def prepare(made: torch.nn.Module) -> torch.nn.Module:
        kernels.use_functions(made, kernels.PLANNED)
        return made

    sizes: dict[str, Any] = {"batch_size": 2, "sequence_length": 12, "hardware": machine}
    found = profile_config(model.config, **sizes, prepare=prepare)
    plain = profile_config(model.config, **sizes)
    for ours, theirs, without in zip(found.blocks, expected.blocks, plain.blocks, strict=True):
        for one, other in zip(ours.options, theirs.options, strict=True):
            for figure in ("name", "saved_bytes", "keeps_input", "offload_bytes"):
                assert getattr(one, figure) == getattr(other, figure), (ours.name, one.name, figure)
        if ours.kind == "layer":
            keep, before = ours.option("keep"), without.option("keep")
            assert keep.saved_bytes < before.saved_bytes
            assert keep.forward_s + keep.backward_s < before.forward_s + before.backward_s
