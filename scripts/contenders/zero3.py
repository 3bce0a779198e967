"""DeepSpeed ZeRO-3 with parameters and optimizer in pinned RAM."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from contenders.case import LEARNING_RATE, Batch, Case, Training
from torch import Tensor, nn

WEIGHT_DECAY = 0.01  # AdamW's default in torch


@contextmanager
def training(case: Case) -> Iterator[Training]:
    """Train in a group of one process, with DeepSpeed's own CPU Adam where it can be built."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    os.environ.setdefault("DS_ACCELERATOR", case.device)
    _own_extensions()
    case.say("starting DeepSpeed")
    import deepspeed

    deepspeed.init_distributed(verbose=False)
    torch.distributed.all_reduce(torch.zeros(1, device=case.place))  # what the group allocates counts as context
    case.limit()
    config = _config(case)
    model = case.model()
    case.checkpoint(model, reentrant=True)  # the newer kind compares shapes, when gathered parameters are gone again
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    case.say("building DeepSpeed's engine")
    optimizer, notes = _optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = engine(**case.to_place(batch)).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    try:
        if case.workload.dtype == "bfloat16":
            notes.append("weights and moments of 32 bits on the host, weights of 16 bits on the device")
        yield Training(step=step, notes=tuple(notes))
    finally:
        torch.distributed.destroy_process_group()


def _own_extensions() -> None:
    """Build DeepSpeed's C++ parts in a folder of the bench's own; a build that was ended leaves a lock behind."""
    own = Path(tempfile.gettempdir()) / f"bench-extensions-{torch.__version__}"
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(own)))
    for lock in folder.glob("*/lock"):
        lock.unlink()


def _config(case: Case) -> dict[str, Any]:
    pin = case.device == "cuda"
    return {
        "train_micro_batch_size_per_gpu": case.workload.batch_size,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": case.workload.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": pin},
            "offload_optimizer": {"device": "cpu", "pin_memory": pin},
            "overlap_comm": True,
            "contiguous_gradients": True,
            **(_tuned(case) if case.options.get("tuned") else {}),
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def _tuned(case: Case) -> dict[str, Any]:
    """Return buffers for the budget: by default 1e9 parameters may be live and buckets have 5e8, whatever the memory.

    A quarter of it is for gathered parameters, a sixteenth each for gradients and for what is fetched ahead.
    """
    assert case.budget_bytes is not None
    parameters = case.budget_bytes // case.dtype.itemsize
    return {
        "stage3_max_live_parameters": parameters // 4,
        "stage3_max_reuse_distance": parameters // 4,
        "stage3_prefetch_bucket_size": parameters // 16,
        "reduce_bucket_size": parameters // 16,
    }


def _optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, list[str]]:
    """Return DeepSpeed's CPU Adam, or torch's where that cannot be built, and what to say about it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    settings = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    try:
        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **settings)
        return optimizer, ["all updates run on the host, in DeepSpeed's AdamW, after the backward"]
    except Exception as error:  # whatever a missing compiler makes of the build
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fused = torch.optim.AdamW(model.parameters(), fused=True, **settings)
        return fused, [f"torch's fused AdamW: DeepSpeed's cannot be built here ({why})"]
