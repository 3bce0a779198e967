"""Training through a Lightning Trainer: the offmate strategy against the stock one, bit for bit."""

from __future__ import annotations

import copy
import csv
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lt_offload import AdamW, OffmateStrategy
from lt_offload.errors import ConfigError, OverBudget, PlanError, UnsupportedError
from lt_offload.execute.engine import Engine
from lt_offload.execute.iteration import HALFWAY
from lt_offload.plan.verify.check import check
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from lt_offload.strategy.metrics import Metrics
from tests import sampling
from tests.support.trainers import (
    BATCHES,
    Forced,
    Module,
    Tokens,
    budgets,
    differences,
    fit,
    seeded_module,
    state_differences,
    trainer,
)

MEMORY = "200MB"
NAMESPACES = (lightning.pytorch, pytorch_lightning)


# -- one fit ----------------------------------------------------------------------------------------------------------


MODELS: list[dict[str, Any]] = [
    {"dropout": 0.1},
    {"dropout": 0.1, "lora": True},
    {"family": "llama-tied", "use_cache": True},
    {"family": "bloom", "dropout": 0.1},
]
PRECISIONS = ["32-true", "bf16-true"]


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(("options", "precision"), sampling.grid(MODELS, PRECISIONS), ids=str)
def test_every_option_and_place_equals_stock(options: dict[str, Any], precision: Any) -> None:
    stock = fit("auto", seeded_module(**options), precision=precision)
    ours = fit(Forced(), seeded_module(**options), precision=precision)
    assert differences(stock, ours) == []
    assert ours.trainer.strategy.engine is None
    if "use_cache" in options:
        assert ours.module.model.config.use_cache


def test_the_public_class_trains_under_pytorch_lightning() -> None:
    strategy = OffmateStrategy(memory=MEMORY)
    ours = fit(strategy, L=pytorch_lightning, max_epochs=1)
    assert isinstance(strategy, pytorch_lightning.strategies.Strategy)
    assert strategy.plan is not None
    assert differences(ours, fit("auto", L=pytorch_lightning, max_epochs=1)) == []


@pytest.mark.parametrize("L", NAMESPACES, ids=lambda L: L.__name__)
def test_by_name_in_both_namespaces(L: ModuleType) -> None:
    ours = fit("offmate", L=L)
    assert ours.trainer.strategy.namespace == L.__name__
    assert differences(fit("auto", L=L), ours) == []


def test_a_second_fit_continues_like_stock() -> None:
    runs = []
    for strategy in ("auto", OffmateStrategy(memory=MEMORY)):
        run = fit(strategy, max_epochs=1)
        run.trainer.fit_loop.max_epochs = 2
        runs.append(fit(None, run.module, made=run.trainer))
    assert runs[0].trainer.global_step == 2 * BATCHES
    assert differences(*runs) == []
    assert sum(isinstance(c, Metrics) for c in runs[1].trainer.callbacks) == 1


def test_fits_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Any]] = []
    install = Engine.install

    def watched(engine: Engine) -> None:
        install(engine)
        seen.extend([weakref.ref(engine), weakref.ref(engine.device)])

    monkeypatch.setattr(Engine, "install", watched)
    made = trainer(OffmateStrategy(memory=MEMORY), max_epochs=1)
    first = fit(None, made=made).module
    seen.append(weakref.ref(first))
    del first
    made.fit_loop.max_epochs = 2
    second = fit(None, made=made).module
    gc.collect()
    assert [ref() for ref in seen] == [None] * 9  # two engines in each fit, one of them before its first batch
    assert not any("forward" in vars(module) for module in second.model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in second.parameters())


def test_gradient_checkpointing_is_off_while_it_trains(caplog: pytest.LogCaptureFixture) -> None:
    runs = []
    for strategy in ("auto", OffmateStrategy(memory="400KB")):
        module = seeded_module()
        checkpointed = [m for m in module.model.modules() if hasattr(m, "gradient_checkpointing")]
        for member in checkpointed:
            member.gradient_checkpointing = True
            member._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        runs.append(fit(strategy, module, max_epochs=1))
        assert checkpointed
        assert all(member.gradient_checkpointing for member in checkpointed)
    assert differences(*runs) == []
    said = [record.message for record in caplog.records if "gradient checkpointing of" in record.message]
    assert len(said) == 1
    assert "is off while the model trains" in said[0]


# -- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [MEMORY, "100KB"])
def test_validate_and_predict_without_training_then_train(memory: str) -> None:
    runs, answers = [], []
    for ours in (False, True):
        module, made = seeded_module(layers=6), trainer(OffmateStrategy(memory=memory) if ours else "auto")
        (metrics,) = made.validate(module, verbose=False)
        (logits,) = made.predict(module)
        answers.append((metrics["val_loss"], logits))
        runs.append(fit(OffmateStrategy(memory=MEMORY) if ours else "auto", module, max_epochs=1))
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])
    assert differences(*runs) == []


