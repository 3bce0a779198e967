"""Processes of a run, in one of which something goes wrong: what each says, how long it stays, what is left.

``python -m tests.faults.several FOLDER KIND COUNT MACHINES`` imports everything once and forks so many processes for
each place where that kind of fault may come. A fault is injected by an object that counts calls; nobody sleeps until
it is likely to happen.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lt_offload
from lt_offload.distributed import sums, watch
from lt_offload.execute.updates import others
from lt_offload.execute.updates.arrivals import Arrivals
from lt_offload.execute.updates.optimizer import Updates
from lt_offload.strategy.checkpoint import archive, files
from tests.parity.several.training import begin_forked, environment, free_port
from tests.support import trainers

MEMORY = "40MB"
KINDS = ("raise", "kill", "stop", "over budget")
PLACES = ("forward", "exchange", "arrival", "update", "update beside", "part", "save")
"""Where a fault comes: in the last process, or where the first one writes, which has the run's store."""
SIZES = {(2, 1): PLACES, (2, 2): ("forward", "exchange", "update", "save"), (4, 2): ("forward", "exchange")}
"""How many processes there are, on how many machines, and the places of faults that are tried there."""
PIECES = 80
"""Of host copies that the second process has written into one file and a half."""
LIMIT_S = 500.0
"""All have to be gone by then, after the fault: who hangs does so for half an hour."""
SILENCE_S = 12.0
"""Instead of ``watch.SILENCE_S`` where one is stopped: a process of a busy machine may be silent for seconds."""


def places(kind: str, count: int, machines: int) -> tuple[str, ...]:
    """Return where this kind of fault can come.

    Nothing but a forward takes device memory, and processes of one machine have parts of a checkpoint.
    """
    return ("forward",) if kind == "over budget" else SIZES[count, machines]


def at_fault(place: str, count: int) -> int:
    """Return in which process the fault comes: the last one has neighbours on its machine, where there are four."""
    return 0 if place == "save" else count - 1


