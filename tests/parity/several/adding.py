"""Sums over several machines: ``python -m tests.parity.several.adding FOLDER``, six processes on three machines.

Each leaves in the folder whether what it got is, bit for bit, what adding in the order of ranks gives.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lt_offload.distributed.ranks import Ranks
from lt_offload.distributed.sums import BUCKET_BYTES, PART_BYTES
from lt_offload.errors import PlanError, ProcessError
from tests.parity.several import training

SIZES = (0, 1, 7, 1000, PART_BYTES // 4, 5 * PART_BYTES // 4 + 3)
MACHINES, EACH = 3, 2
DTYPES = (torch.float32, torch.bfloat16)


def gradients(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Return what a process has, of sizes that are sent at once and in parts."""
    source = torch.Generator().manual_seed(rank)
    return [(10.0 ** (rank % 3) * torch.randn(size, generator=source)).to(dtype) for size in SIZES]


def in_order(dtype: torch.dtype) -> list[Tensor]:
    """Return the sums of one process that takes turns."""
    found = gradients(0, dtype)
    for rank in range(1, MACHINES * EACH):
        for total, grad in zip(found, gradients(rank, dtype), strict=True):
            total.add_(grad)
    return found


def by_machines(dtype: torch.dtype) -> list[Tensor]:
    """Return the sums of the machines' sums, which are other numbers."""
    machines = []
    for first in range(0, MACHINES * EACH, EACH):
        rows = zip(*(gradients(rank, dtype) for rank in range(first, first + EACH)), strict=True)
        machines.append([sum(row[1:], row[0]) for row in rows])
    return [sum(row[1:], row[0]) for row in zip(*machines, strict=True)]


def warms_up(ranks: Ranks) -> bool:
    """Return whether a group on devices is asked once for what training asks for; here gloo is in NCCL's place."""
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent:
        ranks.warm_up(torch.device("cpu"))
        without = sent.call_count
        with mock.patch.object(ranks, "_on_device", ranks.machine.control):
            ranks.warm_up(torch.device("cpu"))
        # Those behind it go between machines.
        return without == 0 and sent.call_args_list[0].args[0].nbytes == BUCKET_BYTES


def work(folder: Path, rank: int) -> None:
    """Add up in both ways."""
    store = training.store_at(folder / "store", rank)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MACHINES * EACH)
    ranks = Ranks(per_machine=EACH)
    found = {"warmed up": warms_up(ranks)}
    for dtype in DTYPES:
        expected = in_order(dtype)
        first = rank // EACH * EACH
        # In memory that a machine has in common, the rows of all of it are there.
        rows = list(zip(*(gradients(one, dtype) for one in range(first, first + EACH)), strict=True))
        ranks.add_up_rows(rows, op=4 if dtype == torch.bfloat16 else None)
        found[f"{dtype}, rows"] = all(map(torch.equal, [row[0] for row in rows], expected))
        own = gradients(rank, dtype)
        own[3] = own[3].view(20, 50).t()
        ranks.add_up(own)
        own[3] = own[3].t().reshape(-1)
        found[f"{dtype}, each"] = all(map(torch.equal, own, expected))
        found[f"{dtype}, by machines"] = all(map(torch.equal, by_machines(dtype), expected))
    ranks.barrier()
    found["order"] = disordered(ranks)
    ranks.close()
    (folder / f"{rank}.json").write_text(json.dumps(found))


def disordered(ranks: Ranks) -> bool:
    """Return whether all hear that one machine is at something else than the others; what they send is alike."""
    try:
        ranks.add_up_rows([[torch.zeros(3)]], op=7 if ranks.rank // EACH == 1 else 5)
    except (PlanError, ProcessError) as error:
        ranks.watch.tell(error)
        ranks.watch.leave(training.PATIENCE)  # all have heard of it
        return "machines add up in different orders: process" in str(error)
    return False


if __name__ == "__main__":
    torch.set_num_threads(1)
    training.fork(MACHINES * EACH, lambda rank: work(Path(sys.argv[1]), rank))
