"""Runs that are resumed from any checkpoint, or interrupted and resumed, against runs that never stopped."""

from __future__ import annotations

import functools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lt_offload import OffmateStrategy
from lt_offload.errors import InfeasibleError
from lt_offload.profiling.hardware import TakenHostBytes
from lt_offload.schema.profile import Profile
from lt_offload.strategy.checkpoint import resume
from lt_offload.strategy.checkpoint.resume import FILE, _warn_of_workers
from tests import sampling
from tests.support.machine import takes_no_more
from tests.support.trainers import BATCHES, Forced, Run, fit, profiled, seeded_module, state_differences, tight


@pytest.fixture(autouse=True)
def one_profile() -> Iterator[pytest.MonkeyPatch]:
    """Profile once: the plan is forced, and all runs are of one model. Each is measured again once this is undone."""
    with pytest.MonkeyPatch.context() as patch:
        profiled(patch, measured)
        yield patch


_first: list[Profile] = []


def measured(measure: Callable[[], Profile], _: Any) -> Profile:
    if not _first:
        _first.append(measure())
    return _first[0]


STEPS = {"max_epochs": -1, "max_steps": 7}
SETTINGS: dict[str, dict[str, Any]] = {
    "validation after each epoch": {},
    "no validation": {"limit_val_batches": 0},
    "no validation, steps": {"limit_val_batches": 0} | STEPS,
    "validation after 2, steps": {"val_check_interval": 2, "check_val_every_n_epoch": None} | STEPS,
}
SAVERS: dict[str, dict[str, Any]] = {
    "batch end": {"every_n_train_steps": 1},
    "epoch end": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "validation end": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
}


