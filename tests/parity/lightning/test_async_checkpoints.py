"""Checkpoints that are written while training goes on: byte for byte those for which training waits."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lt_offload import ConfigError, OffmateStrategy
from lt_offload.errors import CheckpointError
from lt_offload.execute import installed
from lt_offload.execute.memory import snapshots
from lt_offload.strategy.checkpoint import archive, files, hooks
from lt_offload.strategy.checkpoint.files import Writer
from tests import sampling
from tests.support.hostile.device import HostileDevice
from tests.support.profiles import budgets
from tests.support.trainers import Forced, differences, fit, seeded_module

pytestmark = pytest.mark.usefixtures("measured_once")

ROOM = {"none": 0, "some": 30_000, "ample": 1 << 30}
"""Bytes for what is set aside; the checkpoint of the model takes 200 kB."""


class Late:
    """Lets no file be begun before it is told to, or somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begin = begin = threading.Event()
        self.waited = False
        self.aside = 0
        fill = archive.fill
        late = self

        class Condition(threading.Condition):
            def wait(self, timeout: float | None = None) -> bool:
                late.waited |= threading.current_thread().name != WRITER
                begin.set()
                return super().wait(timeout)

        def begun(*args: Any) -> dict[int, int]:
            begin.wait()
            return fill(*args)

        def noted(given: snapshots.Snapshots, key: int) -> None:
            let_go(given, key)
            late.aside = max(late.aside, given.nbytes)

        let_go = snapshots.Snapshots._let_go
        monkeypatch.setattr(snapshots.Snapshots, "_let_go", noted)
        monkeypatch.setattr(archive, "fill", begun)
        monkeypatch.setattr(snapshots, "threading", SimpleNamespace(Condition=Condition))

    def let_go(self, trainer: Any) -> None:
        self.begin.set()
        ours, _ = trainer.strategy._files()
        ours.wait()
        self.begin.clear()


WRITER = "lt_offload checkpoints"


class Saving(Callback):
    """Saves after the given steps; files are written two at a time, when both are to be, if ``late`` is given."""

    def __init__(self, folder: Path, late: Late | None = None, steps: tuple[int, ...] = (1, 2, 3, 4, 5, 6)) -> None:
        self.folder, self.late, self.steps = folder, late, steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop._should_accumulate() or trainer.global_step not in self.steps:
            return
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")
        if self.late is not None and trainer.global_step % 2 == 0:
            self.late.let_go(trainer)

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        if self.late is not None:
            self.late.let_go(trainer)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    return Late(monkeypatch)


def same_files(one: Path, other: Path) -> list[str]:
    """Name the files that are not byte for byte the same."""
    names = sorted(path.name for path in one.iterdir())
    assert names
    assert names == sorted(path.name for path in other.iterdir())
    return [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()]


def both(
    make: Callable[..., Any],
    tmp_path: Path,
    late: Late,
    *more: Callable[[], Callback],
    steps: tuple[int, ...] = (1, 2, 3, 4, 5, 6),
    **settings: Any,
) -> None:
    """Train with files for which training waits, and with late ones, and compare files and runs."""
    folders = [tmp_path / "now", tmp_path / "later"]
    late.begin.set()
    expected = fit(make(), callbacks=[Saving(folders[0], steps=steps), *(one() for one in more)], **settings)
    late.begin.clear()
    late.waited = False
    late.aside = 0
    found = fit(
        make(async_checkpoint=True), callbacks=[Saving(folders[1], late, steps), *(one() for one in more)], **settings
    )
    assert same_files(*folders) == []
    assert differences(expected, found) == []


