"""Hooks come in plain Lightning's order, and no step runs in secret: the first one counts, and shows what to plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lt_offload import OffmateStrategy
from lt_offload.errors import ConfigError, InfeasibleError, OverBudget
from lt_offload.strategy.first import sample
from tests import sampling
from tests.support.trainers import BATCHES, Forced, Module, differences, fit, seeded_module

HOOKS = ("on_", "configure_optimizers", "train_dataloader", "val_dataloader", "prepare_data", "setup", "teardown")
HOOKS += ("training_step", "validation_step", "lr_scheduler_step", "transfer_batch_to_device")
LEFT_OUT = ("on_gpu", "on_tpu", "on_load_checkpoint", "on_exception")
GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Hooks that make another kind of plan."""


class Calls:
    """What is called, and the state in which it is."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def noting(self, base: Any, names: list[str]) -> dict[str, Any]:
        return {name: self._noting(base, name) for name in names}

    def _noting(self, base: Any, name: str) -> Callable[..., Any]:
        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = getattr(owner, "_trainer", None) or args[0]
            state = "none"
            if isinstance(trainer, L.Trainer):
                loop = trainer.fit_loop.epoch_loop
                drawn = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
                batches, modes = loop.batch_progress.current.ready, [m.training for m in owner_modules(trainer)]
                state = f"{trainer.state.stage} {trainer.global_step} {batches} {drawn} {modes}"
            self.seen.append((base.__name__, name, state))
            return getattr(base, name)(owner, *args, **kwargs)

        return call


def owner_modules(trainer: L.Trainer) -> list[torch.nn.Module]:
    return [] if trainer.lightning_module is None else list(trainer.lightning_module.modules())


def hooks(base: Any, kept: tuple[str, ...], left_out: tuple[str, ...]) -> list[str]:
    names = [name for name in dir(base) if name.startswith(kept) and callable(getattr(base, name))]
    return [name for name in names if not name.startswith(left_out)]


def recorded(strategy: Any, left_out: tuple[str, ...], **settings: Any) -> tuple[Any, list[tuple[str, str, str]]]:
    calls = Calls()
    module = type("Noting", (Module,), calls.noting(Module, hooks(Module, HOOKS, left_out)))
    names = hooks(L.Callback, ("on_", "setup", "teardown"), left_out)
    callback = type("Callback", (L.Callback,), calls.noting(L.Callback, names))()
    L.seed_everything(7, verbose=False)
    run = fit(strategy, module(), callbacks=[callback], num_sanity_val_steps=1, **settings)
    return run, calls.seen


@pytest.mark.filterwarnings("ignore:You have overridden")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("left_out", [LEFT_OUT, LEFT_OUT + GRADIENTS], ids=["", "without gradients"])
def test_what_is_called_and_when_is_as_in_stock_lightning(left_out: tuple[str, ...], accumulate: int) -> None:
    stock, expected = recorded("auto", left_out, accumulate_grad_batches=accumulate)
    ours, found = recorded(OffmateStrategy(memory="400KB"), left_out, accumulate_grad_batches=accumulate)
    assert len(expected) > 100
    assert found == expected
    assert [name for _, name, _ in found].count("training_step") == len(ours.module.losses) == 2 * BATCHES
    assert differences(stock, ours) == []


class Late(Module):
    """Has what its step needs from hooks, as Lightning's documentation shows it."""

    def on_train_start(self) -> None:
        self.factor = torch.tensor(0.5)
        self.kept = self.model.lm_head.weight.detach()
        norm = self.model.model.norm.weight
        norm.data = norm.data * 1.5

    def on_train_epoch_start(self) -> None:
        self.outputs: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:  # type: ignore[override]
        self.scale = 1 + batch_idx
        return -1 if self.skips and self.current_epoch == 0 else None

    skips = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert batch_idx + 1 == self.scale
        loss = super().training_step(batch, batch_idx) * self.factor
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.outputs).mean() if self.outputs else torch.zeros(()))


class Skipping(Late):
    skips = True


def made(kind: type[Module]) -> Module:
    L.seed_everything(7, verbose=False)
    return kind()


