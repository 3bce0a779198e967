"""Runs that are interrupted, run out of memory, or get no page-locked memory; and what comes afterwards."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lt_offload.errors import OverBudget
from lt_offload.execute.device.cuda_runtime import CudaRuntime
from lt_offload.execute.iteration import HALFWAY
from lt_offload.machine.staging import STAGING_BYTES
from lt_offload.strategy.checkpoint.resume import FILE
from tests.gpu.users.runs import USERS, Bench, Scene, check_way, in_both_ways, module
from tests.support.trainers import BATCHES, Run, differences, state_differences

pytestmark = [*USERS, pytest.mark.usefixtures("planned_once")]


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """A process that was started in the background ignores it."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before:
        signal.signal(number, handler)


def plain(bench: Bench) -> Scene:
    """Return the run that faults disturb."""
    return lambda strategy: bench.fit(strategy, module(dropout=0.1))


def undisturbed(bench: Bench, way: str) -> None:
    """A run in the same process is what it always was."""
    expected = plain(bench)("auto")
    gc.collect()
    strategy = bench.strategy(way, plain(bench))
    assert differences(expected, plain(bench)(strategy)) == []
    check_way(way, strategy)


def weights_of(bench: Bench, steps: int) -> dict[str, torch.Tensor]:
    """Return the weights of an undisturbed run after ``steps``."""
    run = bench.fit("auto", module(dropout=0.1), max_epochs=-1, max_steps=steps)
    gc.collect()
    state: dict[str, torch.Tensor] = run.module.state_dict()
    return state


# -- interrupts --------------------------------------------------------------------------------------------------------


class Does(Callback):
    """Does something once, in a hook of the step ``step``."""

    def __init__(self, hook: str, step: int, what: Any) -> None:
        self.step, self.what = step, what
        setattr(self, hook, self.act)

    def act(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            self.step = -1
            self.what()


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stop() -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("_ctrl_c")
@in_both_ways
@pytest.mark.parametrize(
    ("hook", "what"),
    [("on_train_batch_start", ctrl_c), ("on_before_backward", ctrl_c), ("on_validation_start", terminate)],
)
def test_an_interrupted_run_goes_on(hook: str, what: Any, way: str, bench: Bench, tmp_path: Path) -> None:
    def scene(strategy: Any, *callbacks: Any, ckpt: Path | None = None) -> Run:
        kept = [ModelCheckpoint(tmp_path, every_n_train_steps=100)] if callbacks else []
        made = module(7 if ckpt is None else 99, dropout=0.1)
        settings: dict[str, Any] = {"callbacks": [*callbacks, *kept], "enable_checkpointing": bool(kept)}
        return bench.fit(strategy, made, ckpt=ckpt, **settings)

    whole = scene("auto")
    gc.collect()
    step = BATCHES if hook == "on_validation_start" else 1
    with pytest.raises(SystemExit):
        scene(bench.strategy(way, scene), Does(hook, step, what))
    gc.collect()
    saved = torch.load(tmp_path / FILE, map_location="cpu", weights_only=False)["global_step"]
    assert saved == (BATCHES if hook == "on_validation_start" else 2)
    resumed = scene(bench.strategy(way, scene), ckpt=tmp_path / FILE)
    count = 2 * BATCHES - saved
    assert all(map(torch.equal, whole.module.losses[-count:], resumed.module.losses))
    assert len(resumed.module.losses) == count
    assert state_differences(whole, resumed) == []


@pytest.mark.usefixtures("_ctrl_c")
@in_both_ways
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward", "on_train_batch_end"])
def test_an_exception_of_a_callback_leaves_a_model_and_a_process(hook: str, way: str, bench: Bench) -> None:
    made = module(dropout=0.1)
    strategy = bench.strategy(way, plain(bench))
    with pytest.raises(SystemExit):
        bench.fit(strategy, made, callbacks=[Does(hook, 2, stop)])
    expected = weights_of(bench, 2)
    found = made.state_dict()
    assert {value.device.type for value in found.values()} == {"cpu"}
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    undisturbed(bench, way)


# -- memory ------------------------------------------------------------------------------------------------------------


class TakesTheRest(Callback):
    """Takes all device memory once, in the step 2: before its forward, or in its backward with some weights updated."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.kept: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step != 2 or self.kept:
            return
        if self.where == "forward":
            self.take(pl_module.device)
        else:
            first = pl_module.model.model.layers[0]
            first.register_forward_hook(
                lambda module, args, out: out.register_hook(lambda grad: self.take(grad.device))
            )

    def take(self, device: torch.device) -> None:
        """From large pieces to the smallest, so that no cached memory is left either, whatever the plan has left."""
        piece = 64 << 20
        while piece >= 512:
            try:
                self.kept.append(torch.ones(piece, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                piece //= 2

    def on_exception(self, *args: Any) -> None:
        self.kept.clear()


@pytest.mark.only("cuda", "fake")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_tensors_of_the_users_that_take_the_rest(where: str, bench: Bench, tmp_path: Path) -> None:
    """What does not fit any more says so; nothing is lost, or the error says that some weights are ahead of others."""
    made = module(dropout=0.1)
    strategy = bench.strategy("tight", plain(bench))
    rest, saver = TakesTheRest(where), ModelCheckpoint(tmp_path, every_n_train_steps=100, save_on_exception=True)
    unsaved = pytest.warns(UserWarning, match="is not written") if where == "backward" else nullcontext()
    with unsaved, pytest.raises((OverBudget, torch.OutOfMemoryError)) as refused:
        bench.fit(strategy, made, callbacks=[rest, saver], enable_checkpointing=True)
    assert not rest.kept
    halfway = where == "backward"
    assert getattr(refused.value, "__notes__", []) == [HALFWAY] * halfway
    assert bool(list(tmp_path.iterdir())) != halfway
    expected, found = weights_of(bench, 2), made.state_dict()
    assert any(not torch.equal(found[name], expected[name]) for name in found) == halfway
    undisturbed(bench, "tight")


@pytest.mark.only("cuda", "fake")
@in_both_ways
@pytest.mark.parametrize("limit", [0, STAGING_BYTES], ids=["nothing", "only buffers for copies"])
def test_memory_that_the_driver_does_not_lock(
    limit: int, way: str, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As under a small ``ulimit -l``: copies take another way, slower, with the same numbers."""
    register, unregister = CudaRuntime.register, CudaRuntime.unregister
    locked: dict[int, int] = {}

    def limited(cuda: CudaRuntime, address: int, nbytes: int) -> int:
        if sum(locked.values()) + nbytes > limit:
            return 2
        code = register(cuda, address, nbytes)
        if code == 0:
            locked[address] = nbytes
        return code

    def counted(cuda: CudaRuntime, address: int) -> int:
        locked.pop(address, None)
        return unregister(cuda, address)

    expected = plain(bench)("auto")
    gc.collect()
    strategy = bench.strategy(way, plain(bench))
    if bench.target.kind == "fake" and limit < STAGING_BYTES:  # then nothing but the driver's own way is left
        monkeypatch.setattr("tests.fake_cuda.runtime.forbid_pageable", lambda *_: None)
    monkeypatch.setattr(CudaRuntime, "register", limited)
    monkeypatch.setattr(CudaRuntime, "unregister", counted)
    with caplog.at_level(logging.WARNING):
        found = plain(bench)(strategy)
    check_way(way, strategy)
    assert differences(expected, found) == []
    if way == "tight":
        assert any("page-lock" in record.message for record in caplog.records)