def smallest_budget(budget: str) -> int:
    strategy = OffmateStrategy(memory="20KB", **budgets.planning(budget) | {"planner": "auto"})
    return budgets.named_by(lambda: fit(strategy))


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "room"), sampling.grid(budgets.BUDGETS, ROOM, count=4))
def test_files_are_those_for_which_training_waits(
    budget: str, room: str, tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "available_host_bytes", lambda: 2 * ROOM[room])
    memory = int(smallest_budget(budget) * budgets.BUDGETS[budget])
    planning = OffmateStrategy(memory=memory, **budgets.planning(budget))
    window = {"accumulate_grad_batches": 2 if budget == "middle" else 1}
    fit(planning, max_steps=1, max_epochs=-1, **window)
    assert planning.plan is not None
    path = tmp_path / "plan.json"
    planning.plan.save(path)
    both(lambda **options: OffmateStrategy(plan=path, **options), tmp_path, late, **window)
    assert late.waited or room != "none"
    assert (late.aside > 0) == (room != "none")
    assert late.aside <= ROOM[room]


class Editing(Callback):
    """Writes to weights and states between two steps, also through arrays."""

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step % 2:
            with torch.no_grad():
                for parameter in list(module.parameters())[::2]:
                    parameter.mul_(1.01)
                state = trainer.optimizers[0].state[next(module.parameters())]
                state["exp_avg"].add_(0.01)
                state["step"].add_(1)
            last = list(module.parameters())[-3].detach().numpy()
            last *= 0.5


@pytest.mark.parametrize(("mode", "room"), [("lazy", "ample"), ("random", "some"), ("thread", "none")])
def test_whatever_changes_first_and_in_whatever_order(
    mode: Any, room: str, tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "available_host_bytes", lambda: 2 * ROOM[room])
    monkeypatch.setattr(installed, "open_device", lambda budget, *_, **__: HostileDevice(budget, mode, check=True))
    both(Forced, tmp_path, late, Editing)


@pytest.mark.usefixtures("hostile")
def test_a_validation_that_clears_the_device_says_so_too(
    tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "available_host_bytes", lambda: 1 << 31)
    monkeypatch.setattr(Forced, "places", ("device",))
    both(Forced, tmp_path, late, steps=(1, 4), val_check_interval=2)


