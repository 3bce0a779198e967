"""A LightningModule that records what it computes, and runs of it to compare bit for bit. Works in both namespaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lt_offload import OffmateStrategy
from lt_offload.model.blocks import find_blocks
from lt_offload.plan import Settings, make_plan
from lt_offload.profiling.step.first import FirstStep
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import OptionName, Profile
from lt_offload.strategy import replan
from lt_offload.strategy.first import planning, sample, survey
from tests import sampling
from tests.support import models, plans
from tests.support.engines import Result, equal, same_state

BATCHES = 3
"""Training batches per epoch."""


class Tokens(Dataset[dict[str, Tensor]]):
    """Random rows of tokens, every second one padded."""

    def __init__(self, model: torch.nn.Module, rows: int, seed: int) -> None:
        self.rows = []
        for i in range(rows):
            row = models.batch(model, batch_size=1, padding=i % 2 == 1, seed=seed + i)
            row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
            self.rows.append({name: tensor[0] for name, tensor in row.items()})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def module_class(L: ModuleType) -> type[Any]:
    """Return the module's class for a Lightning namespace."""

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, *, shuffle: bool = True, batch_size: int = 2, **options: Any) -> None:
            super().__init__()
            self.model = models.build(**options)
            self.shuffle, self.batch_size = shuffle, batch_size
            self.losses: list[Tensor] = []
            self.validation: list[Tensor] = []
            self.lrs: list[list[float]] = []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = self.model(**batch).loss
            self.log("loss", loss, prog_bar=True)
            self.losses.append(loss.detach().clone())
            return loss

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            loss = self.model(**batch).loss
            self.log("val_loss", loss)
            self.validation.append(loss.detach().clone())

        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).logits

        def on_train_batch_end(self, *args: Any) -> None:
            self.lrs.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

        def configure_optimizers(self) -> dict[str, Any]:
            parameters = [p for p in self.parameters() if p.requires_grad]
            groups = [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ]
            groups = [group for group in groups if group["params"]]
            optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
            rows = Tokens(self.model, 2 * BATCHES, 0)
            return DataLoader(rows, batch_size=self.batch_size, shuffle=self.shuffle)

        def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
            return DataLoader(Tokens(self.model, 2, 100), batch_size=2)

        predict_dataloader = val_dataloader

    return Module


Module = module_class(lightning.pytorch)