class Log(Callback):
    """What happens, with the tokens of each batch and a number of every global generator."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
        self.events.append(("epoch start", trainer.current_epoch))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        drawn = random.random(), np.random.random(), torch.rand(()).item()
        logged = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.events.append((trainer.current_epoch, index, logged, batch["input_ids"].tolist(), drawn))

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.sanity_checking:  # a second one comes with a resumed run
            self.events.append(("validation", trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self.events.append(("epoch end", trainer.current_epoch, trainer.global_step))


def run(
    *callbacks: Any, ckpt: Path | None = None, later: bool = False, **settings: Any
) -> tuple[Run, list[tuple[Any, ...]]]:
    """Train with dropout and shuffled data; return the run and what happened. ``later``: while files are written."""
    log = Log()
    module = seeded_module(dropout=0.1, seed=7 if ckpt is None else 99)
    saving = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    done = fit(
        Forced(async_checkpoint=later),
        module,
        ckpt=ckpt,
        callbacks=[log, *callbacks],
        enable_checkpointing=saving,
        **settings,
    )
    return done, log.events


def same_end(whole: tuple[Run, list[tuple[Any, ...]]], resumed: tuple[Run, list[tuple[Any, ...]]]) -> list[str]:
    """Name what differs from the resumption on."""
    found = state_differences(whole[0], resumed[0])
    count = len(resumed[0].module.losses)
    pairs = zip(whole[0].module.losses[-count:], resumed[0].module.losses, strict=False) if count else ()
    found += [f"loss {i}" for i, (left, right) in enumerate(pairs) if not torch.equal(left, right)]
    events = len(resumed[1])
    if not events or whole[1][-events:] != resumed[1]:
        found.append(f"events: {resumed[1]}")
    return found


@pytest.mark.parametrize(("setting", "saver"), sampling.grid(SETTINGS, SAVERS, count=6))
def test_a_run_resumed_from_any_checkpoint_equals_one_run(setting: str, saver: str, tmp_path: Path) -> None:
    settings = SETTINGS[setting]
    if saver == "validation end" and settings.get("limit_val_batches") == 0:
        settings = settings | {"limit_val_batches": 1}  # else there would be no checkpoint
    callback = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}", **SAVERS[saver])
    whole = run(callback, later=saver == "batch end", **settings)
    paths = [tmp_path / f"step={step}.ckpt" for step in (2, 3)]
    made = [path for path in paths if path.exists()]
    assert made
    for path in made:
        assert same_end(whole, run(ckpt=path, **settings)) == [], path.name


# -- interrupts -------------------------------------------------------------------------------------------------------


class Signal(Callback):
    """Sends a signal to this process in a hook of the given step."""

    def __init__(self, number: int, hook: str, step: int) -> None:
        self.number, self.step = number, step
        setattr(self, hook, self.send)

    def send(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            self.step = -1
            os.kill(os.getpid(), self.number)


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])
    assert left == before[1]


MOMENTS = [  # hook, step, saved after how many steps, settings, signal
    ("on_train_batch_start", 1, 2, {}, signal.SIGINT),
    ("on_before_zero_grad", 1, 2, {"limit_val_batches": 0}, signal.SIGTERM),
    (
        "on_train_batch_start",
        2,
        3,
        {},
        signal.SIGINT,
    ),  # before the last batch of an epoch, on which a validation follows
    ("on_train_batch_start", 2, 3, {"limit_val_batches": 0}, signal.SIGTERM),
    ("on_train_batch_start", 2, 3, {"limit_val_batches": 0} | STEPS, signal.SIGINT),
    ("on_validation_start", 3, 3, {}, signal.SIGTERM),
    ("on_validation_end", 3, 3, {}, signal.SIGTERM),
    ("on_train_epoch_start", 3, 4, {}, signal.SIGINT),
]


@functools.cache
def uninterrupted(settings: str) -> tuple[Run, list[tuple[Any, ...]]]:
    """The run with these settings, made once."""
    known = [*SETTINGS.values(), *(found for *_, found, _ in MOMENTS)]
    return run(**next(found for found in known if repr(found) == settings))


@pytest.mark.parametrize(("hook", "step", "saved", "settings", "number"), MOMENTS)
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    hook: str, step: int, saved: int, settings: dict[str, Any], number: int, tmp_path: Path
) -> None:
    goes_on(hook, step, saved, settings, number, tmp_path)


def test_a_validation_in_the_middle_of_an_epoch_is_done_again(tmp_path: Path) -> None:
    settings = SETTINGS["validation after 2, steps"]
    goes_on("on_validation_batch_start", 4, 4, settings, signal.SIGINT, tmp_path)


def goes_on(hook: str, step: int, saved: int, settings: dict[str, Any], number: int, tmp_path: Path) -> None:
    """Interrupt a run in a hook and go on with it; compare with one that never stopped."""
    if hook == "on_before_zero_grad":
        hook = "on_train_batch_end"  # before ours: ours is the last callback
        step = saved
    whole = uninterrupted(repr(settings))
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=100)
    with pytest.raises(SystemExit) as left:
        run(Signal(number, hook, step), saver, later=number == signal.SIGTERM, **settings)
    assert left.value.code == (1 if number == signal.SIGINT else 143)
    assert torch.load(tmp_path / FILE)["global_step"] == saved
    assert same_end(whole, run(ckpt=tmp_path / FILE, **settings)) == []


class Failing(Callback):
    """Raises as a batch of the second epoch comes."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if (trainer.current_epoch, index) == (1, self.at):
            raise RuntimeError("on purpose")


@pytest.mark.parametrize(("setting", "at"), sampling.grid(SETTINGS, range(BATCHES), count=6))
def test_a_run_goes_on_with_the_batch_that_failed(setting: str, at: int, tmp_path: Path) -> None:
    settings = SETTINGS[setting]
    whole = run(**settings)
    saver = ModelCheckpoint(tmp_path, filename="failed", every_n_train_steps=100, save_on_exception=True)
    callbacks = [Failing(at), Log(), saver]
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Forced(), seeded_module(dropout=0.1), callbacks=callbacks, enable_checkpointing=True, **settings)
    resumed = run(ckpt=tmp_path / "failed.ckpt", **settings)
    assert len(resumed[0].module.losses) == len(whole[0].module.losses) - BATCHES - at
    assert same_end(whole, resumed) == []