class Injector:
    """Does what goes wrong, at the second call of what it is asked to break; says when."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.calls = kind, folder, 0

    def __call__(self, *, at: int = 2) -> None:
        self.calls += 1
        if self.calls != at:
            return
        (self.folder / "fault").write_text(repr(time.monotonic()))
        if self.kind == "raise":
            raise ValueError("broken here")
        if self.kind == "over budget":
            torch.empty(10**9, dtype=torch.uint8)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.kind])


class Module(trainers.Module):
    """Breaks in a forward in the middle of training, or lets something break from then on."""

    breaks: Callable[[], None] = staticmethod(lambda: None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.breaks()
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


def broken(before: Callable[..., Any], injector: Injector, at: int) -> Callable[..., Any]:
    """Return ``before`` with a fault in its middle: some of it has been done."""

    def call(*args: Any, **kwargs: Any) -> Any:
        injector(at=at)
        return before(*args, **kwargs)

    return call


def train(kind: str, place: str, folder: Path, rank: int, count: int, machines: int) -> None:
    """Train as one of some processes, of which one fails at ``place``."""
    import lightning.pytorch
    from lightning.pytorch.callbacks import ModelCheckpoint

    lightning.pytorch.seed_everything(7, verbose=False)
    if kind == "stop":
        watch.SILENCE_S = SILENCE_S
    module = Module(shuffle=False, batch_size=1)
    if rank == at_fault(place, count):
        injector = Injector(kind, folder)
        if place == "forward":
            module.breaks = lambda: injector(at=1)
        elif place == "exchange" and machines > 1:
            # On the network's lane, in the middle of a backward or behind it.
            module.breaks = lambda: setattr(sums, "add_rows", broken(sums.add_rows, injector, at=3))
        elif place == "exchange":
            # The others wait for all that are added up.
            others._complete = broken(others._complete, injector, at=40)
        elif place == "arrival":
            # The others' updates wait for these gradients, in the backward of the second step.
            Arrivals._give = broken(Arrivals._give, injector, at=6)  # type: ignore[method-assign]
        elif place.startswith("update"):
            Updates._on_host = broken(Updates._on_host, injector, at=8)  # type: ignore[method-assign]  # and for this
        elif place == "part":
            archive._write = broken(archive._write, injector, at=PIECES)  # in the middle of the second file
        else:
            archive.flush = broken(archive.flush, injector, at=3)  # of the second file
    saver = ModelCheckpoint(folder / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    strategy = lt_offload.OffmateStrategy(memory=MEMORY, planner="l2l")
    # Whichever of two plans is faster by what was measured: where they differ, it is said which is meant.
    strategy.settings = replace(strategy.settings, hosted=place in ("arrival", "update beside"))
    options: dict[str, Any] = {"gradient_clip_val": 1.0} if place == "exchange" else {}
    trainers.fit(
        strategy,
        module,
        **options,
        devices=count // machines,
        num_nodes=machines,
        max_epochs=1,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[saver],
    )


def forked(kind: str, place: str, folder: Path, rank: int, count: int, port: int, machines: int) -> int:
    """Fork one process, which ends as a script does: with what is registered for its end."""
    child = os.fork()
    if child:
        return child
    begin_forked()
    os.environ.update(environment(rank, count, port, machines))
    code, said = 1, "nothing"
    try:
        train(kind, place, folder, rank, count, machines)
        code = 0
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        with (folder / f"traceback-{rank}").open("w") as file:
            traceback.print_exc(file=file)
    (folder / f"said-{rank}").write_text(said)
    atexit._run_exitfuncs()
    os._exit(code)


def case(kind: str, place: str, folder: Path, count: int, machines: int) -> dict[str, Any]:
    """Return what became of all processes."""
    folder.mkdir()
    port = free_port()
    shared = set(os.listdir("/dev/shm"))
    children = [forked(kind, place, folder, rank, count, port, machines) for rank in range(count)]
    ended: dict[int, float] = {}
    codes: dict[int, int] = {}
    fault, limit = folder / "fault", time.monotonic() + 2 * LIMIT_S
    while len(ended) < len(children) and time.monotonic() < limit:
        if fault.exists() and fault.stat().st_size:
            limit = float(fault.read_text()) + LIMIT_S
        for rank, child in enumerate(children):
            if rank in ended:
                continue
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                ended[rank], codes[rank] = time.monotonic(), os.waitstatus_to_exitcode(status)
        stopped = at_fault(place, count)
        if machines == count and kind == "stop" and len(ended) == count - 1 and stopped not in ended:
            os.kill(children[stopped], signal.SIGCONT)  # on its machine there is nobody who would kill it
        time.sleep(0.02)
    alive = [rank for rank in range(count) if rank not in ended]
    for rank in alive:
        os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
    fault_at = float(fault.read_text()) if fault.exists() else None
    said = [folder / f"said-{rank}" for rank in range(count)]
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))  # raises if somebody listens there
    kept = sorted(path.name for path in (folder / "kept").glob("*"))
    files.prepare(folder / "kept")  # as the next run does
    return {
        "fault": fault_at is not None,
        "said": [path.read_text() if path.exists() else None for path in said],
        "codes": [codes.get(rank) for rank in range(count)],
        "alive": alive,
        "seconds": [round(ended[rank] - fault_at, 2) if fault_at and rank in ended else None for rank in range(count)],
        "left in shared memory": sorted(set(os.listdir("/dev/shm")) - shared),
        "checkpoints": kept,
        "cleaned": sorted(path.name for path in (folder / "kept").glob(".*")) == [],
        "torn": [path.name for path in (folder / "kept").glob("*.ckpt") if not files.is_complete(path)],
    }


def main(folder: Path, kind: str, count: int, machines: int) -> None:
    """Carry out all cases of a kind."""
    torch.set_num_threads(1)
    trainers.models.build()  # transformers is imported once
    found = {place: case(kind, place, folder / place, count, machines) for place in places(kind, count, machines)}
    (folder / "found.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
