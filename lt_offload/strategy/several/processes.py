"""Answers to a Trainer about processes and devices: one of each, or one process for each of several devices.

With one device nothing of ``torch.distributed`` is touched. With several, Lightning's launcher, torchrun or SLURM start
the processes, as under ``ddp``; what they say to each other goes through ``lt_offload.distributed``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor

from lt_offload.compat.lightning import ALL_GATHER, BEFORE_BATCH, SCRIPT_LAUNCHER, is_last_batch
from lt_offload.errors import ConfigError, ProcessError
from lt_offload.machine.pages import make_file
from lt_offload.machine.replaced import own_attribute
from lt_offload.strategy.several.facts import changeable, compare

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from torch.optim import Optimizer

    from lt_offload.distributed.peers import Peers
    from lt_offload.distributed.ranks import Ranks
    from lt_offload.schema.profile import HardwareProfile, Profile

Value = TypeVar("Value")
_LEAVING_S = 8.0
"""Seconds that a failing process waits for others to hear why, and then for its children to end."""
_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


class Processes:
    """The part of a strategy for its processes and devices."""

    namespace: str
    num_nodes = 1  # set by the Trainer
    parallel_devices: list[torch.device] | None = None  # filled in by the Trainer
    cluster_environment: Any = None
    """Lightning's object that starts processes and knows the number of this one."""
    ranks: Ranks | None = None
    """The connections to the other processes, where there are any."""
    waited_s = 0.0
    """Seconds that this process has waited for others at the beginning of batches."""
    if TYPE_CHECKING:

        @property
        def _module(self) -> LightningModule: ...

        optimizers: list[Optimizer]

    _layer_sync: Any = None
    """The Trainer's object for ``sync_batchnorm``, which is refused."""
    _alone = 0
    _failing: BaseException | None = None
    _before_leaving: Any = None
    """The handler of SIGTERM before this process failed."""
    _epoch: int | None = None
    """The last epoch whose number of batches was compared."""
    _children: tuple[subprocess.Popen[bytes], ...] = ()
    _network: tuple[float, float] | None = None
    """Bytes per second between machines and seconds of a hop, as measured."""

    # -- which one this is -------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine, one for each device."""
        return len(self.parallel_devices or ()) or 1

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""
        return self.num_nodes * self.num_processes

    @property
    def is_distributed(self) -> bool:
        """True if the run has several processes."""
        return self.world_size > 1

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine."""
        return int(self.cluster_environment.local_rank()) if self.is_distributed else 0

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return int(self.cluster_environment.node_rank()) if self.is_distributed else 0

    @property
    def global_rank(self) -> int:
        """The number of this process."""
        return self.node_rank * self.num_processes + self.local_rank

    @property
    def is_global_zero(self) -> bool:
        """True for the process that speaks and writes for all."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """The device of batches and blocks."""
        assert self.parallel_devices, "the Trainer has not chosen a device yet"
        return self.parallel_devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """This process's part of the samples, as a sampler takes it."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tell the environment and Lightning's ``rank_zero_only`` the number of this process."""
        if self.is_distributed:
            self.cluster_environment.set_global_rank(self.global_rank)
            self.cluster_environment.set_world_size(self.world_size)
            rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            from lt_offload.distributed.rendezvous import name_run, require_rendezvous

            require_rendezvous(self.cluster_environment, machines=self.num_nodes, each=self.num_processes)
            if not self.cluster_environment.creates_processes_externally:
                name_run()
            launchers = import_module(f"{self.namespace}.strategies.launchers")
            launcher = getattr(launchers, SCRIPT_LAUNCHER)
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Enclose a backward that no update follows: its gradients stay here in any case."""
        yield

    # -- what Lightning says to all ----------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean of a tensor over all processes, or what ``reduce_op`` says; in place, as under ``ddp``."""
        if not isinstance(tensor, Tensor) or not self._others_listen:
            return tensor
        dist, op = torch.distributed, reduce_op
        mean = isinstance(op, str) and op.lower() in ("mean", "avg")
        if isinstance(op, str):
            op = dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, op.upper())
        home = tensor.cpu() if group is None else tensor
        if group is None and self.ranks is not None:
            self.ranks.reduce(home, op)
        else:
            dist.all_reduce(home, op=op, group=group)
        if mean:
            home.copy_(home / self.world_size)
        return tensor if home is tensor else tensor.copy_(home)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes decide so; with ``all=False`` whether any does."""
        votes = int(self.reduce(torch.tensor(int(decision)), reduce_op="sum"))
        return votes == (self.world_size if self._others_listen else 1) if all else votes > 0

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all processes, one after the other in a new dimension."""
        if not self.is_distributed:
            return tensor
        if not self._others_listen:
            return torch.stack([tensor] * self.world_size)
        if self.ranks is not None and group is None:
            self.ranks.meet("all_gather")
        gather = getattr(import_module(f"{_FABRIC[self.namespace]}.utilities.distributed"), ALL_GATHER)
        gathered: Tensor = gather(tensor, group=group, sync_grads=sync_grads)
        return gathered

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes; the first argument is a name."""
        if self.ranks is not None and self._others_listen:
            self.ranks.barrier(*map(str, args[:1]), **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of the process ``src``."""
        if self.ranks is None or not self._others_listen:
            return obj
        return self.ranks.gather(obj)[src]

    @property
    def _others_listen(self) -> bool:
        return self.is_distributed and self.ranks is not None and not self._alone

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Enclose a step on trial: nothing in it waits for other processes, which may not take it, or not as often."""
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1

    # -- life cycle --------------------------------------------------------------------------------------------------

    def open_processes(self) -> None:
        """Connect all processes, if there are several."""
        if not self.is_distributed:
            return
        from lt_offload.distributed.ranks import Ranks
        from lt_offload.distributed.rendezvous import initialize

        environment = self.cluster_environment
        device = self.root_device.type
        os.environ["MASTER_ADDR"] = str(environment.main_address)
        os.environ["MASTER_PORT"] = str(environment.main_port)
        initialize(device, rank=self.global_rank, size=self.world_size, per_machine=self.num_processes)
        import_module(f"{_FABRIC[self.namespace]}.utilities.seed").reset_seed()  # as ddp does where it connects
        self._failing, self._children = None, ()
        if self.ranks is None:
            self.ranks = Ranks(per_machine=self.num_processes, on_device=device == "cuda")
            require_common_memory(self.ranks.machine)
            self._network = self.ranks.measure_network() if self.num_nodes > 1 else None
        self._epoch = None

    def warm_up_exchange(self) -> None:
        """Let the reduction of gradients on devices take its memory, before free memory is measured."""
        if self.ranks is not None:
            self.ranks.warm_up(self.root_device)

    def fail_with(self, error: BaseException) -> None:
        """Tell the other processes why this one ends, and the user which one failed first."""
        if self.ranks is None or not isinstance(error, Exception):
            return
        self._failing = error
        if self._before_leaving is None and threading.current_thread() is threading.main_thread():
            # It is leaving. Lightning's handler would wait for others, which are, too, and torchrun sends one to all.
            self._before_leaving = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.ranks.watch.tell(error)
        if self.ranks.watch.failure is not None and not isinstance(error, ProcessError):
            rank_zero_warn(f"offmate: {self.ranks.watch.failure}")
        started: list[subprocess.Popen[bytes]] = getattr(getattr(self, "_launcher", None), "procs", [])
        # Lightning watches them, and would kill this process as soon as one of them has ended, whatever it has to say.
        self._children = (*self._children, *started)
        started.clear()

    def leave_processes(self) -> None:
        """Close the connections to other processes; after an error, together with them."""
        if self.ranks is None:
            return
        if self._failing is not None:
            self.ranks.watch.leave(_LEAVING_S)
        self.ranks.close()
        self.ranks = None
        until = time.monotonic() + _LEAVING_S
        for child in self._children:
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children = ()
        if self._before_leaving is not None:
            signal.signal(signal.SIGTERM, self._before_leaving)
            self._before_leaving = None

    # -- what all have alike -----------------------------------------------------------------------------------------

    def together(self, work: Callable[[], Value]) -> list[Value]:
        """Return the results of ``work``, which waits for no other, in each process; all raise the error of one."""
        if self.ranks is None:
            return [work()]
        with self.by_itself():
            return self.ranks.together(work)

    def of_first(self, work: Callable[[], Value]) -> Value:
        """Return the result of ``work``, which only the first process carries out."""
        if self.ranks is None:
            return work()
        return self.together(lambda: work() if self.is_global_zero else None)[0]  # type: ignore[return-value]

    def one_profile(self, measure: Callable[[], Profile], *, known: HardwareProfile | None = None) -> Profile:
        """Return one profile for all processes, of which each measures its own; the machine may be ``known``."""
        if self.ranks is None:
            return measure()
        return self._merged(self.together(measure), known)

    def same_start(self) -> None:
        """Let all processes begin with the weights and buffers of the first one, as ``ddp`` does."""
        if self.ranks is None:
            return
        tensors = [*self._module.parameters(), *self._module.buffers()]
        distinct = {id(tensor): tensor.detach() for tensor in tensors if tensor.device.type == "cpu"}
        own = list(distinct.values())
        sums = self.together(lambda: [_checksum(tensor) for tensor in own])
        if len({len(of_one) for of_one in sums}) > 1:
            counts = [len(of_one) for of_one in sums]
            raise ConfigError(
                f"the models of the processes of this run have {counts} parameters and buffers, in the order of ranks; "
                "make the same one in all of them"
            )
        # Only what differs: writing to memory that is mapped from a file would make a copy of it.
        differing = [tensor for tensor, *of_all in zip(own, *sums, strict=True) if len(set(of_all)) > 1]
        self.ranks.copy_first(differing)

    def one_of(self, profile: Profile, *, known: HardwareProfile | None = None) -> Profile:
        """Return ``profile``, which this process alone has measured, as that of one of several."""
        return profile if self.ranks is None else self._merged([profile], known)

    def _merged(self, profiles: list[Profile], known: HardwareProfile | None) -> Profile:
        from lt_offload.distributed.merge import merged
        from lt_offload.execute.updates.optimizer import updates_in_place
        from lt_offload.strategy.windows import reads_gradients

        on_cuda = self.root_device.type == "cuda"
        in_place = len(self.optimizers) == 1 and updates_in_place(self.optimizers[0])
        profile = merged(
            profiles,
            per_machine=self.num_processes,
            machines=self.num_nodes,
            on_cuda=on_cuda,
            common_updates=in_place,
            added_up_first=reads_gradients(self._module.trainer),
        )
        # Each one's part of a machine that was measured before has been taken by then.
        machine = profile.hardware if known is None else known
        if self._network is not None:
            speed, hop = self._network
            machine = replace(machine, network_bytes_per_s=speed, network_s=hop)
        return replace(profile, hardware=machine)

    def divide(self, loss: Tensor) -> None:
        """Let gradients of ``loss`` be divided by the number of processes, where one process that adds up does it."""
        count = self.world_size
        # By a hook: hooks of users, before and after the backward, see the loss as it is.
        if self.ranks is not None and not self._alone and loss.requires_grad:
            loss.register_hook(lambda grad: grad / count)  # type: ignore[no-untyped-call]

    @contextmanager
    def meeting(self, trainer: Any) -> Iterator[None]:
        """Let processes meet before each batch, in place of the broadcast by which Lightning's loop spreads a SIGTERM.

        That broadcast never ends if a process has stopped, or does something else.
        """
        loop = trainer.fit_loop.epoch_loop
        broadcast = getattr(loop, BEFORE_BATCH)

        def before_batch() -> None:
            if self.ranks is None:
                broadcast()
            elif any(map(any, self._meet("the beginning of a batch", bytes([trainer.received_sigterm])))):
                broadcast()  # which raises as the first process says

        with own_attribute(loop, BEFORE_BATCH, before_batch):
            yield

    def begins_batch(self, trainer: Any, number: int) -> None:
        """Check that all processes are at the batch with this ``number``, and go on with it.

        Raises ``ConfigError`` in the first batch of an epoch that has more batches in one process than in another;
        where nobody knows how many there are, in the one that is the last one for some processes only.
        """
        if self.ranks is not None:
            if trainer.current_epoch != self._epoch:
                # The loader is not there before training, and may be made anew for each epoch.
                self._epoch = trainer.current_epoch
                self.compare(lambda: {"the number of training batches": trainer.num_training_batches})
            self.ranks.watch.batch = number
            # Without the mark a process whose stream has ended would go on to a validation that no other joins.
            self._meet_alike(f"batch {1 + number}" + ", the last one" * is_last_batch(trainer.fit_loop.epoch_loop))

    def ends_training(self) -> None:
        """Check that no other process goes on training."""
        if self.ranks is not None:
            self._meet_alike("the end of training")

    def _meet_alike(self, place: str) -> None:
        options = changeable(self.optimizers)
        if len(set(self._meet(place, zlib.crc32(repr(options).encode()).to_bytes(4, "big")))) > 1:
            self.compare(lambda: options)

    def _meet(self, place: str, told: bytes) -> list[bytes]:
        assert self.ranks is not None
        self.ranks.watch.strict = True
        began = time.perf_counter()
        try:
            return self.ranks.meet(place, told)
        finally:
            self.waited_s += time.perf_counter() - began

    def compare(self, facts: Callable[[], dict[str, object]]) -> None:
        """Check that ``facts`` are the same in all processes; raises ``ConfigError``."""
        if self.ranks is not None:
            compare(self.together(facts))


def _checksum(tensor: Tensor) -> tuple[tuple[int, ...], str, int]:
    flat = tensor.contiguous().view(-1)
    content = zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
    return tuple(tensor.shape), str(tensor.dtype), content


def require_common_memory(machine: Peers) -> None:
    """Raise ``ConfigError`` if a machine's processes cannot share memory; all call this before they load anything."""
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
