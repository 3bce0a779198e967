"""Processes and machines that were started with other numbers, or without a meeting place, are errors in all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer

import lt_offload  # noqa: F401  # registers the strategy
from lt_offload.distributed import rendezvous
from lt_offload.distributed.rendezvous import require_rendezvous
from lt_offload.errors import ConfigError
from lt_offload.strategy.several import processes
from lt_offload.strategy.several.processes import require_common_memory
from tests.parity.several.training import free_port

library: Any = dist


def met(*processes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what each process says that has a rank, and the numbers of all and of those of its machine."""
    monkeypatch.setattr(rendezvous, "_LINGER_S", 0.0)
    store = library.HashStore()

    def meet(process: tuple[int, int, int]) -> str:
        try:
            rendezvous._meet(store, *process)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(meet, processes))


def test_all_that_were_started_alike_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert met((0, 4, 2), (1, 4, 2), (2, 4, 2), (3, 4, 2), monkeypatch=monkeypatch) == [""] * 4


def test_another_number_of_processes_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    said = met((0, 4, 2), (1, 4, 2), (1, 2, 1), monkeypatch=monkeypatch)
    assert len(set(said)) == 1
    assert "num_nodes x devices = " in said[0]
    assert "2 x 1" in said[0]
    assert "2 x 2" in said[0]


def test_two_machines_with_one_number_are_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    said = met((0, 2, 1), (0, 2, 1), monkeypatch=monkeypatch)
    assert len(set(said)) == 1
    assert "two processes of this run are process 0, of machine 0: let NODE_RANK be another number" in said[0]
    assert "from 0 to 1" in said[0]


def test_who_does_not_come_is_not_waited_for_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "TIMEOUT", 0 * rendezvous.TIMEOUT)
    with pytest.raises(RuntimeError, match="1 of 2 came"):
        met((1, 2, 1), monkeypatch=monkeypatch)


def test_who_waits_says_for_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LONG_S", 0.0)
    monkeypatch.setattr(rendezvous, "TIMEOUT", rendezvous.TIMEOUT / 18_000)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with (
        pytest.warns(
            UserWarning, match="process 1 has waited 0 s: 1 of the 2 .* come to 10.0.0.1:29500; start the oth"
        ),
        pytest.raises(RuntimeError, match="1 of 2 came"),
    ):
        met((1, 2, 1), monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("found", "device", "needed"),
    [
        ("cpu:gloo,cuda:gloo", "cuda", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo", "cuda", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl", "cpu", "gloo"),
        ("cuda:nccl", "cuda", ""),
        ("cpu:gloo,cuda:nccl", "cuda", ""),
        ("cpu:gloo,cuda:nccl", "cpu", ""),
        ("cpu:gloo,cuda:gloo", "cpu", ""),
        ("cpu:mpi", "cpu", ""),
    ],
)
def test_what_a_script_has_connected_with_has_to_do(
    found: str, device: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: found)
    if not needed:
        rendezvous.initialize(device, rank=0, size=2, per_machine=2)
        return
    with pytest.raises(ConfigError, match=f"initialised with backend='{found}'.*'{device}': .*backend='{needed}'"):
        rendezvous.initialize(device, rank=0, size=2, per_machine=2)


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

    monkeypatch.setattr(processes, "make_file", refused)
    with pytest.raises(ConfigError, match=r"devices=2: .*memfd_create\), which the system does not give: .*devices=1"):
        require_common_memory(pair)
    pair.size = 1
    require_common_memory(pair)


def test_processes_of_another_run_with_the_same_port_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two runs has no store of its own, and its processes find that of the first one."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("LT_OFFLOAD_RUN", "")  # put back in the end
    stores = []
    for rank, other_run in ((0, False), (1, False), (1, True)):
        if rank == 0 or other_run:
            rendezvous.name_run()
        stores.append([rendezvous._store(rank, 2, one_machine=one_machine) for one_machine in (True, False)])
    for first, second, other in zip(*stores, strict=True):
        first.set("here", "yes")
        assert second.check(["here"])
        assert other.check(["here"]) == (first is stores[0][1])  # who starts them on several machines gives no name