class Stepping(lightning.pytorch.LightningModule):
    """Trains a model by its own loss, with the optimizer that ``make`` returns for it."""

    def __init__(self, model: torch.nn.Module, make: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.model, self.configure_optimizers = model, partial(make, model)  # type: ignore[method-assign]
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        self.losses.append(loss.detach())
        return loss


class Forced(OffmateStrategy):
    """Has a plan that uses every option and every place, instead of a good one."""

    places: tuple[str, ...] = ("device", "paged", "host")
    options: tuple[OptionName, ...] = ("keep", "recompute", "offload", "mixed")

    def _make_plan(self, profile: Profile, settings: Settings) -> Plan:
        return plans.streamed(
            find_blocks(self._module),
            self.optimizers[0],
            options=self.options,
            places=self.places,
        )


def budgets(model: torch.nn.Module) -> list[int]:
    """Return a budget in which weights and states have to travel, one in which some have to, one in which all may stay.

    A run of the tests takes one of them: see :func:`tests.sampling.one`.
    """
    return sampling.one((tight(model), 5 * tight(model) // 2, 200_000_000))


def tight(model: torch.nn.Module) -> int:
    """Return a budget in which weights and states have to travel."""
    return 2 * sum(p.nbytes for p in model.parameters())


def profiled(patch: pytest.MonkeyPatch, change: Callable[[partial[Profile], Any], Profile]) -> None:
    """Let ``change`` say which profiles runs have, those of a first step that counts and those of one run aside.

    Args:
        patch: ends it.
        change: called with what measures, if it is called, and with the LightningModule; it returns the profile.
    """
    aside, within = sample.measure, FirstStep.profile

    def of_batch(trainer: Any, *args: Any, **options: Any) -> Profile:
        return change(partial(aside, trainer, *args, **options), trainer.lightning_module)

    def of_step(first: FirstStep, *shown: Any) -> Profile:
        first.reached()
        return change(partial(within, first, *shown), first.model)

    patch.setattr(sample, "measure", of_batch)
    patch.setattr(FirstStep, "profile", of_step)


def planned_once(patch: pytest.MonkeyPatch) -> None:
    """Let runs plan, but only once for the same question."""

    def known(profile: Profile, settings: Settings) -> Plan:
        key = repr((asdict(profile), settings))
        if key not in _PLANS:
            _PLANS[key] = make_plan(profile, settings)
        return _PLANS[key]

    for place in (planning, replan):
        patch.setattr(place, "make_plan", known)


_PLANS: dict[str, Plan] = {}


def measured_once(patch: pytest.MonkeyPatch) -> None:
    """Let runs measure but once for each kind of model, and plan but once for the same question."""
    profiled(patch, _known)
    planned_once(patch)


def _known(measure: partial[Profile], module: Any) -> Profile:
    trainer, options = module.trainer, measure.keywords
    (optimizer,) = trainer.optimizers
    tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    groups = [len(group["params"]) for group in optimizer.param_groups], optimizer.defaults
    window = trainer.accumulate_grad_batches, trainer.gradient_clip_val, trainer.precision
    parts = [value for value in measure.args if isinstance(value, int)]
    sums = trainer.strategy.settings.chunked_loss, survey._OF_LOGIT, parts
    key = repr((tensors, module.model.config, type(optimizer), groups, window, module.batch_size, options, sums))
    if key not in _PROFILES:
        _PROFILES[key] = measure()
    return _PROFILES[key]


_PROFILES: dict[str, Profile] = {}


def stepped(strategy: Any, module: Stepping, batches: list[dict[str, Tensor]], **settings: Any) -> Result:
    """Train for an epoch."""
    made = trainer(strategy, max_epochs=1, **settings)
    torch.manual_seed(5)
    made.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return Result(module.losses, module.model, made.optimizers[0])


@dataclass
class Run:
    module: Any
    trainer: Any

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.optimizers[0]


def seeded_module(seed: int = 7, *, L: ModuleType = lightning.pytorch, **options: Any) -> Any:
    L.seed_everything(seed, verbose=False)
    return (Module if L is lightning.pytorch else module_class(L))(**options)


def trainer(strategy: Any, L: ModuleType = lightning.pytorch, **settings: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {"accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 2} | quiet
    return L.Trainer(strategy=strategy, **defaults | settings)


def fit(
    strategy: Any,
    module: Any = None,
    *,
    L: ModuleType = lightning.pytorch,
    made: Any = None,
    ckpt: Path | None = None,
    **settings: Any,
) -> Run:
    """Train with ``strategy``, or with the trainer ``made`` already."""
    module = seeded_module(L=L) if module is None else module
    made = trainer(strategy, L, **settings) if made is None else made
    L.seed_everything(8, verbose=False)
    made.fit(module, ckpt_path=ckpt)
    return Run(module, made)


def finetuned(strategy: Any, module: Any, **settings: Any) -> Run:
    """Train a model of a folder for an epoch of two batches, and validate it."""
    made, rows = trainer(strategy, max_epochs=1, **settings), Tokens(module.build(), 4, 0)
    lightning.pytorch.seed_everything(4, verbose=False)
    made.fit(module, DataLoader(rows, batch_size=2), DataLoader(rows, batch_size=2))
    return Run(module, made)


def differences(a: Run, b: Run) -> list[str]:
    """Name everything that is not bitwise equal."""
    found = []
    for name in ("losses", "validation"):
        left, right = getattr(a.module, name), getattr(b.module, name)
        if len(left) != len(right) or not left:
            found.append(f"{len(left)} and {len(right)} {name}")
        found += [f"{name} {i}" for i, (x, y) in enumerate(zip(left, right, strict=False)) if not equal(x, y)]
    if a.module.lrs != b.module.lrs:
        found.append("learning rates")
    if a.trainer.global_step != b.trainer.global_step:
        found.append("global_step")
    return found + state_differences(a, b)


def state_differences(a: Run, b: Run) -> list[str]:
    """Name every weight and optimizer state that is not bitwise equal."""
    weights, others = a.module.state_dict(), b.module.state_dict()
    found = [name for name in weights if not equal(weights[name], others[name])]
    left, right = a.optimizer.state_dict(), b.optimizer.state_dict()
    if left["param_groups"] != right["param_groups"] or left["state"].keys() != right["state"].keys():
        return [*found, "optimizer groups or keys"]
    for index, state in left["state"].items():
        other = right["state"][index]
        for key, value in state.items():
            found += [] if same_state(value, other[key]) else [f"{key} of tensor {index}"]
    return found
