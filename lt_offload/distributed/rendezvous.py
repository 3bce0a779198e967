"""The meeting of a run's processes; it notices that they were not started for the same run."""

from __future__ import annotations

import atexit
import os
import time
import uuid
import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lt_offload.errors import ConfigError, first_line

_RUN = "LT_OFFLOAD_RUN"
"""The variable with the name of a run, which the processes have that its first one starts."""
TIMEOUT = timedelta(minutes=30)
"""Patience with processes that are late: they may be downloading. One that has failed is noticed by ``watch``."""
_POLL_S = 0.05
_LONG_S = 60.0
"""A process that has waited so long says how many have come."""
_LINGER_S = 3.0
"""The first process has the store: where something is wrong, the others have so long to read what."""


def require_rendezvous(environment: Any, *, machines: int, each: int) -> None:
    """Check that the processes of a run can find each other.

    ``environment``, Lightning's, knows the number of this process; ``each`` of the ``machines`` has so many. Raises
    ``ConfigError`` naming what is missing, or what is another number than the Trainer's.
    """
    if type(environment).__name__ == "LightningEnvironment" and machines > 1:
        _require_variables(machines)
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if type(environment).__name__ == "TorchElasticEnvironment" and local is not None and int(local) != each:
        raise ConfigError(
            f"devices={each} with {local} processes on this machine: let torchrun start --nproc-per-node {each} on "
            f"each of {machines} machines, or set devices={local}"
        )


def _require_variables(machines: int) -> None:
    setting = f"num_nodes={machines}"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if not os.environ.get(name)]
    if "GROUP_RANK" in os.environ and "NODE_RANK" in missing:
        missing.remove("NODE_RANK")
    if missing:
        raise ConfigError(
            f"{setting} needs {', '.join(missing)} in the environment, so that machines find each other: set "
            "MASTER_ADDR and MASTER_PORT to an address of the first machine and a free port there, NODE_RANK to 0 on "
            "the first machine, 1 on the next; or start the script by torchrun --nnodes or SLURM, which set all of it"
        )
    number = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", ""))
    if not number.isdecimal() or int(number) >= machines:
        raise ConfigError(f"NODE_RANK={number} with {setting}: machines have the numbers 0 to {machines - 1}")


