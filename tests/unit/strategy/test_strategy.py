"""Options, plumbing and metrics of the strategy; that it trains exactly is in tests/parity/lightning."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

import lt_offload
from lt_offload import OffmateStrategy
from lt_offload.errors import ConfigError
from lt_offload.strategy import metrics as callbacks
from lt_offload.strategy.checkpoint.files import AtomicCheckpointIO
from lt_offload.strategy.metrics import Metrics, tokens_in
from lt_offload.strategy.offmate import strategy_class


def trainer(strategy: Any, **settings: Any) -> L.Trainer:
    return L.Trainer(strategy=strategy, accelerator="cpu", logger=False, **settings)


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_options_are_given_by_name_and_documented(namespace: str) -> None:
    made = strategy_class(namespace)
    parameters = list(inspect.signature(made.__init__).parameters.values())[1:]
    assert parameters == list(inspect.signature(OffmateStrategy.__init__).parameters.values())[1:]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    text = inspect.cleandoc(OffmateStrategy.__doc__ or "")
    assert all(re.search(rf"^ +{p.name}: ", text, re.MULTILINE) for p in parameters)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"host_memory": "-1GB"}, ConfigError, "host_memory='-1GB' is not a size"),
        ({"batch_size": "most"}, ConfigError, "batch_size='most' must be at least 1, 'auto', or None"),
        ({"batch_size": 0}, ConfigError, "batch_size=0 must be at least 1"),
        ({"memry": "3GB"}, TypeError, r"^OffmateStrategy has no option 'memry'; did you mean memory\?"),
        ({"zzz": 1}, TypeError, "has no option 'zzz'; it has memory, host_memory, planner,"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        OffmateStrategy(**options)


def test_the_class_a_yaml_file_names(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("--strategy", type=Strategy)
    init = {"memory": "12GB", "planner": "resident", "batch_size": 4}
    config = parser.parse_object({"strategy": {"class_path": "lt_offload.OffmateStrategy", "init_args": init}})
    made = parser.instantiate(config).strategy
    assert isinstance(made, OffmateStrategy)
    assert (made.memory, made.planner, made.batch_size) == (12 * 10**9, "resident", 4)
    assert "OffmateStrategy" in parser.dump(config)
    config = parser.parse_object(
        {"strategy": {"class_path": "lt_offload.OffmateStrategy", "init_args": {"batch_size": "auto"}}}
    )
    assert parser.instantiate(config).strategy.batch_size == "auto"
    with pytest.raises(SystemExit):
        parser.parse_object({"strategy": {"class_path": "lt_offload.OffmateStrategy", "init_args": {"mamory": 1}}})
    assert "Option 'mamory' is not accepted" in capsys.readouterr().err


def test_one_class_per_namespace() -> None:
    import pytorch_lightning

    assert strategy_class("lightning.pytorch") is OffmateStrategy is lt_offload.OffmateStrategy
    other = strategy_class("pytorch_lightning")
    assert other is strategy_class("pytorch_lightning")
    assert issubclass(other, pytorch_lightning.strategies.Strategy)
    assert Strategy not in other.__mro__
    made = pytorch_lightning.Trainer(strategy=other(memory="1GB"), accelerator="cpu", logger=False)
    assert made.strategy.memory == 10**9
    taken = trainer(other(memory="1GB")).strategy  # of a Trainer of the other namespace
    assert type(taken) is OffmateStrategy
    assert taken.memory == 10**9


def test_checkpoint_io_is_ours_unless_the_trainer_has_one() -> None:
    assert isinstance(trainer("offmate").strategy.checkpoint_io, AtomicCheckpointIO)
    assert isinstance(trainer("offmate").strategy.checkpoint_io, TorchCheckpointIO)
    own = TorchCheckpointIO()
    assert trainer("offmate", plugins=[own]).strategy.checkpoint_io is own


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
