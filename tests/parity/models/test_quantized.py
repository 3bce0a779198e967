"""Layers of four bits under adapters train exactly as in plain PyTorch, wherever their weights are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

import lt_offload
from lt_offload.finetune.module import FineTune, LoraArgs
from lt_offload.model.blocks import find_blocks
from tests import sampling
from tests.parity.models import quantized
from tests.support import models, plans, tiny
from tests.support.engines import BUDGET, Result, differences, make_optimizer, trained_by
from tests.support.hostile.device import HostileDevice
from tests.support.profiles.budgets import BUDGETS
from tests.support.trials import Trial
from tests.support.user_nets import seed

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is not written. the gradients of 1 micro-batches"),
]

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "dropout": {"lora_dropout": 0.3},
    "bias": {"family": "phi", "dropout": 0.1},
    "uneven": {"intermediate_size": 96},
}


def rows() -> list[dict[str, Tensor]]:
    return [models.batch(nn.Linear(1, 1), seed=i) for i in range(3)]


adamw = partial(make_optimizer, name="adamw-fused")
TRIALS = {kind: Trial(partial(quantized.adapted, **settings), rows, adamw) for kind, settings in KINDS.items()}


@pytest.mark.parametrize(("kind", "budget"), sampling.grid(KINDS, BUDGETS, count=6))
def test_equals_plain_pytorch(kind: str, budget: str) -> None:
    trial = TRIALS[kind]
    plan = trial.planned(budget)
    packed = {i for i, tensor in enumerate(trial.profile.tensors) if tensor.dtype == "uint8"}
    assert len(packed) == {"bias": 2 * 6 * 2, "uneven": 2 * 6 * 2}.get(kind, 2 * 7 * 2)
    fetched = {t for op in plan.ops if op.kind == "prefetch" for t in plan.tensors(op)}
    if budget != "middle":
        assert bool(packed & fetched) == (budget != "resident")
    assert trial.differences(plan=plan) == []
    start = dict(trial.model().named_parameters())
    trained = trial.plain.model.named_parameters()
    assert any("lora_A" in name and not torch.equal(weight, start[name]) for name, weight in trained)


@pytest.mark.parametrize(
    ("kind", "option"), [("float32", "keep"), ("bias", "recompute"), ("bfloat16", "offload"), ("dropout", "mixed")]
)
def test_every_option_with_weights_that_leave_and_come_back_elsewhere(kind: str, option: str) -> None:
    model = TRIALS[kind].model()
    plan = plans.streamed(find_blocks(model), adamw(model), options=(option,), places=("device", "host"))
    device = HostileDevice(BUDGET, mode="lazy", check=True, poison=True)
    found, _ = trained_by(device, plan, model, adamw(model), rows(), seed=5)
    assert differences(TRIALS[kind].plain, found) == []


class Recorded(FineTune):
    """Keeps every loss."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach().clone())
        return loss


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"), **quantized.SIZES)


def fit(
    folder: Path, strategy: Any, where: Path, *, steps: int = 4, ckpt: Path | None = None, **settings: Any
) -> Result:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    quiet |= {"accelerator": "cpu", "max_epochs": -1, "num_sanity_val_steps": 0, "val_check_interval": 2}
    if settings.get("precision") == "16-mixed":  # by its name there is none on a CPU
        scaler = torch.amp.GradScaler("cpu", 2.0**34, 2.0**18, 2.0**-18, growth_interval=1)
        settings = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}  # type: ignore[arg-type]
    saving = ModelCheckpoint(dirpath=where, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = L.Trainer(strategy=strategy, max_steps=steps, callbacks=[saving], **quiet | settings)
    seed()
    module = Recorded(str(folder), quantize="nf4", lora=LoraArgs(r=2), lr=1e-2)
    made = [models.batch(nn.Linear(1, 1), seed=i) for i in range(8)]
    loaders = torch.utils.data.DataLoader(made, batch_size=None), torch.utils.data.DataLoader(made[:2], batch_size=None)
    trainer.fit(module, *loaders, ckpt_path=ckpt)
    validated = trainer.callback_metrics["val_loss"]
    prompt = {"input_ids": made[0]["input_ids"][:1], "max_new_tokens": 6, "end": set()}
    said = trainer.predict(module, torch.utils.data.DataLoader([prompt], batch_size=None))
    return Result([*module.losses, validated, torch.tensor(said)], module, trainer.optimizers[0])


@pytest.mark.parametrize(
    ("memory", "settings"),
    [
        ("400KB", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("400KB", {"precision": "bf16-mixed"}),
        ("400KB", {"precision": "16-mixed"}),
        ("10MB", {}),
    ],
    ids=str,
)
def test_fine_tuning_under_a_trainer(folder: Path, tmp_path: Path, settings: dict[str, Any], memory: str) -> None:
    expected = fit(folder, "auto", tmp_path / "plain", **settings)
    found = fit(folder, lt_offload.OffmateStrategy(memory=memory), tmp_path / "ours", **settings)
    assert differences(expected, found) == []
    if "accumulate_grad_batches" not in settings:
        return
    resumed = lt_offload.OffmateStrategy(memory=memory)
    again = fit(folder, resumed, tmp_path / "ours", ckpt=tmp_path / "ours" / "step=2.ckpt", **settings)
    assert len(again.losses) < len(expected.losses)
    assert differences(replace(expected, losses=expected.losses[-len(again.losses) :]), again) == []
