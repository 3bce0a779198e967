"""Weights that callbacks freeze and unfreeze while a run trains: the offmate strategy against the stock one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch.utils.data import default_collate

from lt_offload import OffmateStrategy
from lt_offload.errors import ConfigError, InfeasibleError, PlanError, UnsupportedError
from lt_offload.strategy.first import sample
from tests import sampling
from tests.support.profiles.budgets import named_by
from tests.support.trainers import Run, Tokens, budgets, differences, fit, seeded_module, state_differences

Making = Callable[[], list[Any]]


def module(options: dict[str, Any], *, named: bool = True) -> Any:
    """Return a module whose optimizer takes what is trainable when it is made, without a schedule.

    Args:
        options: of the model.
        named: it says which batch is to be measured. Otherwise the first step counts and shows what to plan, and so
            does the one after a change; each batch has padding then.
    """
    made = seeded_module(**options | ({} if named else {"shuffle": False}))
    made.configure_optimizers = lambda: torch.optim.AdamW(
        [p for p in made.parameters() if p.requires_grad], lr=1e-2, fused=True
    )
    if named:
        # Attention without padding needs less memory, and a resumed run may begin with a batch that has none.
        made.worst_case_batch = lambda: default_collate([*Tokens(made.model, 2, 0).rows])
    return made


def layers(module: Any) -> Any:
    """Return the decoder layers, those of a model with adapters, too."""
    inner = module.model
    return (inner.base_model.model if hasattr(inner, "peft_config") else inner).model.layers


class Layers(BaseFinetuning):
    """Thaws the layers, the last one first, one per epoch, as the manual of Lightning shows."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(layers(pl_module))

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch:
            self.unfreeze_and_add_param_group(layers(pl_module)[-epoch], optimizer, lr=1e-3)


