"""Adapters on stored weights train exactly as in plain PyTorch, wherever their weights are."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

import lt_offload
from lt_offload import Plan
from lt_offload.finetune.module import FineTune, LoraArgs
from lt_offload.model.blocks import find_blocks
from lt_offload.model.forms import FORMS, open_weights
from scripts.hf import cases
from scripts.hf.runs import compare, ended, train
from tests import sampling
from tests.parity.models import quantized
from tests.support import models, plans, tiny
from tests.support.engines import BUDGET, Result, differences, make_optimizer, trained_by
from tests.support.hostile.device import HostileDevice
from tests.support.profiles import budgets
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
    "int8": {"form": "int8", "dtype": torch.bfloat16},
    "fp8": {"form": "fp8"},
    "mxfp4": {"form": "mxfp4", "dtype": torch.bfloat16},
    "lossless": {"form": "lossless", "dtype": torch.bfloat16},
    "bitsandbytes": {"loaded": True},
    "gpt_oss": {"family": "gpt_oss", "form": "mxfp4", "targets": quantized.TARGETS, "dtype": torch.bfloat16},
    "qwen3_moe": {"family": "qwen3_moe", "targets": quantized.TARGETS},
    "mixtral": {"family": "mixtral", "form": "int8", "targets": quantized.TARGETS[:1]},
    "olmoe": {"family": "olmoe", "form": "lossless", "dtype": torch.bfloat16},
}
PIECES = {
    "bias": 6 * 3,
    "uneven": 7 * 3,
    "int8": 7,
    "fp8": 7 * 2,
    "mxfp4": 7 * 2,
    "lossless": 7 * 4,
    "bitsandbytes": 7 * 2,
}
PIECES |= {"gpt_oss": 6 * 2, "qwen3_moe": 6 * 3, "mixtral": 6, "olmoe": 6 * 4}
"""Tensors of bytes in a layer."""


def test_on_a_lossless_base_training_is_that_on_bfloat16() -> None:
    results = []
    for kind in ("lossless", "bfloat16"):
        model = quantized.adapted(**KINDS["lossless"])
        model = model if kind == "lossless" else open_weights(model)
        results.append(TRIALS["lossless"].run(model, adamw(model)))
    assert all(torch.equal(*losses) for losses in zip(results[0].losses, results[1].losses, strict=True))
    expected = dict(results[1].model.named_parameters())
    trained = [(name, p) for name, p in results[0].model.named_parameters() if p.requires_grad]
    assert all(torch.equal(parameter, expected[name]) for name, parameter in trained)


def rows() -> list[dict[str, Tensor]]:
    return [models.batch(nn.Linear(1, 1), seed=i) for i in range(3)]


adamw = partial(make_optimizer, name="adamw-fused")
TRIALS = {kind: Trial(partial(quantized.adapted, **settings), rows, adamw) for kind, settings in KINDS.items()}


@pytest.mark.parametrize(("kind", "budget"), sampling.grid(KINDS, BUDGETS, count=6))
def test_equals_plain_pytorch(kind: str, budget: str) -> None:
    trial = TRIALS[kind]
    plan = trial.planned(budget)
    packed = {i for i, tensor in enumerate(trial.profile.tensors) if tensor.dtype == "uint8"}
    assert len(packed) == 2 * PIECES.get(kind, 7 * 3)
    fetched = {t for op in plan.ops if op.kind == "prefetch" for t in plan.tensors(op)}
    if budget != "middle":
        assert bool(packed & fetched) == (budget != "resident")
    assert trial.differences(plan=plan) == []
    start = dict(trial.model().named_parameters())
    trained = trial.plain.model.named_parameters()
    assert any("lora_A" in name and not torch.equal(weight, start[name]) for name, weight in trained)


FAMILIES = ("gpt_oss", "qwen3_moe", "olmoe", "llama", "gemma3_vision")


@cache
def trial_of(family: str, form: str) -> Trial:
    """Return a model whose weights are stored in ``form``, in bfloat16, with adapters of its experts if it has some."""
    settings: dict[str, Any] = {"family": family, "form": form, "dtype": torch.bfloat16}
    settings |= {"targets": quantized.TARGETS} if family in quantized.EXPERTS else {}

    def batches() -> list[dict[str, Tensor]]:
        made = [models.batch(nn.Linear(1, 1), seed=i) for i in range(4)]
        if family != "gemma3_vision":
            return made
        return [quantized.with_images(batch, torch.bfloat16, seed=i) for i, batch in enumerate(made)]

    return Trial(partial(quantized.adapted, **settings), batches, adamw)


@pytest.mark.parametrize(("family", "form", "budget"), sampling.grid(FAMILIES, FORMS, BUDGETS, count=8))
def test_every_form_of_every_family(family: str, form: str, budget: str) -> None:
    assert trial_of(family, form).at(budget) == []


def in_windows(trial: Trial, plan: Plan | None = None) -> Result:
    """Train with two micro-batches for an update, and a bound on the norm of their gradients."""
    model = trial.model()
    optimizer = trial.optimizer(model)
    batches, losses = trial.batches(), []
    session: Any = nullcontext()
    if plan is not None:
        session = lt_offload.offloaded(model, optimizer, batches[0], accelerator="cpu", plan=plan, accumulate=2)
    with session as run:
        seed()
        for number, batch in enumerate(batches):
            loss = model(**batch).loss / 2
            loss.backward()
            losses.append(loss.detach().clone())
            if number % 2:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if run is None else run.clip_grad_norm_(0.1)
                losses.append(norm.clone())
                optimizer.step()
                optimizer.zero_grad()
    return Result(losses, model, optimizer)


@pytest.mark.parametrize(("family", "form", "budget"), sampling.grid(FAMILIES, FORMS, BUDGETS, count=5))
def test_every_form_of_every_family_in_windows(family: str, form: str, budget: str) -> None:
    trial = trial_of(family, form)
    plan = budgets.planned(trial.profile, budget, accumulate=2, delayed=True)
    assert differences(in_windows(trial), in_windows(trial, plan)) == []


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *(("float32", "keep"), ("bias", "recompute"), ("bfloat16", "offload"), ("dropout", "mixed")),
        *(
            ("qwen3_moe", "keep"),
            ("gpt_oss", "recompute"),
            ("mixtral", "offload"),
            ("olmoe", "mixed"),
            ("mxfp4", "mixed"),
        ),
        *(("bitsandbytes", "mixed"), ("lossless", "recompute")),
    ],
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
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"llama": tiny.model(tmp_path_factory.mktemp("llama"), **quantized.SIZES)}
    for family in ("qwen3_moe", "mixtral"):
        folder = tiny.tokenizer(tmp_path_factory.mktemp(family))
        torch.manual_seed(0)
        quantized.experts(family, vocab_size=259).save_pretrained(folder)  # type: ignore[operator]
        made[family] = folder
    return made


FITTED = {"llama": "nf4", "qwen3_moe": "mxfp4", "mixtral": "int8"}


def fit(
    folder: Path, strategy: Any, where: Path, *, form: Any, steps: int = 4, ckpt: Path | None = None, **settings: Any
) -> Result:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    quiet |= {"accelerator": "cpu", "max_epochs": -1, "num_sanity_val_steps": 0, "val_check_interval": 2}
    if settings.get("precision") == "16-mixed":  # by its name there is none on a CPU
        scaler = torch.amp.GradScaler("cpu", 2.0**34, 2.0**18, 2.0**-18, growth_interval=1)
        settings = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}  # type: ignore[arg-type]
    saving = ModelCheckpoint(dirpath=where, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = L.Trainer(strategy=strategy, max_steps=steps, callbacks=[saving], **quiet | settings)
    seed()
    module = Recorded(str(folder), quantize=form, lora=LoraArgs(r=2), lr=1e-2)
    made = [models.batch(nn.Linear(1, 1), seed=i) for i in range(8)]
    loaders = torch.utils.data.DataLoader(made, batch_size=None), torch.utils.data.DataLoader(made[:2], batch_size=None)
    trainer.fit(module, *loaders, ckpt_path=ckpt)
    validated = trainer.callback_metrics["val_loss"]
    prompt = {"input_ids": made[0]["input_ids"][:1], "max_new_tokens": 6, "end": set()}
    said = trainer.predict(module, torch.utils.data.DataLoader([prompt], batch_size=None))
    return Result([*module.losses, validated, torch.tensor(said)], module, trainer.optimizers[0])


@pytest.mark.parametrize(
    ("family", "memory", "settings"),
    [
        ("llama", "400KB", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("llama", "400KB", {"precision": "bf16-mixed"}),
        ("llama", "400KB", {"precision": "16-mixed"}),
        ("llama", "10MB", {}),
        ("qwen3_moe", "600KB", {"precision": "16-mixed"}),
        ("qwen3_moe", "600KB", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("mixtral", "1MB", {"precision": "bf16-mixed"}),
    ],
    ids=str,
)
def test_fine_tuning_under_a_trainer(
    family: str, folders: dict[str, Path], tmp_path: Path, settings: dict[str, Any], memory: str
) -> None:
    folder, form = folders[family], FITTED[family]
    expected = fit(folder, "auto", tmp_path / "plain", form=form, **settings)
    found = fit(folder, lt_offload.OffmateStrategy(memory=memory), tmp_path / "ours", form=form, **settings)
    assert differences(expected, found) == []
    if "accumulate_grad_batches" not in settings:
        return
    resumed = lt_offload.OffmateStrategy(memory=memory)
    last = tmp_path / "ours" / "step=2.ckpt"
    again = fit(folder, resumed, tmp_path / "ours", form=form, ckpt=last, **settings)
    assert len(again.losses) < len(expected.losses)
    assert differences(replace(expected, losses=expected.losses[-len(again.losses) :]), again) == []


@pytest.mark.parametrize("kind", ["bfloat16", "gpt_oss"])
def test_blocks_that_take_a_batch_in_parts(kind: str) -> None:
    trial = Trial(partial(quantized.adapted, **KINDS[kind]), rows, adamw)
    model = trial.model()
    with lt_offload.micro_batched_reference(model, 2):
        expected = trial.run(model, trial.optimizer(model))
    memory = 1_000_000
    assert differences(expected, trial.offloaded(memory=memory, micro_batches=2)) == []


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt_oss", "olmoe")]


@pytest.mark.parametrize("kind", ["fp8", "qwen3_moe", *SLOW])
def test_the_trainer_of_transformers(kind: str, tmp_path: Path) -> None:
    def model() -> nn.Module:
        return quantized.adapted(**KINDS[kind])

    _, differs = compare(cases.plain(model, gradient_accumulation_steps=2), "tight", tmp_path)
    assert differs == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "gpt_oss"])
def test_the_trainer_of_transformers_goes_on_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    make = cases.plain(TRIALS[kind].model, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2)
    whole = train(make, tmp_path)
    last = {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-2")}
    resumed = train(make, tmp_path / "again", lt_offload.hf_trainer(memory="600kB"), **last)
    assert ended(whole).differs(ended(resumed)) == []
