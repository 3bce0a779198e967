"""Runs follow each other without Python's collector of cycles in between: each leaves the device as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lt_offload
from lt_offload.errors import OverBudget
from lt_offload.execute.engine import Engine
from tests.gpu.engine.runs import SOMEWHERE, on, trainer, travelling
from tests.gpu.target import ROOM, Target
from tests.support import models, trainers
from tests.support.models import VOCAB

pytestmark = SOMEWHERE

KB = 1024


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Module(trainers.Module):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)

    def test_dataloader(self) -> Any:
        return self.val_dataloader()


def held(target: Target) -> int:
    """What torch's allocator has given out, without the workspaces of libraries."""
    if not target.cuda:
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def test_one_after_the_other(target: Target) -> None:
    expected, found = [], []
    for made, seen in ((lambda: "auto", expected), (travelling, found)):
        module = Module()
        before = held(target)
        for call in ("validate", "test", "fit", "validate", "fit", "predict", "fit"):
            run = trainer(target, made(), max_epochs=1)
            torch.manual_seed(0)
            getattr(run, call)(module)
            left = held(target) - before
            if made is travelling:
                assert left < 64 * KB, f"{call} left {left} bytes on the device"
        seen += [*module.losses, *module.validation]
        seen += [weight.cpu() for weight in module.state_dict().values()]
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


def test_the_same_trainer_again(target: Target) -> None:
    module = Module()
    run = trainer(target, travelling(), max_epochs=1)
    before = held(target)
    for epochs in (1, 2):
        run.fit_loop.max_epochs = epochs
        run.fit(module)
        run.test(module)
        assert held(target) - before < 64 * KB
    assert len(module.losses) == 2 * trainers.BATCHES


def test_after_an_error(target: Target) -> None:
    class Fails(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1 and self.trainer.sanity_checking is False:
                raise KeyError(batch_idx)
            return loss

    before = held(target)
    module = Fails()
    with pytest.raises(KeyError):
        trainer(target, travelling()).fit(module)
    del module
    gc.collect()  # the traceback's
    assert held(target) - before < 64 * KB


def test_loops(target: Target) -> None:
    model = models.build("llama")
    batch = on(target.torch_device, models.batch(model))
    optimizer = torch.optim.AdamW(model.parameters())
    before = held(target)
    for _ in range(2):
        with lt_offload.offloaded(model, optimizer, batch, memory=ROOM, accelerator=target.accelerator) as engine:
            for _ in range(2):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert engine.stats.iterations == 2
        assert held(target) - before < 64 * KB


@pytest.mark.only("cuda")
def test_what_others_have_left_in_cycles_makes_room(target: Target) -> None:
    """A model that a notebook's cell has left behind, and nobody refers to but itself."""
    size = 64 << 20
    device = target.open()
    torch.cuda.empty_cache()
    budget = device.memory() + size + size // 2
    device.close()
    leftover: list[Any] = [torch.empty(size, dtype=torch.uint8, device=target.torch_device)]
    leftover.append(leftover)
    device = target.open(budget)
    del leftover
    device.reserve(size)
    device.close()
    kept = torch.empty(size, dtype=torch.uint8, device=target.torch_device)
    device = target.open(budget)
    with pytest.raises(OverBudget, match="does not fit"):
        device.reserve(size)
    del kept
    device.close()


def test_forwards_alone_leave_nothing(target: Target) -> None:
    model = models.build("llama", vocab_size=VOCAB)
    batch = on(target.torch_device, models.batch(model))
    before = held(target)
    device = target.open()
    engine = Engine(model, None, None, device)
    engine.install()
    with engine.inference(), torch.no_grad():
        loss = model(**batch).loss.cpu()
    assert target.cuda <= (held(target) > before)
    engine.close()
    device.close()
    assert held(target) - before < 64 * KB
    assert loss.isfinite()
