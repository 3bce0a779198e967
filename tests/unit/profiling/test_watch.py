"""Device memory while a block runs: what kernels take beside tensors, and what the allocator wastes."""

import pytest
import torch

from lt_offload.profiling import block_cost as trial
from lt_offload.profiling.measure import profile
from lt_offload.profiling.watch import Watch
from tests.support import models


@pytest.fixture
def allocator(monkeypatch):
    """Torch's figures: ``allocated`` now, and at most while something ran, with what was ``reserved`` then."""
    figures = {"now": 100, "allocated": 0, "reserved": 0}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: figures["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: figures["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: figures["reserved"])
    return figures


def test_workspaces_count_and_waste_is_told_apart(allocator):
    watch = Watch(torch.device("cuda", 0))
    with watch:
        allocator.update(allocated=160, reserved=200)
    assert watch.peak() == 60
    assert watch.slack == 40
    with watch:
        allocator.update(allocated=130, reserved=150)
    assert watch.peak() == 30
    assert watch.slack == 40


def test_the_profile_has_the_largest_waste_of_all_blocks(monkeypatch):
    wastes = iter(range(1, 1000))

    class Wasteful(Watch):
        def __exit__(self, *error):
            super().__exit__(*error)
            self.slack = made.append(next(wastes)) or made[-1]

    made = []
    monkeypatch.setattr(trial, "Watch", Wasteful)
    model = models.build("llama")
    found = profile(model, models.batch(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    assert found.slack_bytes == made[-1]
    assert len(made) > 4