def test_workers_that_live_through_epochs_are_warned_of() -> None:
    loader = DataLoader([0], num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    _warn_of_workers([loader], 0)
    with pytest.warns(UserWarning, match="persistent_workers=True.*begins anew in epoch 1"):
        _warn_of_workers([loader], 1)


@pytest.mark.parametrize("dealt", [True, False])
def test_a_checkpoint_of_more_processes_goes_on_behind_what_they_had(tmp_path: Path, dealt: bool) -> None:
    """Of two at their first batch: two batches of the epoch are over. Runs of several are in tests/parity/several."""
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    _, events = run(saver, max_epochs=1)
    written = torch.load(tmp_path / "step=1.ckpt", weights_only=False)
    written["exact_resume"]["processes"] = 2
    torch.save(written, tmp_path / "of two.ckpt")
    said = "of 2 processes, this run has 1: random numbers begin anew"
    more = "the epoch goes on behind the 2 batches" if dealt else "and so does the order of this epoch, of which 2"
    with pytest.MonkeyPatch.context() as patch:
        if dealt:
            patch.setattr(resume, "_is_dealt", lambda loader: True)
        with pytest.warns(UserWarning, match=f"{said}.*{more}"):
            _, after = run(ckpt=tmp_path / "of two.ckpt", max_epochs=1)
    batches = [event[:2] for event in events if len(event) == 5]
    assert [event[:2] for event in after if len(event) == 5] == batches[2:]


# -- plan and RAM -----------------------------------------------------------------------------------------------------


def two_steps(made: OffmateStrategy, folder: Path) -> Run:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    return fit(made, seeded_module(), callbacks=[saver], enable_checkpointing=True, max_epochs=-1, max_steps=2)


def test_a_resumed_run_has_the_plan_of_its_run_and_the_ram_it_had(
    tmp_path: Path, one_profile: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else the process that goes on has in its RAM, and whatever it would measure."""
    one_profile.undo()
    memory = tight(seeded_module())
    least = two_steps(OffmateStrategy(memory=memory), tmp_path).trainer.strategy.plan.predicted.host_peak_bytes + 10**7
    first = two_steps(OffmateStrategy(memory=memory, host_memory=least), tmp_path / "least")
    plan = first.trainer.strategy.plan
    taken = TakenHostBytes(all=least, private=least)
    monkeypatch.setattr("lt_offload.profiling.machine.taken_host_bytes", lambda: taken)
    with pytest.raises(InfeasibleError, match="host_memory"):
        two_steps(OffmateStrategy(memory=memory, host_memory=least), tmp_path / "heavier")
    again = {"ckpt": tmp_path / "least" / "step=1.ckpt", "max_epochs": -1, "max_steps": 2}
    resumed = fit(OffmateStrategy(memory=memory, host_memory=least), seeded_module(99), **again)
    assert resumed.trainer.strategy.plan == plan
    assert state_differences(first, resumed) == []
    # Another budget is another plan, for which the process takes what it took.
    other = fit(OffmateStrategy(memory=2 * memory, host_memory=2 * least), seeded_module(99), **again)
    assert other.trainer.strategy.plan.budget_bytes == 2 * memory
    assert other.trainer.strategy.plan.process_bytes == plan.process_bytes
    assert state_differences(first, other) == []


def test_a_plan_that_cannot_be_read_or_is_of_other_settings_is_made_again(tmp_path: Path) -> None:
    first = two_steps(OffmateStrategy(memory="200MB"), tmp_path)
    written = torch.load(tmp_path / "step=1.ckpt", weights_only=False)
    again = {"max_epochs": -1, "max_steps": 2}
    for number, text in enumerate(("no JSON", written["lt_offload"]["plan"].replace("keep", "offload"), None)):
        written["lt_offload"] |= {"plan": text, "profile": text}
        torch.save(written, tmp_path / f"{number}.ckpt")
        resumed = fit(OffmateStrategy(memory="200MB"), seeded_module(99), ckpt=tmp_path / f"{number}.ckpt", **again)
        assert state_differences(first, resumed) == []


CHILD = """
import sys, torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from lt_offload import OffmateStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1536, 1536) for _ in range(6))

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch).relu()
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 1536), batch_size=2)

seed_everything(1, verbose=False)
folder, steps = sys.argv[1], int(sys.argv[2])
strategy = OffmateStrategy(memory="60MB", host_memory="2GB")
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder)
saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
ckpt = f"{folder}/step=2.ckpt" if steps > 2 else None
Trainer(strategy=strategy, accelerator="cpu", max_steps=steps, callbacks=[saver], **quiet).fit(Module(), ckpt_path=ckpt)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(strategy.plan.process_bytes, strategy.plan.budget_bytes, int(peak) << 10)
"""


@pytest.mark.slow
def test_a_resumed_run_takes_no_more_ram_than_its_run(tmp_path: Path) -> None:
    takes_no_more(CHILD, tmp_path)
