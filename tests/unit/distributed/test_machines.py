"""What each process can see by itself of how several machines were started."""

from __future__ import annotations

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer

import lt_offload  # noqa: F401  # registers the strategy
from lt_offload.errors import ConfigError
from lt_offload.strategy.several.machines import require_rendezvous

NAMES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_machines_without_a_meeting_place_are_refused_when_the_trainer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="num_nodes=2 needs MASTER_ADDR, MASTER_PORT, NODE_RANK in the environment"):
        Trainer(strategy="offmate", accelerator="cpu", devices=1, num_nodes=2, logger=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match="num_nodes=2 needs NODE_RANK in"):
        Trainer(strategy="offmate", accelerator="cpu", devices=1, num_nodes=2, logger=False)
    require_rendezvous(LightningEnvironment(), machines=1, each=2)


@pytest.mark.parametrize("number", ["2", "first"])
def test_a_number_that_no_machine_has(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("127.0.0.1", "29500", number), strict=False):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"NODE_RANK={number} with num_nodes=2: machines have the numbers 0 to 1"):
        require_rendezvous(LightningEnvironment(), machines=2, each=1)
    monkeypatch.setenv("NODE_RANK", "1")
    require_rendezvous(LightningEnvironment(), machines=2, each=1)


def test_torchrun_with_another_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="devices=2 with 1 processes on this machine: .* --nproc-per-node 2"):
        require_rendezvous(TorchElasticEnvironment(), machines=2, each=2)
    require_rendezvous(TorchElasticEnvironment(), machines=2, each=1)
