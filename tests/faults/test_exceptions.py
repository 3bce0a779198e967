"""What others see after an exception, before the strategy is taken down."""

from __future__ import annotations

import copy
import signal
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lt_offload.compat.torch import all_dispatch_modes, all_function_modes
from lt_offload.execute import installed
from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from tests.support import models, plans
from tests.support.hostile.device import HostileDevice
from tests.support.trainers import Forced, differences, fit, seeded_module


class Uploader(CSVLogger):
    """Takes the weights along at the end of a run, like loggers that upload them."""

    module: Any
    weights: dict[str, torch.Tensor]

    def finalize(self, status: str) -> None:
        assert status == "failed"
        self.weights = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}


class Fails(Callback):
    """Raises before the third step, when updates of the second are in flight and weights on the device."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise RuntimeError("in a hook")


def test_weights_are_complete_when_an_exception_reaches_the_loggers(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "open_device", lambda budget, *_, **__: HostileDevice(budget, "lazy", check=True))
    logger, module = Uploader(tmp_path), seeded_module()
    logger.module = module
    with pytest.raises(RuntimeError, match="in a hook"):
        fit(Forced(), module, callbacks=[Fails()], logger=logger)
    expected = fit("auto", max_steps=2).module.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in logger.weights.items())


class FullDisk(ModelCheckpoint):
    """Cannot write the checkpoint of an exception."""

    def on_exception(self, *args: Any) -> None:
        raise OSError("no space left")


class Disconnected(CSVLogger):
    """Cannot reach its server when a run has failed."""

    def finalize(self, status: str) -> None:
        if status == "failed":
            raise OSError("no route to host")


@pytest.mark.parametrize("failing", ["checkpoint", "logger"])
def test_a_second_error_leaves_a_usable_model_and_process(failing: str, tmp_path: Any) -> None:
    """Lightning calls no strategy after it: neither its ``on_exception``, nor its ``teardown``."""
    handler, runs = signal.getsignal(signal.SIGINT), []
    for strategy in ("auto", Forced()):
        module = seeded_module()
        second = FullDisk(tmp_path) if failing == "checkpoint" else ModelCheckpoint(tmp_path)
        settings = {"logger": Disconnected(tmp_path) if failing == "logger" else False, "enable_checkpointing": True}
        with pytest.raises(OSError, match=r"^no (space|route)") as raised:
            fit(strategy, module, callbacks=[Fails(), second], **settings)
        assert str(raised.value.__context__) == "in a hook"
        assert (all_function_modes(), all_dispatch_modes()) == ([], [])
        assert signal.getsignal(signal.SIGINT) == handler
        assert not any("forward" in vars(part) for part in module.modules())
        runs.append(fit("auto" if strategy == "auto" else Forced(), module))
    assert differences(*runs) == []


@pytest.mark.parametrize("mode", ["lazy", "random", "thread"])
@pytest.mark.parametrize("step", [0, 2])
def test_an_iteration_given_up_halfway_leaves_the_memory_of_gradients_to_the_next(
    mode: Any, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gradients arrive at one address; one that has arrived, or is about to, never gets its update."""
    model = models.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    structure = find_blocks(model)
    plan = plans.streamed(structure, optimizer, options=("keep",), places=("host",))
    assert {plan.groups[op.groups[0]].host_offset for op in plan.ops if op.payload == "grad"} == {0}
    device = HostileDevice(1 << 30, mode, check=True)
    engine = Engine(model, optimizer, plan, device, structure=structure)
    engine.install()
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    try:
        assert engine.gradients is not None
        queue, calls = engine.gradients.use_on_host, iter(range(100))

        def update(*args: Any) -> Any:
            if next(calls) == step:
                raise RuntimeError("halfway")
            return queue(*args)

        def half() -> None:
            with engine.iteration():
                model(**models.batch(model)).loss.backward()

        with monkeypatch.context() as patch:
            patch.setattr(engine.gradients, "use_on_host", update)
            with pytest.raises(RuntimeError, match="halfway"):
                half()
        engine.drain()
        twin.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(2):
            with engine.iteration():
                model(**models.batch(model)).loss.backward()
                optimizer.step()
            other.zero_grad()
            twin(**models.batch(twin)).loss.backward()
            other.step()
        engine.drain()
    finally:
        engine.remove()
        device.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
