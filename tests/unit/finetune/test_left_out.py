"""Checkpoints of adapters hold the adapters; the model under them is that of the recipe, or an error."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lt_offload import ExactResume, OffmateStrategy
from lt_offload.cli.main import main
from lt_offload.errors import ConfigError
from lt_offload.finetune.adapters import LoraArgs
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.weights.left_out import KEY
from tests.support import tiny
from tests.support.commands import fails
from tests.support.trainers import Run, Tokens, state_differences

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # what peft asks transformers
]

DORA = {"lora": LoraArgs(r=4, dora=True, dropout=0.1)}
SAVED = {"lora": LoraArgs(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])}
STRATEGIES: dict[str, Any] = {
    "auto": lambda: "auto",
    "offmate": lambda: OffmateStrategy(memory="300KB"),
    "later": lambda: OffmateStrategy(memory="300KB", async_checkpoint=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("tiny") / "base")


def trainer(where: Path, strategy: Any = "auto", **settings: Any) -> L.Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    saving = ModelCheckpoint(dirpath=where, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    settings = {
        "max_steps": 6,
        "callbacks": [saving, ExactResume()],
        "num_sanity_val_steps": 0,
        "limit_val_batches": 1,
    } | settings
    return L.Trainer(accelerator="cpu", strategy=strategy, max_epochs=-1, **quiet | settings)


def rows(module: FineTune) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Tokens(module.build(), 6, 0), batch_size=2)


def fit(
    model: Path, where: Path, strategy: Any = "auto", *, ckpt: Path | None = None, kind: Any = FineTune, **settings: Any
) -> Run:
    made = trainer(where, strategy)
    module = kind(str(model), lr=1e-2, schedule="constant", **settings)
    data = rows(module)
    L.seed_everything(4, verbose=False)
    made.fit(module, data, data, ckpt_path=ckpt)
    return Run(module, made)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def trained(module: FineTune) -> set[str]:
    return {name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "settings"), [("auto", DORA), ("offmate", DORA), ("later", SAVED)])
def test_a_run_goes_on_from_its_adapters_as_if_it_had_not_stopped(
    folder: Path, tmp_path: Path, strategy: str, settings: dict[str, Any]
) -> None:
    whole = fit(folder, tmp_path, STRATEGIES[strategy](), **settings)
    middle = tmp_path / "step=3.ckpt"
    content = read(middle)
    assert content["state_dict"].keys() == trained(whole.module)
    assert not content["state_dict"].keys() & content[KEY]["tensors"].keys()
    again = fit(folder, tmp_path / "again", STRATEGIES[strategy](), ckpt=middle, **settings)
    assert state_differences(whole, again) == []
    other = fit(
        folder, tmp_path / "other", "auto" if strategy != "auto" else STRATEGIES["offmate"](), ckpt=middle, **settings
    )
    assert state_differences(whole, other) == []


@pytest.mark.slow
def test_another_model_under_the_adapters_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = fit(folder, tmp_path, **DORA)
    path = tmp_path / "step=3.ckpt"
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert state_differences(run, fit(moved, tmp_path / "more", ckpt=path, **DORA)) == []

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    model.save_pretrained(tmp_path / "near")
    wide = tiny.model(tmp_path / "wide", intermediate_size=64)
    deep = tiny.model(tmp_path / "deep", num_hidden_layers=1)
    cases: list[tuple[Path, str, dict[str, Any]]] = [
        (tmp_path / "near", "up_proj.base_layer.weight has other numbers there than in model.name=", {}),
        (wide, "has shape", {}),
        (deep, "with the present settings", {}),
        (folder, "set model.dtype", {"dtype": "bfloat16"}),
    ]
    for name, message, settings in cases:
        module = FineTune(str(name), **DORA, **settings)
        for strategy in STRATEGIES.values():
            with pytest.raises(ConfigError, match=message) as error:
                trainer(tmp_path / "x", strategy()).validate(module, rows(module), ckpt_path=path, verbose=False)
            assert f"model.name={str(folder)!r}" in str(error.value)
            assert str(name) in str(error.value)
    with pytest.raises(ConfigError, match="has other numbers"):
        FineTune.load_from_checkpoint(path, name=str(tmp_path / "near"), **DORA)
    loaded = FineTune.load_from_checkpoint(tmp_path / "step=6.ckpt", name=str(folder), **DORA)
    assert not [
        key for key, value in run.module.state_dict().items() if not torch.equal(value, loaded.state_dict()[key])
    ]


class Unfrozen(FineTune):
    """Trains a norm of the model for two steps, and freezes it again."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.model is not None
        norm = self.model.base_model.model.model.norm.weight
        if self.global_step == 0 and not norm.requires_grad:
            norm.requires_grad_(True)
            self.trainer.optimizers[0].param_groups[0]["params"].append(norm)
        elif self.global_step == 2:
            norm.requires_grad_(False)


class Scaled(FineTune):
    """Changes a frozen weight."""

    def on_train_start(self) -> None:
        assert self.model is not None
        self.model.base_model.model.model.norm.weight.data.mul_(2)


@pytest.mark.parametrize(
    ("kind", "settings", "kept"),
    [
        (FineTune, {"freeze": ["model.layers.0"]}, None),
        (FineTune, DORA | {"init": "random"}, None),
        (FineTune, DORA | {"new_tokens": ["<a>"]}, {"embed_tokens.weight", "lm_head.weight"}),
        (Unfrozen, DORA, {"norm.weight"}),
        (Scaled, DORA, {"norm.weight"}),
    ],
    ids=["frozen parts", "random", "new tokens", "unfrozen", "scaled"],
)
@pytest.mark.filterwarnings("ignore:the tokens that the model did not have:UserWarning")
def test_what_the_recipe_would_not_load_again_stays(
    folder: Path, tmp_path: Path, kind: Any, settings: dict[str, Any], kept: set[str] | None
) -> None:
    run = fit(folder, tmp_path, kind=kind, **settings)
    content = read(tmp_path / "step=6.ckpt")
    state = content["state_dict"]
    every = run.module.state_dict()
    assert not [key for key, value in state.items() if not torch.equal(value, every[key])]
    if kept is None:
        assert state.keys() == every.keys()
        assert KEY not in content
        return
    more = state.keys() - trained(run.module)
    assert {".".join(key.split(".")[-2:]) for key in more} == kept
    assert state.keys() | content[KEY]["tensors"].keys() == every.keys()


RECIPE = """\
base: configs/base.yaml
trainer: {{accelerator: cpu, strategy: {{init_args: {{memory: 2MB}}}}, max_steps: 2}}
model: {{name: {model}, lr: 0.01, lora: {{r: 2}}}}
data: {{path: text.txt, max_length: 32, batch_size: 2}}
"""


@pytest.mark.slow
def test_every_verb_reads_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    Path("tiny.yaml").write_text(RECIPE.format(model=folder))
    assert main(["tiny.yaml", "--trainer.default_root_dir", "run"]) == 0
    assert main(["validate", "run"]) == 0
    assert main(["generate", "run", "--prompt", "the", "--max_new_tokens", "2"]) == 0
    assert main(["export", "run", "--output", "merged"]) == 0
    assert main(["run", "--resume", "--trainer.max_steps", "4", "--trainer.max_epochs", "-1"]) == 0
    capsys.readouterr()
    other = tiny.model(tmp_path / "other", intermediate_size=64)
    for verb in (["validate"], ["export", "--output", "x"]):
        line = fails(capsys, verb[0], "run", *verb[1:], "--model.name", str(other))
        assert f"model.name={str(folder)!r}" in line
        assert "has shape" in line
