"""Training in several processes, each with an engine, and what plain PyTorch makes of the same batches in one.

``python -m tests.parity.several.training FOLDER`` carries out the groups that are in the folder's file ``groups``: it
imports everything once and forks the processes of each.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import pickle
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_offload
from lt_offload.distributed import sums
from lt_offload.distributed.ranks import Ranks
from lt_offload.execute.engine import Engine
from lt_offload.schema.plan import Plan
from tests.parity.models import quantized
from tests.support import models
from tests.support.engines import Result, make_optimizer, scheduler, updated
from tests.support.hostile.device import HostileDevice

_numbers = itertools.count(os.getpid() * 64)
STEPS = 3
PATIENCE = 1000.0
"""Seconds in which all processes of a group have to end: only those that hang take so long."""
HANG = 1.5 * PATIENCE
"""Seconds that a test waits for all of a group, less than what the processes wait for each other in vain."""


def with_masters(groups: Any) -> torch.optim.Optimizer:
    """An optimizer that keeps weights of half precision in full precision, too."""
    return lt_offload.AdamW(groups, lr=1e-2)


class Sometimes(nn.Module):
    """A part of a layer with one weight more, which a forward need not use, as an expert without tokens."""

    used = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((models.HIDDEN,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + self.scale * x if self.used else out


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how it is trained."""

    model: dict[str, Any] = field(default_factory=dict)
    """Options of ``models.build``."""
    four_bits: bool = False
    """Whether layers have four bits, under adapters."""
    lookups: bool = False
    """Whether embeddings are frozen, and larger than the device."""
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "adamw-fused"
    tile_tokens: int | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    idle: bool = False
    """Whether a weight has a gradient in the second process only, and in one step in none."""
    user: bool = False
    """Whether a user writes weights and states between steps, in every process, and evaluates the model."""

    def build(self) -> nn.Module:
        model = quantized.adapted(**self.model) if self.four_bits else models.build(**{"layers": 2} | self.model)
        if self.lookups:
            torch.manual_seed(0)
            embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
            embedding.weight = nn.Parameter(torch.randn(20_000, embedding.embedding_dim), requires_grad=False)
        lt_offload.tile_tokens(model, self.tile_tokens)
        if self.idle:
            layer: Any = model.get_submodule("model.layers.1")
            layer.mlp = Sometimes(layer.mlp)
        return model

    def switch(self, model: nn.Module, step: int, rank: int) -> None:
        """Let ``model`` use what it has for ``rank`` in ``step``."""
        for module in model.modules() if self.idle else ():
            if isinstance(module, Sometimes):
                module.used = rank == 1 and step != 1

    def batch(self, step: int, rank: int, part: int) -> dict[str, Tensor]:
        seed = 1000 * step + 10 * rank + part
        return models.batch(self.build(), batch_size=1 + rank % 2, sequence_length=12 - part, seed=seed)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], ranks: int) -> Tensor:
        loss: Tensor = model(**batch).loss / self.accumulate / ranks
        return loss


def plainly(case: Case, ranks: int) -> Result:
    """Train in one process without the engine: it adds up what the processes would, in their order."""
    model = case.build()
    optimizer = make_optimizer(model, case.optimizer)
    schedule = scheduler(optimizer)
    losses = []
    for step in range(STEPS):
        sums: dict[nn.Parameter, Tensor] = {}
        for rank in range(ranks):
            case.switch(model, step, rank)
            for part in range(case.accumulate):
                loss = case.loss(model, case.batch(step, rank, part), ranks)
                loss.backward()
                losses.append(loss.detach())
            if case.accumulate > 1:  # each adds up its own first
                for param in model.parameters():
                    if param.grad is not None:
                        sums[param] = sums[param] + param.grad if param in sums else param.grad
                        param.grad = None
        for param, total in sums.items():
            param.grad = total
        losses += updated(model, optimizer, case.clip_norm, case.clip_value)
        schedule.step()
        if case.user:
            losses.append(meddle(case, model, optimizer, step))
    return Result(losses, model, optimizer)


def by_ddp(case: Case, ranks: Ranks) -> Result:
    """Train as one of several processes with PyTorch's own ``DistributedDataParallel``, which takes the mean itself."""
    model = case.build()
    stock = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(model, case.optimizer)
    schedule = scheduler(optimizer)
    losses = []
    for step in range(STEPS):
        for part in range(case.accumulate):
            with nullcontext() if part == case.accumulate - 1 else stock.no_sync():
                loss = case.loss(stock, case.batch(step, ranks.rank, part), 1)
                loss.backward()
            losses.append(loss.detach() / ranks.size)
        losses += updated(model, optimizer, case.clip_norm, case.clip_value)
        schedule.step()
        if case.user:
            losses.append(meddle(case, model, optimizer, step))
    return Result(losses, model, optimizer)


