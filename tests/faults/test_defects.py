"""Defects other than missing waits, put in one at a time: the parity comparison must notice each."""

from __future__ import annotations

from typing import Any

import pytest

from lt_offload.errors import UnsupportedError
from lt_offload.execute.device.emulated import EmulatedDevice
from lt_offload.execute.memory import activations
from lt_offload.execute.memory.residency import Transfer
from lt_offload.execute.updates import gradients
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.model import saving
from tests.support.engines import Case, differences, offloaded, plain

TIED = Case(family="llama-tied", options=("recompute", "mixed"), places=("device", "host"), dropout=0.1)


def fails(case: Case) -> bool:
    """Whether the run breaks or gives other numbers."""
    expected = plain(case)
    try:
        return differences(expected, offloaded(case)) != []
    except (RuntimeError, AssertionError, UnsupportedError):
        return True


def test_nothing_fails_without_a_defect() -> None:
    assert not fails(TIED)


def test_random_state_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedDevice, "set_rng_state", lambda self, state: None)
    assert fails(TIED)


def test_tied_weight_updated_at_its_first_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = Gradients._collect

    def eager(self: Gradients, weight: Any) -> None:
        weight.uses, weight.seen = 1, 0
        collect(self, weight)

    monkeypatch.setattr(Gradients, "_collect", eager)
    assert fails(TIED)


def test_updated_weights_not_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfer, "write_back", lambda self: None)
    assert fails(Case(places=("device",)))


def test_saved_weights_kept_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "_alias", lambda tensor, ranges: tensor.detach())
    assert fails(Case())


def test_gradients_of_one_use_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = Gradients._collect

    def forgetful(self: Gradients, weight: Any) -> None:
        weight.grad = None
        collect(self, weight)

    monkeypatch.setattr(Gradients, "_collect", forgetful)
    assert fails(TIED)


def test_host_update_with_the_next_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group options must be read when the update is queued, not when it runs."""
    prepare = gradients.Updates.prepare

    def late(self: Any, weights: Any, place: str, grads: Any) -> Any:
        return lambda: prepare(self, weights, place, grads)()

    monkeypatch.setattr(gradients.Updates, "prepare", late)
    assert fails(Case(places=("host",)))


def test_cache_replayed_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    init = saving.ReplayCostly.__init__

    def shuffled(self: Any, cache: Any, *how: Any) -> None:
        cache.results.reverse()
        init(self, cache, *how)

    monkeypatch.setattr(saving.ReplayCostly, "__init__", shuffled)
    assert fails(Case(options=("mixed",)))
