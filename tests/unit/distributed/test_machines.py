"""What each process can see by itself of how several machines were started."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer

import lt_offload  # noqa: F401  # registers the strategy
from lt_offload.errors import ConfigError
from lt_offload.strategy.several import machines
from lt_offload.strategy.several.machines import require_common_memory, require_rendezvous

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


class Machine:
    """Two processes, of which this is the first."""

    size = 2

    def share_file(self, make: Callable[[], int], by: int) -> int:
        assert by == 0
        self.made = make()
        return self.made


def test_memory_in_common_is_tried_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pair: Any = Machine()
    require_common_memory(pair)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pair.made)

    def refused(nbytes: int, name: str) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(machines, "make_file", refused)
    with pytest.raises(ConfigError, match=r"devices=2: .*memfd_create\), which the system does not give: .*devices=1"):
        require_common_memory(pair)
    pair.size = 1
    require_common_memory(pair)