def initialize(device: str, *, rank: int, size: int, per_machine: int) -> None:
    """Let ``torch.distributed`` connect the processes, unless it has; where the first one is says the environment.

    With ``device`` ``"cuda"`` there is NCCL beside gloo, where torch has it. Raises ``ConfigError`` if they do not come
    together, were started with other numbers, or are connected in another way already.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"
        try:
            store = _store(rank, size, one_machine=size == per_machine)
            _meet(store, rank, size, per_machine)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        except ConfigError:
            raise
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"process {rank} did not find the other {size - 1} of this run at {_where()}: {first_line(error)}; "
                "check that all were started and reach MASTER_ADDR and MASTER_PORT, and that no other run has that port"
            ) from error
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    elif (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise ConfigError(
            f"torch.distributed connects {dist.get_world_size()} processes already, and this run has {size}: use as "
            "many devices, or call torch.distributed.destroy_process_group() before"
        )
    else:
        _check_backend(device)


def _check_backend(device: str) -> None:
    """Raise ``ConfigError`` if what a script has connected its processes with cannot send what is on ``device``."""
    configured = str(dist.get_backend_config())
    backends = dict(pair.partition(":")[::2] for pair in configured.split(","))
    lacking = backends.get("cpu") in (None, "nccl") if device == "cpu" else backends.get(device) != "nccl"
    if lacking and (device == "cpu" or dist.is_nccl_available()):
        needed = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        raise ConfigError(
            f"torch.distributed was initialised with backend={configured!r}, which does not do for devices of type "
            f"{device!r}: leave init_process_group to the Trainer, or call it with backend={needed!r}"
        )


def name_run() -> None:
    """Give the run a name that the processes have that this one starts, and that no other run has."""
    os.environ[_RUN] = uuid.uuid4().hex


def _store(rank: int, size: int, *, one_machine: bool) -> Any:
    """Return the store of the run: the first process's, or torchrun's."""
    library: Any = dist  # whose types leave these out
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        shared, *_ = next(library.rendezvous("env://", rank, size, timeout=TIMEOUT))
        store = library.PrefixStore("lt_offload", shared)
        return library.PrefixStore(_start(store, rank, size), store)
    # Without waiting for as many as there should be: a process that was started for another run would make that half an
    # hour.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    options: dict[str, Any] = {"timeout": TIMEOUT, "wait_for_workers": False, "multi_tenant": True}
    # Of two runs with one port the second one has no store. Its processes would find that of the first one, and train
    # there in place of its own; on several machines a person starts them, without a common name.
    run = os.environ.get(_RUN, "") if one_machine else ""
    return library.PrefixStore(f"lt_offload{run}", library.TCPStore(host, port, size, rank == 0, **options))


def _start(store: Any, rank: int, size: int) -> str:
    """Return a name of this start, which all processes have.

    torchrun's store outlives processes that it starts again, which would find addresses of those before them; and its
    agents do not count alike: one that starts processes again because another one did has not counted that. So the
    first process makes a name up, and tells it to all that come. What it says to those of an earlier start, which have
    left their names, nobody reads.
    """
    own = uuid.uuid4().hex
    limit = time.monotonic() + TIMEOUT.total_seconds()
    told: set[str] = set()
    if rank > 0:
        store.set(f"came/{rank}", own)
    while time.monotonic() < limit:
        if rank > 0 and store.check([f"start of {own}"]):
            name: str = store.get(f"start of {own}").decode()
            store.add(f"joined {name}", 1)
            return name
        if rank == 0 and store.add(f"joined {own}", 0) == size - 1:
            return own
        for other in range(1, size) if rank == 0 else ():
            came = store.get(f"came/{other}").decode() if store.check([f"came/{other}"]) else ""
            if came and came not in told:
                store.set(f"start of {came}", own)
                told.add(came)
        time.sleep(_POLL_S)
    raise RuntimeError(f"not all came within {TIMEOUT}")


def _meet(store: Any, rank: int, size: int, per_machine: int) -> None:
    """Wait until all are there; raises ``ConfigError`` if one of them was started for a run of other numbers."""
    own = f"{size // per_machine} x {per_machine}"
    first = store.compare_set("machines", "", own).decode()
    wrong = ""
    if first != own:
        wrong = (
            f"process {rank} was started for num_nodes x devices = {own}, another one of this run for {first}: start "
            "as many processes on each machine, with the same num_nodes"
        )
    elif store.add(f"process {rank}", 1) > 1:
        wrong = (
            f"two processes of this run are process {rank}, of machine {rank // per_machine}: let NODE_RANK be another "
            f"number on each machine, from 0 to {size // per_machine - 1}"
        )
    # Told to all, before it is counted: the others would wait for half an hour for a process that does not come.
    if wrong:
        store.set("wrong", wrong)
    began, said = time.monotonic(), False
    present = store.add("there", 1)
    while present < size and not store.check(["wrong"]):
        waited = time.monotonic() - began
        if waited > _LONG_S and not said:
            said = True
            warnings.warn(
                f"offmate: process {rank} has waited {_LONG_S:g} s: {present} of the {size} processes of this run have "
                f"come to {_where()}; start the others, with the same MASTER_ADDR and MASTER_PORT. It waits for half "
                "an hour",
                stacklevel=2,
            )
        if waited > TIMEOUT.total_seconds():
            raise RuntimeError(f"{present} of {size} came within {TIMEOUT}")
        time.sleep(_POLL_S)
        present = store.add("there", 0)
    if store.check(["wrong"]):
        if rank == 0:
            time.sleep(_LINGER_S)
        raise ConfigError(store.get("wrong").decode())


def _where() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
