"""The metrics callback on its own; through the strategy it is in tests/parity/lightning/test_lightning.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lt_offload.strategy import metrics as callbacks
from lt_offload.strategy.metrics import Metrics, tokens_in

IDS = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": IDS, "labels": IDS[:1]}, 10),
        ({"labels": torch.zeros(3), "tokens": IDS}, 10),
        ([torch.zeros(2, 7), (IDS[:1], IDS)], 5),
        (IDS, 10),
        ({"mask": IDS.bool(), "x": torch.zeros(2, 5), "y": torch.zeros(4, dtype=torch.long)}, 0),
        ({"input_ids": "text"}, 0),
    ],
)
def test_tokens_in(batch: Any, count: int) -> None:
    assert tokens_in(batch) == count


class Recording(Metrics):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = [{}]

    def log(self, name: str, value: torch.Tensor, **options: Any) -> None:
        assert value.device.type == "cpu"
        assert options["on_step"]
        self.logged[-1][name] = float(value)


def test_tokens_per_second_leave_validation_out_and_begin_anew_after_each_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(callbacks, "time", clock)
    metrics = Recording()
    metrics.on_train_start(None, None)
    for step in (1, 2, 3):
        clock.now += 2
        metrics.on_validation_start(None, None)
        clock.now += 50
        metrics.on_validation_end(None, None)
        clock.now += 3
        trainer: Any = SimpleNamespace(global_step=step, log_every_n_steps=2, world_size=3, strategy=SimpleNamespace())
        metrics.on_train_batch_end(trainer, None, None, IDS, step)
        metrics.logged.append({})
    assert metrics.logged == [{"tokens_per_s": 6.0}] * 3 + [{}], "of all three processes"
