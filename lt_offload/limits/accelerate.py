"""Uses that are recognised in an Accelerator, when its ``prepare`` is called."""

from __future__ import annotations

from lt_offload.limits.table import Setup, limit


@limit(
    "mixed_precision='fp8'",
    "accelerate",
    why="it puts other layers in the place of the model's",
    instead="use mixed_precision='bf16' or 'fp16'",
)
def _precision(run: Setup) -> str | None:
    precision = str(run.trainer.mixed_precision)
    return f"Accelerator(mixed_precision={precision!r})" if precision not in ("no", "bf16", "fp16") else None


@limit(
    "several GPUs or processes, DeepSpeed, FSDP, devices other than CUDA's and the CPU, with accelerate",
    "accelerate",
    why="one process plans for one device, a CUDA device or the emulated one",
    instead="start one process ('accelerate launch --num_processes 1') without a plugin, or use several GPUs under "
    "Lightning: Trainer(strategy='offmate', devices=2)",
)
def _devices(run: Setup) -> str | None:
    accelerator = run.trainer
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind != "NO" or accelerator.num_processes > 1:
        return f"{accelerator.num_processes} processes ({kind})"
    device = accelerator.device.type
    return f"the device {device!r} of Accelerator" if device not in ("cpu", "cuda") else None


@limit(
    "dynamo_backend of an Accelerator",
    "accelerate",
    why="weights move between blocks, which code across blocks cannot follow",
    instead="leave it out; compile each layer by itself with layer.compile(), before accelerator.prepare()",
)
def _compiled(run: Setup) -> str | None:
    backend = getattr(run.trainer.state.dynamo_plugin.backend, "value", "NO")
    return f"Accelerator(dynamo_backend={backend!r})" if backend != "NO" else None


SEVERAL_TRAIN = limit(
    "two models that train under accelerated()",
    "accelerate",
    why="one plan is for one model with its optimizer",
    instead="train one of them, and call requires_grad_(False) of the other before accelerator.prepare(); one after "
    "another with accelerator.end_training() between them",
)
