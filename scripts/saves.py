"""What a checkpoint takes when all processes write it together, and when the first one writes all of it.

    python -m scripts.saves [--rounds 5]

2 and 4 processes train a Llama in fp32 with AdamW for a step, all updates on the host of the emulated device, and save:
in each round first the one way, then the other. Of a save are shown seconds, the processor time of the process that has
most to do, and the ratio of these, as medians. Processor time is what a save takes where each process has a core and
the disk is fast enough.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lt_offload.distributed.ranks import Ranks
from lt_offload.execute.device.emulated import EmulatedDevice
from lt_offload.execute.engine import Engine
from lt_offload.schema.plan import Plan
from lt_offload.strategy.checkpoint.files import AtomicCheckpointIO
from lt_offload.strategy.checkpoint.several import FilePart
from lt_offload.units import format_bytes
from scripts.common import arguments
from scripts.host_copies import planned
from tests.parity.several import training
from tests.parity.several.training import Case
from tests.support.engines import make_optimizer

_CASE = Case(model={"layers": 8, "hidden_size": 512, "intermediate_size": 1376})
_ROOM = 1 << 40
"""Bytes: more than there is, so that nothing is copied aside for want of room."""
Times = dict[str, list[float]]
"""Seconds of each round, by the way of saving and the kind of time."""


def main() -> None:
    """Print a row per number of processes."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    plan = planned(_CASE)
    print("processes  bytes     together (s, processor s)  first alone (s, processor s)  ratio of processor times")
    for count in (2, 4):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            training.fork(count, partial(_work, folder, plan, count, options.rounds))
            found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
            size = (folder / "together.ckpt").stat().st_size
        own = {way: _medians(found, way) for way in ("together", "alone")}
        ratio = own["alone"][1] / own["together"][1]
        shown = "  ".join(f"{seconds:.2f} {processor:.2f}" for seconds, processor in own.values())
        print(f"{count}  {format_bytes(size)}  {shown}  {ratio:.2f}")


def _medians(found: list[Times], way: str) -> tuple[float, float]:
    """Return the median seconds of a save, and the median processor time of the process that has most to do."""
    seconds, processor = (
        statistics.median(max(times) for times in zip(*(one[f"{way} {kind}"] for one in found), strict=True))
        for kind in ("seconds", "processor")
    )
    return seconds, processor


def _work(folder: Path, plan: Plan, count: int, rounds: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=training.store_at(folder / "store", rank), rank=rank, world_size=count)
    ranks = Ranks()
    model = _CASE.build()
    optimizer = make_optimizer(model, _CASE.optimizer)
    device = EmulatedDevice(plan.budget_bytes)
    engine = Engine(model, optimizer, plan, device, others=ranks)
    engine.install()
    engine.follow(optimizer)
    _CASE.loss(model, _CASE.batch(0, rank, 0), count).backward()
    optimizer.step()
    checkpoint = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    files: Any = AtomicCheckpointIO()

    def together() -> None:
        path = folder / "together.ckpt"
        begin = partial(FilePart, ranks.machine, ranks.letters, path, checkpoint, engine.host_copies)
        files.save_part(begin, path, engine.snapshot(_ROOM), later=False)

    def alone() -> None:
        if rank == 0:
            files.save_snapshot(checkpoint, folder / "alone.ckpt", engine.snapshot(_ROOM), later=False)

    times: Times = {}
    with engine.at_rest():
        for _ in range(rounds):
            _timed(together, "together", ranks, times)
            _timed(alone, "alone", ranks, times)
    (folder / f"{rank}.json").write_text(json.dumps(times))
    engine.remove()
    device.close()
    ranks.close()


def _timed(save: Callable[[], None], way: str, ranks: Ranks, times: Times) -> None:
    ranks.barrier()
    begun, processor = time.perf_counter(), time.process_time()
    save()
    spent = time.process_time() - processor
    ranks.barrier()  # till the file is there
    times.setdefault(f"{way} seconds", []).append(time.perf_counter() - begun)
    times.setdefault(f"{way} processor", []).append(spent)


if __name__ == "__main__":
    main()