STRATEGIES: dict[str, Callable[[], Any]] = {
    "forced": Forced,
    "tight": lambda: OffmateStrategy(memory="300KB"),
    "recompute": lambda: OffmateStrategy(memory="300KB", activation_offload=False),
    "resident": lambda: OffmateStrategy(memory="200MB", planner="resident"),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("kind", "strategy"), sampling.grid([Late, Skipping], list(STRATEGIES)))
def test_a_step_may_need_what_hooks_before_it_make(kind: type[Module], strategy: str) -> None:
    settings = {"reload_dataloaders_every_n_epochs": 0}
    stock, ours = fit("auto", made(kind), **settings), fit(STRATEGIES[strategy](), made(kind), **settings)
    assert differences(stock, ours) == []
    assert torch.equal(ours.module.kept, stock.module.kept)
    assert ours.trainer.callback_metrics["mean"] == stock.trainer.callback_metrics["mean"]
    assert len(ours.module.outputs) == len(stock.module.outputs)


def test_the_size_is_chosen_before_these_hooks() -> None:
    said = r"batch_size='auto' runs training_step before training.*'scale'; Late\.on_train_start is called later"
    with pytest.raises(ConfigError, match=said):
        fit(OffmateStrategy(memory="100MB", batch_size="auto"), made(Late))


def test_no_data_are_asked_in_a_process_of_their_own_and_no_step_runs_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "in_a_fork", lambda *_, **__: pytest.fail("the data were asked"))
    monkeypatch.setattr(sample, "measure", lambda *_, **__: pytest.fail("a step ran before the first one"))
    strategy = OffmateStrategy(memory="300KB")
    module = seeded_module()
    seen: list[Any] = []
    module.on_train_start = lambda: seen.append((strategy.plan, strategy.profile))
    module.on_train_batch_end = lambda *_: seen.append(
        strategy.engine.handover.staying
    )  # something holds weights: a graph?
    fit(strategy, module, max_steps=2)
    assert len(module.losses) == 2
    assert seen == [(None, None), False, False]
    assert strategy.plan is not None


def test_a_run_that_is_over_needs_no_plan(tmp_path: Any) -> None:
    saver = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=3)
    fit(Forced(), callbacks=[saver], enable_checkpointing=True, max_steps=3)
    strategy = OffmateStrategy(memory="300KB")
    fit(strategy, ckpt=tmp_path / "half.ckpt", max_steps=3)
    assert (strategy.plan, strategy.trace, strategy.engine) == (None, None, None)


def test_a_step_that_is_measured_in_the_check_of_validation_trains() -> None:
    """Dropout holds what an evaluation does not: a plan without it would name too little memory."""
    module, modes = seeded_module(family="llama", dropout=0.2), list[tuple[bool, bool]]()

    class Short(type(module)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            modes.append((self.trainer.sanity_checking, all(part.training for part in self.modules())))
            loss: Tensor = super().training_step(batch, batch_idx)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise OverBudget("no room")

    module.__class__ = Short
    with pytest.raises(OverBudget, match="no room"):
        fit(OffmateStrategy(memory="100MB"), module, num_sanity_val_steps=1)
    assert modes == [(True, True)]
    assert not module.training  # as it was in the check, which has not ended


@pytest.mark.slow
def test_so_it_is_of_a_step_that_needs_hooks() -> None:
    """It cannot be measured before they are called: its first step runs without a plan, and shows what it needs."""
    with pytest.raises(InfeasibleError, match=r"memory=1 kB is too small for a validation.*num_sanity_val_steps=0"):
        fit(OffmateStrategy(memory=1000), made(Late), precision="bf16-true", num_sanity_val_steps=1)
    with pytest.raises(InfeasibleError, match="memory=1 kB is too small.*is enough") as caught:
        fit(OffmateStrategy(memory=1000), made(Late), precision="bf16-true", num_sanity_val_steps=0)
    assert caught.value.needed_bytes is not None
    fit(OffmateStrategy(memory=caught.value.needed_bytes), made(Late), precision="bf16-true", max_steps=2)
