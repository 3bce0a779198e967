"""What the plain loop asks for before it trains; that it trains exactly is in tests/parity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

import lt_offload
from lt_offload import session
from lt_offload.errors import ConfigError, UnsupportedError
from lt_offload.execute import installed
from tests.support import models


class Stop(Exception):
    """Ends the session where a test has seen enough."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a device is opened with; none is."""
    seen: list[Any] = []

    def open_device(*args: Any, **options: Any) -> None:
        seen.append((args, options))
        raise Stop

    monkeypatch.setattr(installed, "open_device", open_device)
    return seen


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # optimizers ask where there is one
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return torch.device("cuda", 1)


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = models.build()
    return model, torch.optim.AdamW(model.parameters(), fused=True), models.batch(model)


def test_without_memory_the_budget_is_what_is_free_on_the_device_that_is_used(
    opened: list[Any], second_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card with 16 GB of which a desktop has taken 15.9995."""
    model, optimizer, batch = fresh()
    measured = lt_offload.profile(model, batch, optimizer=optimizer, device="cpu")
    machine = replace(measured.hardware, device_bytes=16 * 10**9)
    asked: list[Any] = []

    def measure(*args: Any, **options: Any) -> Any:
        asked.append(options["device"])
        return replace(measured, hardware=machine)

    def free(device: torch.device) -> int:
        asked.append(device)
        return 500_000

    monkeypatch.setattr(session, "measure", measure)
    monkeypatch.setattr(session, "free_memory", free)
    with pytest.raises(Stop), lt_offload.offloaded(model, optimizer, batch, accelerator="cuda:1"):
        pass
    assert asked == [second_gpu, second_gpu]
    assert opened[0][0] == (500_000, "cuda:1")


def test_a_device_that_is_not_there_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("measured"))
    model, optimizer, batch = fresh()
    with (
        pytest.raises(ConfigError, match="torch finds no GPU here"),
        lt_offload.offloaded(model, optimizer, batch, accelerator="cuda"),
    ):
        pass


def test_a_setting_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("measured"))
    model, optimizer, batch = fresh()
    message = r"time_limit=3 is no setting of offloaded\(\); choose among solver_time_limit"
    with pytest.raises(ConfigError, match=message), lt_offload.offloaded(model, optimizer, batch, time_limit=3):
        pass


@pytest.mark.parametrize("wrapped", ["both", "the model", "the optimizer"])
def test_what_fabric_has_wrapped_is_refused_before_anything_is_measured(
    wrapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("measured"))
    model, optimizer, batch = fresh()
    theirs: Any = Fabric(accelerator="cpu").setup(model, optimizer)
    given: tuple[Any, Any] = (
        model if wrapped == "the optimizer" else theirs[0],
        optimizer if wrapped == "the model" else theirs[1],
    )
    name = "FabricAdamW" if wrapped == "the optimizer" else "_FabricModule"
    with (
        pytest.raises(UnsupportedError, match=rf"{name} of Fabric: .*; give offloaded\(\) .* before fabric.setup"),
        lt_offload.offloaded(*given, batch, accelerator="cpu"),
    ):
        pass