@pytest.mark.parametrize("L", [lightning.pytorch, pytorch_lightning], ids=lambda L: L.__name__)
def test_lightnings_own_plugin_needs_no_copy(L: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = __import__(f"{L.__name__}.plugins.io", fromlist=["AsyncCheckpointIO"]).AsyncCheckpointIO
    monkeypatch.setattr(plugin, "save_checkpoint", lambda *args, **kwargs: pytest.fail("it copies everything"))
    monkeypatch.setattr(hooks, "record", lambda *_: None)  # what each of the two runs has measured
    for name, plugins in (("now", []), ("later", [plugin()])):
        fit(
            OffmateStrategy(planner="resident"),
            L=L,
            callbacks=[_saving(L, tmp_path / name)],
            plugins=plugins,
            max_epochs=1,
        )
    assert same_files(tmp_path / "now", tmp_path / "later") == []


def _saving(L: Any, folder: Path) -> Any:
    class Saver(L.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")

    return Saver()


# -- files that are replaced and removed ------------------------------------------------------------------------------


class Watch(Callback):
    """Notes which complete checkpoints there are when a step begins, while the last file is not begun."""

    def __init__(self, folder: Path, late: Late) -> None:
        self.folder, self.late = folder, late
        self.found: list[Path | None] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.found.append(files.newest(self.folder))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.late.let_go(trainer)  # before the next save: what was to be written is

    on_train_end = on_train_batch_end


@pytest.mark.parametrize("last", [None, True, "link"])
def test_the_last_complete_file_is_not_removed_before_the_next_is_complete(
    last: Any, tmp_path: Path, late: Late
) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_last=last)
    watch = Watch(tmp_path, late)
    fit(Forced(async_checkpoint=True), callbacks=[watch, saver], enable_checkpointing=True, max_epochs=1)
    assert watch.found[:2] == [None, None]
    assert watch.found[2] == tmp_path / "step=1.ckpt" or last
    assert watch.found[2] is not None
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == (["last.ckpt"] if last else []) + ["step=3.ckpt"]
    assert all(torch.load(tmp_path / name)["global_step"] == 3 for name in kept)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def full(step: int) -> Callable[..., dict[int, int]]:
    """Return what writes files until the disk is full, in the save number ``step``."""
    fill, count = archive.fill, iter(range(1, 100))

    def write(descriptor: int, records: Any, read: Any) -> dict[int, int]:
        if next(count) >= step:
            fill(descriptor, records[: len(records) // 2], read)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fill(descriptor, records, read)

    return write


@pytest.mark.parametrize(("step", "seen"), [(2, 3), (6, 6)])
def test_a_full_disk_is_said_at_the_next_save_or_at_the_end(
    step: int, seen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "fill", full(step))
    module = seeded_module()

    class Patient(Saving):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer)
            trainer.strategy._files()[0].wait()

    with pytest.raises(CheckpointError, match=rf"{step}\.ckpt was not written, the disk is full"):
        fit(Forced(async_checkpoint=True), module, callbacks=[Patient(tmp_path)])
    assert len(module.losses) == seen
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{i}.ckpt" for i in range(1, step)]
    monkeypatch.undo()
    fit(Forced(async_checkpoint=True), module, callbacks=[Saving(tmp_path / "again")])  # nothing is left of it


def test_an_error_of_training_is_not_hidden_by_one_of_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "fill", full(1))

    class Failing(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                raise ZeroDivisionError("the user's")

    with pytest.warns(UserWarning, match="disk is full"), pytest.raises(ZeroDivisionError, match="the user's"):
        fit(Forced(async_checkpoint=True), callbacks=[Saving(tmp_path), Failing()])


def test_an_interrupt_of_the_wait_at_the_end_leaves_no_file(
    tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are the user's again by then."""

    def interrupted(writer: Writer) -> None:
        raise KeyboardInterrupt

    strategy = Forced(async_checkpoint=True)
    wait = Writer.wait
    monkeypatch.setattr(Writer, "wait", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(strategy, callbacks=[Saving(tmp_path, steps=(1,))], max_steps=1, max_epochs=-1)
    monkeypatch.setattr(Writer, "wait", wait)
    late.begin.set()
    with pytest.raises(CheckpointError, match="training was left before all of it had been read"):
        strategy._files()[0].teardown()
    assert not list(tmp_path.iterdir())


class Foreign(TorchCheckpointIO):
    """A user's own."""


@pytest.mark.parametrize(
    ("strategy", "plugin", "message"),
    [
        ({}, AsyncCheckpointIO("x"), r"AsyncCheckpointIO writes checkpoints with 'x', which is no CheckpointIO"),
        ({"async_checkpoint": True}, Foreign(), "async_checkpoint=True: checkpoints are written by the plugin Foreign"),
    ],
)
def test_plugins_that_cannot_write_are_named_before_training(strategy: Any, plugin: Any, message: str) -> None:
    module = seeded_module()
    with pytest.raises(ConfigError, match=message):
        fit(OffmateStrategy(memory="200MB", **strategy), module, plugins=[plugin])
    assert not module.losses


def test_a_plugin_around_others_files_copies_everything_and_says_so(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"plugins": [AsyncCheckpointIO(Foreign())], "max_epochs": 1}
    with pytest.warns(UserWarning, match="AsyncCheckpointIO copies all weights and states in RAM at every save, "):
        fit(Forced(), callbacks=[Saving(tmp_path)], **settings)
    weights = fit("auto", max_steps=2).module.state_dict()
    saved = torch.load(tmp_path / "2.ckpt")["state_dict"]
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


def test_what_has_no_room_beside_weights_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LITTLE_MEMORY", 0)
    monkeypatch.setattr(hooks, "available_host_bytes", lambda: 0)

    class Average(Saving):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["average"] = self.average = torch.ones(1000) * trainer.global_step

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer)
            assert (self.folder / f"{trainer.global_step}.ckpt").exists()
            self.average.zero_()

    with pytest.warns(UserWarning, match="is written while training waits: it holds"):
        fit(Forced(async_checkpoint=True), callbacks=[Average(tmp_path)], max_epochs=1)
    assert torch.equal(torch.load(tmp_path / "3.ckpt")["average"], torch.full((1000,), 3.0))


@pytest.fixture(autouse=True)
def _no_writer_is_left() -> Iterator[None]:
    yield
    assert WRITER not in [thread.name for thread in threading.enumerate()]