class At(Callback):
    """Does something once, at the call number ``at`` of a hook; ``before`` is done before training."""

    def __init__(self, hook: str, at: int, act: Callable[[Any, Any], None], before: Callable[[Any], Any]) -> None:
        self.at, self.act, self.before = at, act, before
        setattr(self, hook, self._call)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.before(pl_module)

    def _call(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.at -= 1
        if self.at == 0:
            self.act(pl_module, trainer.optimizers[0])


def body_frozen(module: Any) -> None:
    layers(module).requires_grad_(False)


def nothing_frozen(module: Any) -> None:
    pass


def only_the_norm(module: Any) -> None:
    module.requires_grad_(False)
    module.model.model.norm.requires_grad_(True)


def thaw(module: Any, optimizer: Any) -> None:
    layers(module)[-1].requires_grad_(True)
    optimizer.add_param_group({"params": list(layers(module)[-1].parameters()), "lr": 3e-3})


def thaw_head(module: Any, optimizer: Any) -> None:
    """A head that is the embedding, too: the first block needs a backward from now on."""
    module.model.lm_head.weight.requires_grad_(True)
    optimizer.add_param_group({"params": [module.model.lm_head.weight]})


def freeze(module: Any, optimizer: Any) -> None:
    layers(module)[0].requires_grad_(False)


def freeze_and_thaw(module: Any, optimizer: Any) -> None:
    module.model.lm_head.requires_grad_(False)
    thaw(module, optimizer)


def thaw_and_write(module: Any, optimizer: Any) -> None:
    """Change weights, states, options and groups in one hook."""
    thaw(module, optimizer)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
    optimizer.param_groups[0]["lr"] = 2e-3


def other_optimizer(module: Any, optimizer: Any) -> None:
    layers(module).requires_grad_(True)
    module.trainer.strategy.setup_optimizers(module.trainer)


def thaw_base(module: Any, optimizer: Any) -> None:
    """Train the weights below adapters, too."""
    frozen = [p for p in layers(module)[-1].parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": frozen, "lr": 1e-3})


def require_equal(
    callbacks: Making, options: dict[str, Any], memories: Any = None, *, named: bool = True, **settings: Any
) -> Run:
    stock = fit("auto", module(options, named=named), callbacks=callbacks(), **settings)
    for memory in memories or budgets(seeded_module(**options)):
        ours = fit(OffmateStrategy(memory=memory), module(options, named=named), callbacks=callbacks(), **settings)
        assert differences(stock, ours) == []
        trainable = [p.requires_grad for p in ours.module.parameters()]
        assert trainable == [p.requires_grad for p in stock.module.parameters()]
        planned = sum(place != "none" for place in ours.trainer.strategy.plan.update_places)
        assert planned == sum(trainable), "the plan is not one for the tensors that are trainable now"
    return stock


OPTIONS: dict[str, Any] = {"layers": 4}
TIED: dict[str, Any] = {"layers": 4, "family": "llama-tied"}


CHANGES: dict[str, tuple[dict[str, Any], Any, str, int, Any]] = {
    "between batches": (OPTIONS, body_frozen, "on_train_batch_start", 3, thaw),
    "after a batch": (OPTIONS, body_frozen, "on_train_batch_end", 2, thaw),
    "between epochs": (OPTIONS, body_frozen, "on_train_epoch_end", 1, thaw),
    "before validation": (OPTIONS, body_frozen, "on_validation_start", 2, thaw),
    "before the first batch": (OPTIONS, body_frozen, "on_train_start", 1, thaw),
    "frozen": (OPTIONS, nothing_frozen, "on_train_batch_start", 3, freeze),
    "both": (OPTIONS, body_frozen, "on_train_epoch_start", 2, freeze_and_thaw),
    "tied": (TIED, only_the_norm, "on_train_batch_start", 3, thaw_head),
    "with writes": (OPTIONS, body_frozen, "on_train_batch_start", 3, thaw_and_write),
    "optimizer": (OPTIONS, body_frozen, "on_train_epoch_start", 2, other_optimizer),
    "adapters": ({"layers": 3, "lora": True, "dropout": 0.1}, nothing_frozen, "on_train_epoch_start", 2, thaw_base),
}


in_both_ways = pytest.mark.parametrize("named", [True, False], ids=["aside", "as it trains"])
"""How the run that has changed is measured."""


@pytest.mark.parametrize(("name", "named"), sampling.grid(CHANGES, [True, False], count=8))
def test_changes_in_hooks_equal_stock(name: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options, before, hook, at, act = CHANGES[name]
    if not named:
        monkeypatch.setattr(sample, "measure", lambda *_, **__: pytest.fail("a step ran that does not count"))
    require_equal(lambda: [At(hook, at, act, before)], options, named=named)


@pytest.mark.slow
@in_both_ways
@pytest.mark.parametrize("clip", sampling.some([{}, {"gradient_clip_val": 0.1}], 1), ids=str)
def test_thawing_in_the_middle_of_a_window_keeps_the_gradients_so_far(clip: dict[str, Any], named: bool) -> None:
    thawing = ("on_train_batch_start", 2, thaw, body_frozen)
    require_equal(lambda: [At(*thawing)], OPTIONS, named=named, accumulate_grad_batches=3, **clip)


def test_freezing_in_the_middle_of_a_window_is_refused() -> None:
    module_ = module({"layers": 3, "batch_size": 1})
    callback = At("on_train_batch_start", 3, freeze, nothing_frozen)
    with pytest.raises(UnsupportedError, match="layers.0.* was frozen after 2 micro-batches: plain PyTorch"):
        fit(OffmateStrategy(memory="200MB"), module_, callbacks=[callback], accumulate_grad_batches=4)


@pytest.mark.slow
def test_a_checkpoint_of_stock_goes_on_as_in_stock(tmp_path: Path) -> None:
    """What stock leaves frozen then, stays frozen: it has a group for each thawed layer, and does not say which."""
    ordered = {**OPTIONS, "shuffle": False}
    saver = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    fit("auto", module(ordered), callbacks=[Layers(), saver], enable_checkpointing=True, max_epochs=3)
    path = tmp_path / "epoch=1.ckpt"
    stock = fit("auto", module(ordered), callbacks=[Layers()], ckpt=path, max_epochs=4)
    ours = fit(OffmateStrategy(memory="200MB"), module(ordered), callbacks=[Layers()], ckpt=path, max_epochs=4)
    assert differences(stock, ours) == []
    assert len(ours.optimizer.param_groups) == 4


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("at", ["epoch=1-step=6", "epoch=2-step=8"])
def test_a_resumed_run_trains_what_the_run_had_thawed(at: str, recompute: bool, tmp_path: Path) -> None:
    """At the end of an epoch and within one; Lightning's callback takes its groups up again, and thaws nothing."""
    expected = fit("auto", module(OPTIONS), callbacks=[Layers()], max_epochs=4)
    for memory in budgets(seeded_module(**OPTIONS)):
        folder = tmp_path / f"{memory}"
        saver = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        settings = {"memory": memory, "activation_offload": not recompute}
        saving = {"callbacks": [Layers(), saver], "enable_checkpointing": True, "max_epochs": 3}
        fit(OffmateStrategy(**settings), module(OPTIONS), **saving)
        path = folder / f"{at}.ckpt"
        ours = fit(OffmateStrategy(**settings), module(OPTIONS), callbacks=[Layers()], ckpt=path, max_epochs=4)
        assert state_differences(expected, ours) == []
        assert ours.module.losses
        assert all(map(torch.equal, expected.module.losses[-len(ours.module.losses) :], ours.module.losses))
        trainable = [p.requires_grad for p in ours.module.parameters()]
        assert trainable == [p.requires_grad for p in expected.module.parameters()]


def saved_after_thawing(folder: Path) -> Path:
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    callbacks = [At("on_train_batch_start", 2, thaw, body_frozen), saver]
    fit(OffmateStrategy(memory="200MB"), module(OPTIONS), callbacks=callbacks, enable_checkpointing=True, max_epochs=1)
    return folder / "step=3.ckpt"


@pytest.mark.slow
def test_weights_that_only_the_optimizer_of_the_checkpoint_held_are_named(tmp_path: Path) -> None:
    path = saved_after_thawing(tmp_path)
    frozen = At("on_train_start", 99, thaw, body_frozen)
    said = r"trained weights that no optimizer .*layers\.3\.\S+ and \d+ more; if a callback"
    with pytest.raises(ConfigError, match=said):
        fit(OffmateStrategy(memory="200MB"), module(OPTIONS), callbacks=[frozen], ckpt=path, max_epochs=2)


@pytest.mark.slow
def test_weights_that_a_hook_freezes_again_are_named(tmp_path: Path) -> None:
    path = saved_after_thawing(tmp_path)

    class Freezing(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            body_frozen(pl_module)

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            thaw(pl_module, trainer.optimizers[0])

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            body_frozen(pl_module)

    with pytest.warns(UserWarning, match=r"frozen now by a hook of this one: .*layers\.3\.\S+ and \d+ more"):
        fit(OffmateStrategy(memory="200MB"), module(OPTIONS), callbacks=[Freezing()], ckpt=path, max_epochs=2)


@pytest.mark.slow
def test_weights_frozen_since_train_again(tmp_path: Path) -> None:
    """Frozen at the start of the resumed run, held by its optimizer: they train as in the checkpoint's run."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    expected = fit("auto", module(OPTIONS), max_epochs=2)
    fit(OffmateStrategy(memory="200MB"), module(OPTIONS), callbacks=[saver], enable_checkpointing=True, max_epochs=1)
    again = At("on_fit_start", 1, lambda made, optimizer: body_frozen(made), nothing_frozen)
    path = tmp_path / "step=2.ckpt"
    ours = fit(OffmateStrategy(memory="200MB"), module(OPTIONS), callbacks=[again], ckpt=path, max_epochs=2)
    assert state_differences(expected, ours) == []


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_a_plan_that_was_given_cannot_follow(tmp_path: Path) -> None:
    first = module(OPTIONS)
    body_frozen(first)
    path = fit(OffmateStrategy(memory="200MB"), first, max_epochs=1).trainer.strategy.plan.save(tmp_path / "plan.json")
    callback = At("on_train_batch_start", 3, thaw, body_frozen)
    with pytest.raises(
        PlanError, match="plan=.* cannot be carried out any more: requires_grad of weight .* leave plan"
    ):
        fit(OffmateStrategy(memory="200MB", plan=path), module(OPTIONS), callbacks=[callback])


def test_thawing_what_the_optimizer_does_not_hold_is_refused() -> None:
    callback = At("on_train_batch_start", 2, lambda m, o: layers(m)[0].requires_grad_(True), body_frozen)
    with pytest.raises(UnsupportedError, match="trainable parameter model.model.layers.0.* optimizer does not hold"):
        fit(OffmateStrategy(memory="200MB"), module(OPTIONS), callbacks=[callback])


def test_thawing_in_the_training_step_is_refused() -> None:
    made = module(OPTIONS)
    body_frozen(made)
    step = made.training_step

    def thawing(batch: Any, batch_idx: int) -> Any:
        if made.trainer.global_step == 1 and not layers(made)[-1].mlp.up_proj.weight.requires_grad:
            thaw(made, made.trainer.optimizers[0])
        return step(batch, batch_idx)

    made.training_step = thawing
    with pytest.raises(UnsupportedError, match=r"requires_grad of weight .* do it in a hook before the training step"):
        fit(OffmateStrategy(memory="200MB"), made)


def test_memory_that_is_too_small_for_what_was_thawed_is_said() -> None:
    frozen = module(OPTIONS)
    only_the_norm(frozen)
    memory = fit(OffmateStrategy(memory="200MB", planner="resident"), frozen, max_epochs=1).trainer.strategy.plan
    least = memory.predicted.device_peak_bytes

    def everything(made: Any, optimizer: Any) -> None:
        other = [p for p in made.parameters() if not p.requires_grad]
        for parameter in other:
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": other})

    callback = At("on_train_batch_start", 3, everything, only_the_norm)
    said = r"requires_grad of weight .* was changed to True \(unfrozen\): .*needs memory="
    with pytest.raises(InfeasibleError, match=said):
        fit(OffmateStrategy(memory=least, planner="resident"), module(OPTIONS), callbacks=[callback])


class Everything(BaseFinetuning):
    """Trains the norm, and from the second epoch on all weights."""

    def freeze_before_training(self, pl_module: Any) -> None:
        only_the_norm(pl_module)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            frozen = [m for m in pl_module.modules() if any(not p.requires_grad for p in m.parameters(recurse=False))]
            self.unfreeze_and_add_param_group(frozen, optimizer)


@pytest.mark.slow
def test_memory_that_will_be_too_small_is_said_at_the_start() -> None:
    """With the figure with which the run goes on, as stock does, once everything trains."""
    frozen = module(OPTIONS)
    only_the_norm(frozen)
    least = named_by(lambda: fit(OffmateStrategy(memory=1000), frozen, max_epochs=1))
    said = r"Everything may unfreeze \d+ weights .* is enough"
    with pytest.warns(UserWarning, match=said) as warned:
        fit(OffmateStrategy(memory=least), module(OPTIONS), callbacks=[Everything()], max_epochs=1)
    (message,) = (str(one.message) for one in warned if "may unfreeze" in str(one.message))
    enough = message.split("memory=")[-1].split(" ")[0]
    require_equal(lambda: [Everything()], OPTIONS, [enough], max_epochs=2)
