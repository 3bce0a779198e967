"""FSDP2 on one device: parameters, gradients and optimizer states in RAM, layers fetched as they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from scripts.bench.contenders.case import Case, Training, Unsupported


@contextmanager
def training(case: Case) -> Iterator[Training]:
    """Train with ``fully_shard`` and ``CPUOffloadPolicy`` in a group of one process.

    On the emulated device there is one memory, and nothing is copied: it shows the numbers, no speed and no peak.

    Raises:
        Unsupported: on the fake GPU, whose PyTorch is built without CUDA and NCCL.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    if case.device == "cuda":
        if not dist.is_nccl_available():
            raise Unsupported("not run here: needs a GPU, and a PyTorch that is built with CUDA and NCCL")
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if case.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(case.device, (1,))
        dist.all_reduce(torch.zeros(1, device=case.place))  # what the group allocates counts as context
        case.limit()
        model = case.model()
        policy = CPUOffloadPolicy(pin_memory=case.device == "cuda")
        layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
        _checkpoint(layers)
        for layer in layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        step = case.plain_step(model, case.optimizer(model.parameters()))
        notes = ["all updates run on the host, in the host's AdamW, after the backward"]
        if case.device == "cpu":
            notes.append("one memory: no copies, no speed")
        yield Training(step=step, notes=tuple(notes))
    finally:
        dist.destroy_process_group()


def _checkpoint(layers: nn.ModuleList) -> None:
    """Wrap layers as FSDP's documentation says, in place of the model's own checkpointing: once per gathering."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
