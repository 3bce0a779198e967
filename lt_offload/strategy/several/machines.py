"""Faults in how the processes of a run are started, and where they are."""

from __future__ import annotations

import os
from typing import Any

from lt_offload.distributed.peers import Peers
from lt_offload.errors import ConfigError
from lt_offload.machine.pages import make_file


def require_rendezvous(environment: Any, *, machines: int, each: int) -> None:
    """Check that the processes of a run can find each other.

    Args:
        environment: Lightning's, which knows the number of this process.
        machines: their number (``num_nodes``).
        each: processes on each of them (``devices``).

    Raises:
        ConfigError: naming what is missing, or what is another number than the Trainer's.
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


def require_common_memory(machine: Peers) -> None:
    """Check that the processes of a machine can share memory; all of them call this, before anything is loaded.

    Raises:
        ConfigError: if the system does not let them.
    """
    if machine.size > 1:
        os.close(machine.share_file(lambda: _trial_file(machine.size), by=0))


def _trial_file(devices: int) -> int:
    try:
        return make_file(1, "trial")
    except OSError as error:
        raise ConfigError(
            f"devices={devices}: the processes of this machine share memory that has no name (memfd_create), which the "
            f"system does not give: {error}; start them in a container that allows it, or set devices=1"
        ) from error