def meddle(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """Write weights and states as callbacks do, and return the loss that the model has then."""
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    with torch.no_grad():
        if step == 0:
            for param in params:
                param.mul_(0.99)
            optimizer.state[trained[0]]["exp_avg"].mul_(0.5)
            if params[1].dtype == torch.float32:
                params[1].numpy()[...] += 1e-3  # which no operation of torch shows
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            model.load_state_dict({name: 1.01 * value for name, value in model.state_dict().items()})
        if step == 2:
            trained[-1].clamp_(-0.05, 0.05)
            for param in trained:
                optimizer.state[param]["exp_avg_sq"].add_(1e-6)
        kept = [param.clone() for param in trained]
        for param in trained:  # as an average of weights is swapped in for an evaluation
            param.add_(0.01)
        loss: Tensor = model(**case.batch(step, 7, 0)).loss.detach().clone()
        for param, value in zip(trained, kept, strict=True):
            param.copy_(value)
    return loss


def by_engine(case: Case, plan: Plan, ranks: Ranks, *, delay: bool) -> tuple[Result, dict[str, int]]:
    """Train as one of several processes; ``delay`` lets copies of the last one be late, each by another time.

    What it sends to other machines is, too, and all of them have threads then: sums go between them in the backward.

    Returns:
        What it comes to, and :func:`mapped_bytes` at its end.
    """
    model = case.build()
    optimizer = make_optimizer(model, case.optimizer)
    schedule = scheduler(optimizer)
    late = delay and ranks.rank == ranks.size - 1
    threads = delay and (late or ranks.machine is not ranks)
    device = HostileDevice(
        plan.budget_bytes, "thread" if threads else "lazy", check=not threads, at_once=("host", "network")
    )
    sending: AbstractContextManager[None] = nullcontext()
    if late:
        _delay(device)
        sending = late_sends()
    engine = Engine(model, optimizer, plan, device, others=ranks)
    losses = []
    try:
        sending.__enter__()
        engine.install()
        engine.follow(optimizer)
        engine.clip_value = case.clip_value
        if case.accumulate > 1:
            engine.accumulate = case.accumulate
        for step in range(STEPS):
            case.switch(model, step, ranks.rank)
            for part in range(case.accumulate):
                loss = case.loss(model, case.batch(step, ranks.rank, part), ranks.size)
                loss.backward()
                losses.append(loss.detach().clone())
            if case.clip_norm is not None:
                losses.append(engine.clip_grad_norm_(case.clip_norm))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if case.user:
                losses.append(meddle(case, model, optimizer, step))
        engine.drain()
        ranks.barrier()  # or some would map more, or less, while others look
        memory = mapped_bytes()
        ranks.barrier()
    finally:
        engine.remove()
        device.close()
        sending.__exit__(None, None, None)
    return Result(losses, model, optimizer), memory


def mapped_bytes() -> dict[str, int]:
    """Return the RAM of what processes have in common, by its name: this process's part of pages that several map.

    Under ``NAME alone`` stands what it would be if no other process mapped it.
    """
    found: dict[str, int] = {}
    name, alone = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if "-" in key:
            _, _, name = line.partition("/memfd:lt_offload ")
            name, alone = name.removesuffix(" (deleted)"), values[0].endswith("s")
        elif name and key == "Pss:":
            found[name] = found.get(name, 0) + 1024 * int(values[0])
        elif name and key == "Rss:" and alone:
            found[f"{name} alone"] = found.get(f"{name} alone", 0) + 1024 * int(values[0])
    return found


def lopsided(case: Case, plan: Plan, ranks: Ranks) -> str:
    """Return what is said when the last process alone writes a weight."""
    model = case.build()
    optimizer = make_optimizer(model, case.optimizer)
    device = HostileDevice(plan.budget_bytes)
    engine = Engine(model, optimizer, plan, device, others=ranks)
    try:
        engine.install()
        engine.follow(optimizer)
        if ranks.rank == ranks.size - 1:
            with torch.no_grad():
                next(model.parameters()).zero_()
        case.loss(model, case.batch(0, ranks.rank, 0), ranks.size).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.remove()
        device.close()
    return "nothing"


def _delay(device: HostileDevice) -> None:
    chance, copy = random.Random(7), device.copy

    def late(target: Tensor, source: Tensor) -> None:
        time.sleep(chance.random() * 2e-3)
        copy(target, source)

    device.copy = late  # type: ignore[method-assign]


@contextmanager
def late_sends() -> Iterator[None]:
    """Let what this process sends to other machines be late, each part by another time."""
    chance, add = random.Random(11), sums.add_rows

    def late(rows: Sequence[Tensor]) -> None:
        add(rows)
        time.sleep(chance.random() * 5e-3)

    sums.add_rows = late
    try:
        yield
    finally:
        sums.add_rows = add


# -- groups of processes ----------------------------------------------------------------------------------------------


@dataclass
class Group:
    """What some processes do, one after the other."""

    ranks: int
    runs: list[tuple[str, Case, Plan, bool]] = field(default_factory=list)
    """Names, cases, plans, and whether one is late."""

    stock: bool = False
    """Whether each case is trained by PyTorch's ``DistributedDataParallel``, too."""
    machines: int = 1
    """Among which they are divided: those of one share memory."""


def main(folder: Path) -> None:
    for group in pickle.loads((folder / "groups").read_bytes()):
        rendezvous = folder / f"store of {group.ranks} on {group.machines}"
        fork(group.ranks, lambda rank, group=group, file=rendezvous: _work(folder, group, rank, file))


def _work(folder: Path, group: Group, rank: int, rendezvous: Path) -> None:
    dist.init_process_group("gloo", store=store_at(rendezvous, rank), rank=rank, world_size=group.ranks)
    ranks = Ranks(per_machine=group.ranks // group.machines)
    for name, case, plan, delay in group.runs:
        found, memory = by_engine(case, plan, ranks, delay=delay)
        torch.save(parts(found), folder / f"{name}-{rank}.pt")
        (folder / f"{name}-{rank}.json").write_text(json.dumps(memory))
        del found
        if group.stock:
            torch.save(parts(by_ddp(case, ranks)), folder / f"{name}-{rank}-stock.pt")
        gc.collect()  # or the next case would find the memory of this one
        ranks.barrier()
    _, case, plan, _ = group.runs[0]
    (folder / f"lopsided-{group.ranks} on {group.machines}-{rank}").write_text(lopsided(case, plan, ranks))
    ranks.close()


def parts(found: Result) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """Return losses, weights and optimizer states."""
    return found.losses, found.model.state_dict(), found.optimizer.state_dict()


def store_at(file: Path, rank: int) -> dist.TCPStore:
    """Return a store of the run; the first process opens it at a port that is free, and says in ``file`` which."""
    timeout = timedelta(seconds=PATIENCE)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        part = file.with_suffix(".part")
        part.write_text(str(store.port))
        part.rename(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(file.read_text()), None, False, timeout, wait_for_workers=False)


def fork(count: int, work: Callable[[int], None]) -> None:
    """Run ``work`` in so many processes; leave with an error if one of them fails or takes too long."""
    children = [_forked(rank, work) for rank in range(count)]
    late = threading.Timer(PATIENCE, lambda: [os.kill(child, 9) for child in children])
    late.daemon = True
    late.start()
    codes = [os.waitpid(child, 0)[1] for child in children]
    late.cancel()
    if any(codes):
        sys.exit(f"processes ended with {codes}")


def _forked(rank: int, work: Callable[[int], None]) -> int:
    child = os.fork()
    if child:
        return child
    begin_forked()
    code = 1
    try:
        work(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def begin_forked() -> None:
    """Let torch make its pool of threads anew; after a fork, two threads that ask for it at once would find none."""
    torch.set_num_threads(torch.get_num_threads())


def environment(rank: int, count: int, port: int, machines: int = 1) -> dict[str, str]:
    """Return what torchrun would set."""
    machine, local = divmod(rank, count // machines)
    numbers = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": count, "NODE_RANK": machine, "MASTER_PORT": port}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """Return a port that nobody uses: another one in each process, of those that the system gives to nobody."""
    for number in _numbers:
        port = 10_000 + number % 20_000
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def same(results: Sequence[Path]) -> bool:
    """Return whether all processes have left the same weights and states."""
    first, *others = ((path.read_bytes() and torch.load(path, weights_only=True))[1:] for path in results)
    return all(alike(first, other) for other in others)


def same_as_stock(folder: Path, name: str, rank: int) -> bool:
    """Return whether a process has left the losses, weights and states of ``DistributedDataParallel``."""
    found, stock = (torch.load(folder / f"{name}-{rank}{way}.pt", weights_only=True) for way in ("", "-stock"))
    return alike(found, stock)


def in_turn(losses: Sequence[list[Tensor]], case: Case) -> list[Tensor]:
    """Return the losses of all processes as one has them that takes turns; norms are everybody's."""
    each = case.accumulate + (case.clip_norm is not None) + case.user
    found = []
    for begin in range(0, len(losses[0]), each):
        for own in losses:
            found += own[begin : begin + case.accumulate]
        found += losses[0][begin + case.accumulate : begin + each]
    return found


def alike(left: Any, right: Any) -> bool:
    """Return whether two things, with what is in them, are equal bit for bit."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(alike(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(alike, left, right))
    return bool(left == right)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