def test_predictions_that_are_kept_take_no_device_memory() -> None:
    """The loop keeps them on the host; together they are larger than the budget."""
    answers = []
    for ours in (False, True):
        made, module = trainer(OffmateStrategy(memory="100KB") if ours else "auto"), seeded_module()
        answers.append(torch.cat(made.predict(module, DataLoader(Tokens(module.model, 60, seed=1), batch_size=2))))
    assert answers[0].nbytes > 100_000
    assert torch.equal(*answers)


@pytest.mark.parametrize("verb", ["validate", "predict"])
@pytest.mark.parametrize("memory", ["1KB", "20KB"])
def test_an_evaluation_that_lacks_memory_names_the_setting_and_its_value(verb: str, memory: str) -> None:
    evaluate = getattr(trainer(OffmateStrategy(memory=memory)), verb)
    name = type(module := seeded_module(layers=6)).__name__
    needs = f"an evaluation of {name} needs more than memory={memory[:-2]} kB: set memory= to more \\("
    with pytest.raises(OverBudget, match=needs):
        evaluate(module)


# -- checkpoints ------------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[], Any]] = {"stock": lambda: "auto", "ours": Forced}


ORDERS = [("ours", "ours"), ("ours", "stock"), ("stock", "ours")]


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(("order", "kind"), sampling.grid(ORDERS, [*PRECISIONS, "masters", "noise"], count=6), ids=str)
def test_resumed_training_equals_one_run(
    order: tuple[str, str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters are kept, too, whoever writes the checkpoint and whoever reads it; noise needs no more than the step."""
    made, first, second = Module.configure_optimizers, *order

    def with_our_optimizer(module: Any) -> dict[str, Any]:
        found = made(module)
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in found["optimizer"].param_groups]
        optimizer = AdamW(groups, lr=1e-3, stochastic_rounding=kind == "noise")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    options, settings = {"shuffle": False}, {"precision": kind}
    if kind not in PRECISIONS:
        monkeypatch.setattr(Module, "configure_optimizers", with_our_optimizer)
        options, settings = options | {"dtype": torch.bfloat16}, {}
    whole = fit("auto", seeded_module(**options), **settings)
    saving = {"callbacks": [ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=BATCHES)]}
    fit(MAKERS[first](), seeded_module(**options), max_epochs=1, enable_checkpointing=True, **saving, **settings)
    resumed = fit(MAKERS[second](), seeded_module(99, **options), ckpt=tmp_path / "half.ckpt", **settings)
    assert resumed.trainer.global_step == 2 * BATCHES
    assert all(map(torch.equal, whole.module.losses[BATCHES:], resumed.module.losses))
    assert len(resumed.module.losses) == BATCHES
    assert whole.module.lrs[BATCHES:] == resumed.module.lrs
    assert state_differences(whole, resumed) == []
    assert {"master" in state for state in resumed.optimizer.state.values()} == {kind == "masters"}


class Rollback(Callback):
    """Goes back to the state after the first step, after the third, while weights are on the device."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        strategy, optimizer = trainer.strategy, trainer.optimizers[0]
        if trainer.global_step == 1:
            weights, state = strategy.lightning_module_state_dict(), strategy.optimizer_state(optimizer)
            self.saved = copy.deepcopy({"state_dict": weights, "optimizer_states": [state]})
        elif trainer.global_step == 3:
            strategy.load_model_state_dict(self.saved)
            strategy.load_optimizer_state_dict(copy.deepcopy(self.saved))


@pytest.mark.usefixtures("hostile")
def test_loading_in_the_middle_of_training_equals_stock() -> None:
    assert differences(fit("auto", callbacks=[Rollback()]), fit(Forced(), callbacks=[Rollback()])) == []


# -- faults -----------------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


class Fault(Callback):
    """Raises in the middle of the training batch ``batch_idx``."""

    def __init__(self, where: str, batch_idx: int = 2) -> None:
        self.where, self.batch_idx = where, batch_idx

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        layer = pl_module.model.model.layers[1]
        if batch_idx == self.batch_idx and self.where == "forward":
            layer.register_forward_pre_hook(self.fail)
        elif batch_idx == self.batch_idx:
            layer.register_forward_hook(lambda module, args, out: out.register_hook(self.fail) and None)

    def on_validation_batch_end(self, *args: Any) -> None:
        if self.where == "validation":
            self.fail()

    def fail(self, *args: Any) -> None:
        raise Stop(self.where)


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("where", ["forward", "backward", "validation"])
def test_a_fault_is_reported_and_leaves_a_usable_model_and_process(where: str) -> None:
    module = seeded_module()
    with pytest.raises(Stop, match=where):
        fit(Forced(), module, callbacks=[Fault(where)])
    assert not any("forward" in vars(m) for m in module.model.modules())
    assert all(p.isfinite().all() for p in module.parameters())
    assert differences(fit("auto"), fit(Forced())) == []


def test_an_interrupt_between_two_updates_saves_nothing(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="last", save_on_exception=True)
    with pytest.warns(UserWarning, match="last.ckpt is not written"), pytest.raises(Stop) as broken:
        fit(Forced(), callbacks=[saver, Fault("backward")], enable_checkpointing=True)
    assert broken.value.__notes__ == [HALFWAY]
    assert not list(tmp_path.iterdir())


class Broken(Callback):
    """Raises in one batch of the second epoch: before the step, in the forward or after the update."""

    def __init__(self, hook: str, batch_idx: int) -> None:
        self.batch_idx = batch_idx
        setattr(self, hook, self._fail)

    def _fail(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1 and trainer.fit_loop.epoch_loop.batch_progress.current.ready > self.batch_idx:
            raise Stop


def of_one_kind() -> Any:
    """A module whose batches are all the same, as stock Lightning begins the data anew when a run is resumed."""
    module = seeded_module()
    rows = [Tokens(module.model, 1, 0)[0]] * 2 * BATCHES
    module.train_dataloader = lambda: DataLoader(rows, batch_size=2)
    return module


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*is set, but there is no last checkpoint")
@pytest.mark.parametrize("batch_idx", range(BATCHES))
@pytest.mark.parametrize(
    ("hook", "settings"),
    [
        ("on_train_batch_start", {"accumulate_grad_batches": 2}),
        ("on_before_backward", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        ("on_before_backward", {"accumulate_grad_batches": 3}),
        ("on_before_backward", {}),
    ],
    ids=str,
)
def test_a_checkpoint_of_an_exception_is_stock_s(hook: str, settings: Any, batch_idx: int, tmp_path: Path) -> None:
    """It has the weights of the last update, and a run that is resumed from it goes on with the batch that failed."""
    pending = batch_idx % settings.get("accumulate_grad_batches", 1) > 0
    runs, saved = [], []
    settings = settings | {"limit_val_batches": 0}
    for memory in (None, *budgets(seeded_module())):
        path = tmp_path / str(memory) / "on_exception.ckpt"
        callbacks = [OnExceptionCheckpoint(path.parent), Broken(hook, batch_idx)]
        warning = pytest.warns(UserWarning, match="begins anew behind them") if pending and memory else nullcontext()
        strategy = OffmateStrategy(memory=memory) if memory else "auto"
        with warning, pytest.raises(Stop):
            fit(strategy, of_one_kind(), callbacks=callbacks, enable_checkpointing=True, **settings)
        saved.append(torch.load(path))
        strategy = OffmateStrategy(memory=memory) if memory else "auto"
        # The first update has the gradients of fewer batches.
        warning = pytest.warns(UserWarning, match="no window of .* ends") if pending and memory else nullcontext()
        with warning:
            runs.append(fit(strategy, of_one_kind(), ckpt=path, **settings))
    for run, found in zip(runs[1:], saved[1:], strict=True):
        weights = found["state_dict"]
        assert found["global_step"] == saved[0]["global_step"]
        assert all(torch.equal(value, weights[name]) for name, value in saved[0]["state_dict"].items())
        assert len(run.module.losses) == BATCHES - batch_idx
        assert all(map(torch.equal, runs[0].module.losses, run.module.losses))
        assert state_differences(runs[0], run) == []


# -- what a run keeps and shows ---------------------------------------------------------------------------------------


def test_run_folder_metrics_and_replay(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="run")
    saver = ModelCheckpoint(tmp_path / "checkpoints")
    run = fit(OffmateStrategy(memory=MEMORY), logger=logger, enable_checkpointing=True, callbacks=[saver])
    folder = tmp_path / "run"
    plan, profile = Plan.load(folder / "plan.json"), Profile.load(folder / "profile.json")
    assert plan.fingerprint == profile.fingerprint
    assert check(plan, profile) == []
    trace = Trace.load(folder / "trace.json")
    assert trace.source == "measured"
    assert {span.op for span in trace.spans} >= {op.id for op in plan.ops if op.kind in ("forward", "backward")}

    header, *rows = csv.reader((folder / "metrics.csv").read_text().splitlines())
    columns = {name: [row[i] for row in rows if row[i]] for i, name in enumerate(header)}
    steps = 2 * BATCHES // 2
    for name in ("tokens_per_s", "step_s", "step_vs_plan", "device_peak_gb", "host_peak_gb", "grad_norm", "loss"):
        assert len(columns[name]) == steps, name
        assert all(float(value) > 0 for value in columns[name])
    assert float(columns["device_peak_gb"][-1]) * 1e9 == pytest.approx(trace.device_peak, rel=1e-6)
    order = [type(c).__name__ for c in run.trainer.callbacks]
    assert order.index("Metrics") < order.index("ModelCheckpoint")
    assert set(run.trainer.progress_bar_metrics) == {"loss", "tokens_per_s"}, "80 columns have no room for more"
    assert {"device_peak_gb", "host_peak_gb"} <= set(run.trainer.callback_metrics)

    again = fit(OffmateStrategy(plan=folder / "plan.json"))
    assert again.trainer.strategy.plan == plan
    assert differences(run, again) == []


@pytest.mark.parametrize(
    ("first", "settings"),
    [
        (3, {"log_every_n_steps": 2, "gradient_clip_val": 1.0}),
        (2, {"log_every_n_steps": 50, "accumulate_grad_batches": 2}),
        (1, {"log_every_n_steps": 50, "max_steps": 1}),
    ],
)
def test_a_loss_that_is_not_finite_is_said_once(first: int, settings: dict[str, Any]) -> None:
    module = seeded_module()
    step = module.training_step

    def breaks(batch: Any, batch_idx: int) -> torch.Tensor:
        loss = step(batch, batch_idx)
        updates = len(module.losses) - 1
        return loss * float("nan" if updates // settings.get("accumulate_grad_batches", 1) == first - 1 else 1)

    module.training_step = breaks
    with pytest.warns(UserWarning, match=f"^offmate: the loss of step {first} is not finite") as told:
        fit(OffmateStrategy(memory=MEMORY), module, **settings)
    [said] = [str(one.message) for one in told if "not finite" in str(one.message)]
    assert ("a lower learning rate" in said) == (first > 1)
    assert ("gradient_clip_val=1.0" in said) == (first > 1 and "gradient_clip_val" not in settings)


@pytest.mark.own_plan("a larger batch fits where every block runs again")
def test_a_plan_of_another_model_or_a_larger_device_is_refused(tmp_path: Path) -> None:
    fit(OffmateStrategy(memory="400KB", report_dir=tmp_path), max_steps=1)
    with pytest.raises(PlanError, match="another model"):
        fit(OffmateStrategy(plan=tmp_path / "plan.json"), seeded_module(layers=2))
    with pytest.raises(PlanError, match="raise memory"):
        fit(OffmateStrategy(plan=tmp_path / "plan.json", memory="300KB"))
    with pytest.raises(PlanError, match="cannot be carried out"):
        fit(OffmateStrategy(plan=tmp_path / "plan.json"), seeded_module(batch_size=5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_clip_val": 0.1}, "before the norm of all gradients is known"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 needs room for sums"),
        (
            {"callbacks": [LambdaCallback(on_before_optimizer_step=lambda *_: None)]},
            "on_before_optimizer_step, where hooks look",
        ),
    ],
    ids=["clipping", "windows", "hooks"],
)
def test_a_plan_whose_updates_come_too_early_is_refused_before_training(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """One that was made with the same settings, or for a longer window, is replayed."""
    for planned in ({}, settings | {"accumulate_grad_batches": 1 + settings.get("accumulate_grad_batches", 0)}):
        made = fit(OffmateStrategy(memory=MEMORY), max_epochs=1, **planned).trainer.strategy.plan
        replay = OffmateStrategy(memory=MEMORY, plan=made.save(tmp_path / "plan.json"))
        if planned:
            assert differences(fit("auto", **settings), fit(replay, **settings)) == []
        else:
            with pytest.raises(PlanError, match=message):
                fit(replay, **settings)


# -- batches ----------------------------------------------------------------------------------------------------------


def test_batch_size_is_set_before_the_loaders_are_made() -> None:
    ours = fit(OffmateStrategy(memory=MEMORY, batch_size=1), max_epochs=1)
    assert ours.trainer.global_step == 2 * BATCHES
    assert differences(fit("auto", seeded_module(batch_size=1), max_epochs=1), ours) == []


def test_refusals_come_before_anything_is_loaded() -> None:
    module = seeded_module()
    module.prepare_data = lambda: pytest.fail("data was prepared")
    with pytest.raises(UnsupportedError, match="detect_anomaly=True"):
        fit(OffmateStrategy(memory=MEMORY), module, detect_anomaly=True)
    module = seeded_module()
    del module.batch_size
    with pytest.raises(ConfigError, match="batch_size=2 cannot be set"):
        fit(OffmateStrategy(memory=MEMORY, batch_size=2), module)
