"""Options and plumbing of the strategy; that it trains exactly is in tests/parity/lightning/test_lightning.py."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

import lt_offload
from lt_offload import OffmateStrategy
from lt_offload.errors import ConfigError
from lt_offload.model.blocks import find_blocks
from lt_offload.schema.plan import Plan
from lt_offload.strategy import offmate
from lt_offload.strategy.checkpoint.files import AtomicCheckpointIO
from lt_offload.strategy.metrics import Metrics
from lt_offload.strategy.offmate import strategy_class
from tests.support import models, plans


def _plan() -> Plan:
    model = models.build()
    return plans.streamed(
        find_blocks(model), torch.optim.SGD(model.parameters()), options=("keep",), places=("device",)
    )


PLAN = _plan()


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def trainer(strategy: Any, **settings: Any) -> L.Trainer:
    return L.Trainer(strategy=strategy, accelerator="cpu", logger=False, **settings)


def test_blocks_run_on_the_gpu_that_the_trainer_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """``devices=[1]``: batches go to cuda:1, and so must blocks; what the plan says about the device reaches it."""
    opened: list[Any] = []

    class Stop(Exception):
        pass

    def open_device(*args: Any, **options: Any) -> None:
        opened.append((args, options))
        raise Stop

    monkeypatch.setattr(offmate, "open_device", open_device)
    strategy = OffmateStrategy(memory="1GB")
    strategy.parallel_devices = [torch.device("cuda", 1)]
    assert strategy.root_device == torch.device("cuda", 1)
    replayed = replace(PLAN, context_bytes=77, host_threads=3)
    for plan, threads, context in ((None, None, 0), (replayed, 3, 77)):
        with pytest.raises(Stop):
            strategy._install(None, plan, 5)
        assert opened.pop() == ((5, "cuda:1"), {"host_threads": threads, "context": context})


OPTIONS = {
    "memory": None,
    "host_memory": None,
    "planner": "auto",
    "batch_size": None,
    "blocks": None,
    "micro_batches": 1,
    "host_update": True,
    "activation_offload": True,
    "recompute": True,
    "chunked_loss": False,
    "gradient_reserve": None,
    "plan": None,
    "solver_time_limit": 30.0,
    "async_checkpoint": False,
    "report_dir": None,
}


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_options_and_defaults_are_pinned(namespace: str) -> None:
    parameters = list(inspect.signature(strategy_class(namespace).__init__).parameters.values())[1:]
    assert {p.name: p.default for p in parameters} == OPTIONS
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)


def test_every_option_is_documented() -> None:
    assert all(
        f"\n        {name}: " in inspect.cleandoc(OffmateStrategy.__doc__ or "").replace("\n    ", "\n        ")
        for name in OPTIONS
    )


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"memory": "ten"}, ConfigError, "memory='ten' is not a size"),
        ({"memory": 0}, ConfigError, "memory=0 is not a size"),
        ({"host_memory": "-1GB"}, ConfigError, "host_memory='-1GB' is not a size"),
        ({"planner": "magic"}, ConfigError, "planner='magic' does not exist; choose one of auto, offmate"),
        ({"batch_size": "most"}, ConfigError, "batch_size='most' must be at least 1, 'auto', or None"),
        ({"batch_size": 0}, ConfigError, "batch_size=0 must be at least 1"),
        ({"gradient_reserve": 2}, ConfigError, "gradient_reserve=2 is not a part of the gradients"),
        ({"solver_time_limit": 0}, ConfigError, "solver_time_limit=0 must be a positive"),
        ({"memry": "3GB"}, TypeError, r"^OffmateStrategy has no option 'memry'; did you mean memory\?"),
        ({"zzz": 1}, TypeError, "has no option 'zzz'; it has memory, host_memory, planner,"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        OffmateStrategy(**options)


def test_sizes_are_bytes() -> None:
    strategy = OffmateStrategy(memory="10GiB", host_memory=5_000_000)
    assert (strategy.memory, strategy.host_memory) == (10 * 2**30, 5_000_000)


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


def test_single_process() -> None:
    strategy = trainer("offmate").strategy
    assert strategy.root_device == torch.device("cpu")
    assert strategy.is_global_zero
    assert strategy.broadcast("x") == strategy.reduce("x") == strategy.all_gather("x") == "x"


def test_models_are_made_on_the_host() -> None:
    strategy = OffmateStrategy()
    strategy.parallel_devices = [torch.device("meta")]  # stands for a GPU
    with strategy.tensor_init_context():
        assert torch.empty(1).device.type == "cpu"


def test_the_metrics_callback_comes_once_and_before_checkpoints() -> None:
    saver = ModelCheckpoint()
    made = trainer("offmate", callbacks=[saver])
    module = Module()
    module.trainer = made
    made.strategy.connect(module)
    made.strategy.connect(module)
    found = [i for i, callback in enumerate(made.callbacks) if isinstance(callback, Metrics)]
    assert len(found) == 1
    assert isinstance(made.callbacks[found[0]], L.Callback)
    assert found[0] == made.callbacks.index(saver) - 1


def test_barebones_gets_no_callback() -> None:
    made = trainer("offmate", barebones=True)
    module = Module()
    module.trainer = made
    made.strategy.connect(module)
    assert not any(isinstance(callback, Metrics) for callback in made.callbacks)


def test_checkpoint_io_is_ours_unless_the_trainer_has_one() -> None:
    assert isinstance(trainer("offmate").strategy.checkpoint_io, AtomicCheckpointIO)
    assert isinstance(trainer("offmate").strategy.checkpoint_io, TorchCheckpointIO)
    own = TorchCheckpointIO()
    assert trainer("offmate", plugins=[own]).strategy.checkpoint_io is own


def test_async_checkpoints_wrap_ours() -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    strategy = trainer("offmate", plugins=[AsyncCheckpointIO()]).strategy
    assert isinstance(strategy.checkpoint_io, AsyncCheckpointIO)
    assert isinstance(strategy.checkpoint_io.checkpoint_io, AtomicCheckpointIO)


def test_run_folder(tmp_path: Path) -> None:
    assert trainer("offmate").strategy._folder(trainer("offmate")) is None
    logger = CSVLogger(tmp_path, version="a")
    with_logger = L.Trainer(strategy="offmate", accelerator="cpu", logger=logger)
    assert with_logger.strategy._folder(with_logger) == tmp_path / "lightning_logs" / "a"
    assert OffmateStrategy(report_dir=tmp_path)._folder(with_logger) == tmp_path
    rehearsal = L.Trainer(strategy="offmate", accelerator="cpu", fast_dev_run=True)
    assert rehearsal.strategy._folder(rehearsal) is None
