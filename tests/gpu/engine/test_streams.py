"""A user's own CUDA streams: around everything they are right, around the model within a step they are refused."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

import lt_offload
from lt_offload.errors import UnsupportedError
from tests.gpu.engine.runs import fit, on, travelling
from tests.gpu.target import ROOM, Target
from tests.support import models, trainers

pytestmark = [pytest.mark.only("cuda"), pytest.mark.usefixtures("deterministic")]

OWN = "block .* was called on another CUDA stream than its step began"


class Aside(trainers.Module):
    """Calls the model on a stream of its own, as plain PyTorch allows it."""

    where: tuple[str, ...] = ("training_step",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.side = torch.cuda.Stream()

    def _aside(self, name: str, *args: Any) -> Any:
        if name not in self.where:
            return getattr(trainers.Module, name)(self, *args)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            found = getattr(trainers.Module, name)(self, *args)
        torch.cuda.current_stream().wait_stream(self.side)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._aside("training_step", batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._aside("validation_step", batch, batch_idx)


@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_the_model_on_a_stream_within_a_step_is_refused(where: str, target: Target) -> None:
    module = Aside()
    module.where = (where,)
    # The profile runs the step as well, and does not mind.
    with pytest.raises(UnsupportedError, match=OWN):
        fit(target, travelling(), module)
    module.where = ()
    fit(target, travelling(), module.train())


class Looks(L.Callback):
    """Reads, writes and computes on another stream between steps."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.side = torch.cuda.Stream()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        weight = module.model.lm_head.weight
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side), torch.no_grad():
            self.seen.append(weight.detach().to("cuda").clone())
            weight.mul_(0.99)
        torch.cuda.current_stream().wait_stream(self.side)


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "travelling"])
def test_a_whole_fit_on_a_stream(planned: bool, target: Target) -> None:
    runs, looks = [], []
    ours = lt_offload.OffmateStrategy(memory=ROOM, host_update=False) if planned else travelling()
    for strategy in ("auto", ours):
        looks.append(Looks())
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            runs.append(fit(target, strategy, trainers.seeded_module(), callbacks=[looks[-1]]))
        torch.cuda.synchronize()
    assert trainers.differences(*runs) == []
    assert len(looks[0].seen) == 2 * trainers.BATCHES
    assert all(map(torch.equal, looks[0].seen, looks[1].seen))


def test_a_stream_that_a_hook_sets(target: Target) -> None:
    """From then on everything is there."""

    class Sets(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(stream)

    runs = []
    try:
        for strategy in ("auto", travelling()):
            runs.append(fit(target, strategy, trainers.seeded_module(), callbacks=[Sets()]))
            torch.cuda.synchronize()
            torch.cuda.set_stream(torch.cuda.default_stream())
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
    assert trainers.differences(*runs) == []


@pytest.mark.parametrize("delayed", [False, True], ids=["at-once", "delayed"])
@pytest.mark.parametrize("backward", [False, True], ids=["step-aside", "backward-aside"])
@pytest.mark.parametrize("around", [False, True], ids=["default", "all-aside"])
def test_loops_that_update_on_another_stream(delayed: bool, backward: bool, around: bool, target: Target) -> None:
    """Whoever calls the backward on a stream may use gradients there at once, wherever the forward was."""
    results = []
    for ours in (False, True):
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()) if around else nullcontext():
            model = models.build("llama", layers=3)
            batches = [on(target.torch_device, models.batch(model, seed=seed)) for seed in range(4)]
            if not ours:
                model.to(target.torch_device)
                losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches, backward)
            else:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                options: dict[str, Any] = {"accelerator": "cuda", "host_update": False, "delayed": delayed}
                with lt_offload.offloaded(model, optimizer, batches[0], memory=ROOM, **options):
                    losses = train(model, optimizer, batches, backward)
            results.append([*losses, *(parameter.detach().cpu() for parameter in model.parameters())])
    assert all(map(torch.equal, *results))


def train(
    model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]], backward: bool
) -> list[Tensor]:
    side, seen = torch.cuda.Stream(), []
    for batch in batches:
        loss = model(**batch).loss
        if not backward:
            loss.backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if backward:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(model.lm_head.weight.detach().cpu().clone())
        torch.cuda.current_stream().wait_stream(side)
        seen.append(loss.detach().cpu())
    return seen


def test_a_loop_that_calls_the_model_on_a_stream_is_refused(target: Target) -> None:
    model = models.build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = on(target.torch_device, models.batch(model))
    with lt_offload.offloaded(model, optimizer, batch, memory=ROOM, accelerator="cuda"):
        for context in (torch.enable_grad(), torch.no_grad()):
            with torch.cuda.stream(torch.cuda.Stream()), context, pytest.raises(UnsupportedError, match=OWN):
                model(**batch)
        loss = model(**batch).loss
        with torch.cuda.stream(torch.cuda.Stream()):
            loss.backward()  # autograd runs it where the forward was
        optimizer.step()
        optimizer.zero_grad()


def test_what_a_copy_reads_is_its_own_until_it_is_over(target: Target) -> None:
    device = target.open()
    device.reserve(0)
    try:
        source = torch.ones(1 << 20, device=target.torch_device)
        home = torch.zeros(1 << 20, pin_memory=True)

        def copy(source: Tensor = source) -> None:
            target.pause(0.2)
            home.copy_(source, non_blocking=True)

        made = device.mark()
        device.submit("d2h", copy, after=[made])
        held = weakref.ref(source)
        del source, copy
        device.submit("d2h", lambda: None)  # whoever submits lets go of what is over
        other = torch.full((1 << 20,), 2.0, device=target.torch_device)
        assert other.sum().item() == 2 << 20  # computations have gone on, the copy has not
        device.drain()
        assert torch.equal(home, torch.ones(1 << 20))
        device.submit("d2h", lambda: None)
        assert held() is None, "and no longer"
    finally:
        device.close()
