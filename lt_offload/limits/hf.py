"""Uses that are recognised in the arguments of a Trainer of transformers, when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lt_offload.limits.table import Recogniser, Setup, limit


def _any_of(*names: str) -> Recogniser:
    """Return what recognises the first of the arguments ``names`` that is set, as the user wrote it."""

    def recognise(run: Setup) -> str | None:
        args = run.trainer.args
        # Empty texts and lists switch these off, like None and False.
        values = ((name, getattr(args, name, None)) for name in names)
        return next((f"{type(args).__name__}({name}={value!r})" for name, value in values if value), None)

    return recognise


def _optim(fits: Callable[[str], bool]) -> Recogniser:
    """Return what recognises an argument ``optim`` whose name ``fits``."""

    def recognise(run: Setup) -> str | None:
        name: Any = run.trainer.args.optim
        # An enumeration of transformers, or the text that the user has given.
        name = str(getattr(name, "value", name))
        return f"optim={name!r}" if fits(name) else None

    return recognise


limit(
    "torch_compile",
    "hf",
    why="weights move between blocks, which code across blocks cannot follow",
    instead="leave it out; compile each layer by itself with layer.compile(), before the Trainer is made",
)(_any_of("torch_compile"))

limit(
    "fp16_full_eval, bf16_full_eval",
    "hf",
    why="a full evaluation in another dtype changes the weights for good",
    instead="use fp16=True or bf16=True, or load the model in bfloat16",
)(_any_of("fp16_full_eval", "bf16_full_eval"))

limit(
    "deepspeed, fsdp, parallelism_config",
    "hf",
    why="they put weights and states where they want them, and so does a plan",
    instead="leave them out: one process plans for one device",
)(_any_of("deepspeed", "fsdp", "parallelism_config"))


@limit(
    "several GPUs or processes, devices other than CUDA's and the CPU",
    "hf",
    why="one process plans for one device, a CUDA device or the emulated one",
    instead="start one process and set CUDA_VISIBLE_DEVICES=0, or use_cpu=True for the emulated device",
)
def _devices(run: Setup) -> str | None:
    args = run.trainer.args
    # The number of processes first: each of several may see one GPU only.
    if args.world_size > 1:
        return f"{args.world_size} processes (world_size)"
    if args.device.type not in ("cpu", "cuda"):
        return f"the device {args.device.type!r} of {type(args).__name__}"
    return f"{args.n_gpu} GPUs in one process (n_gpu)" if args.n_gpu > 1 else None


limit(
    "auto_find_batch_size",
    "hf",
    why="it tries batch sizes until one fits, and a plan makes the one that is set fit",
    instead="set per_device_train_batch_size; an error says which one fits if it does not",
)(_any_of("auto_find_batch_size"))

limit(
    "use_liger_kernel",
    "hf",
    why="its fused loss multiplies with the head's weight outside the head, where the weight is not on the device",
    instead="leave it out; hf_trainer(chunked_loss=True) lets the head and the loss take a few tokens at a time",
)(_any_of("use_liger_kernel"))

limit(
    "activation_offloading of TRL",
    "hf",
    why="the plan decides which activations travel",
    instead="leave it out: they are planned",
)(_any_of("activation_offloading"))

limit(
    "optim='lomo', 'adalomo' and those that end with '_layerwise'",
    "hf",
    why="they update in hooks of the backward, where weights may be elsewhere by then",
    instead="use optim='adamw_torch' or another one that updates each tensor in its step",
)(_optim(lambda name: name in ("lomo", "adalomo") or name.endswith("_layerwise")))

limit(
    "optim='schedule_free_adamw', 'apollo_adamw', 'galore_adamw', 'grokadamw' and their kin",
    "hf",
    why="their updates write weights between steps, project gradients, or need more than one tensor has",
    instead="use optim='adamw_torch', 'stable_adamw' or 'adamw_8bit', or LoRA, where memory is what they were for",
)(_optim(lambda name: name.startswith(("schedule_free_", "apollo_", "galore_", "grokadamw"))))

limit(
    "optim='paged_adamw_8bit' and the other paged ones",
    "hf",
    why="the driver would move their states as well, which travel as the plan says",
    instead="use optim='adamw_8bit', 'lion_8bit' or 'ademamix_8bit': the numbers are those of the paged ones",
)(_optim(lambda name: name.startswith("paged_")))


@limit(
    "Trainers of TRL that generate while they train (GRPO, RLOO, OnlineDPO, GKD and others)",
    "hf",
    why="what a step generates has another length each time, which nobody can plan for, and generating takes the "
    "memory that the plan has for weights",
    instead="use SFT, DPO, KTO, ORPO or reward training, for example on answers that were generated before",
)
def _generates(run: Setup) -> str | None:
    kind = next((cls for cls in type(run.trainer).__mro__ if cls.__module__.startswith("trl.")), None)
    # What Trainers that generate have in common is an argument for how answers are drawn.
    samples = hasattr(run.trainer.args, "temperature")
    return kind.__name__ if kind is not None and samples else None
