"""Options and plumbing of the strategy; that it trains exactly is in tests/parity/lightning/test_lightning.py."""

from __future__ import annotations

import inspect
import re
from typing import Any

import lightning.pytorch as L
import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

import lt_offload
from lt_offload import OffmateStrategy
from lt_offload.errors import ConfigError
from lt_offload.strategy.checkpoint.files import AtomicCheckpointIO
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
