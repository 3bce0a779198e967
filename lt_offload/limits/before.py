"""Uses that are recognised before training: in the Trainer, the model and the optimizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lt_offload.compat.hugging_face import ACCELERATES_HOOK
from lt_offload.compat.lightning import (
    BATCH_NORM,
    WRAPPERS_OF_FABRIC,
    averages_on,
    detects_anomaly,
    own_average,
    trainer_of,
)
from lt_offload.limits.table import Recogniser, Setup, limit

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def unknown_optimizer(optimizer: Optimizer) -> bool:
    """Return whether neither a known class nor a trial shows that ``optimizer`` updates each tensor on its own."""
    return _verdict(optimizer) == "unknown"


def _modules(run: Setup) -> Iterator[tuple[str, Any]]:
    assert run.model is not None
    for name, module in run.model.named_modules():
        yield name or type(module).__name__, module


def _parameters(run: Setup) -> Iterator[tuple[str, nn.Parameter]]:
    assert run.model is not None
    return run.model.named_parameters()


def _any_optimizer(fits: Callable[[Optimizer], bool]) -> Recogniser:
    """Return what recognises an optimizer that ``fits``."""
    return lambda run: next((f"optimizer {type(one).__name__}" for one in run.optimizers if fits(one)), None)


def _is_a(thing: object, names: set[str]) -> bool:
    """Return whether ``thing``'s class or a base of it has one of ``names``; namespaces do not matter."""
    return any(cls.__name__ in names for cls in type(thing).__mro__)


def _is_prepared(optimizer: Optimizer) -> bool:
    return _is_a(optimizer, {"AcceleratedOptimizer"})


def _verdict(optimizer: Optimizer) -> str:
    # Here, as it loads torch: the table is read without.
    from lt_offload.model.optimizers import tried

    return tried(optimizer).verdict


def _draws_for_large(optimizer: Optimizer) -> bool:
    from lt_offload.model.optimizers import draws_for_large

    return draws_for_large(optimizer)


# -- trainer ----------------------------------------------------------------------------------------------------------

_LIGHTNINGS_PRECISION = re.compile(r"(lightning\.pytorch|pytorch_lightning)\.plugins\.")


@limit(
    "precision='16-true', double and quantized precision, precision plugins of others",
    "trainer",
    why="small gradients of fp16 weights come to nothing, as no loss is scaled up for them, and nobody knows what a "
    "plugin of somebody else does around a step",
    instead="use precision='16-mixed', 'bf16-mixed', 'bf16-true' or '32-true'",
    training_only=False,
)
def _precision(run: Setup) -> str | None:
    # The plugin first: one of the user's own may say that its precision is one of those below.
    value, plugin = run.trainer.precision, type(run.trainer.precision_plugin)
    if _LIGHTNINGS_PRECISION.match(plugin.__module__) is None:
        return f"Trainer(plugins=[{plugin.__name__}(...)])"
    return None if value in ("32-true", "bf16-true", "bf16-mixed", "16-mixed") else f"Trainer(precision={value!r})"


@limit(
    "accelerators other than cuda and cpu",
    "trainer",
    why="plans are for CUDA devices or the emulated one",
    instead="use accelerator='cuda' or 'cpu'",
    training_only=False,
)
def _devices(run: Setup) -> str | None:
    for device in run.trainer.strategy.parallel_devices or ():
        if device.type not in ("cpu", "cuda"):
            return f"Trainer(accelerator={device.type!r})"
    return None


@limit(
    "sync_batchnorm",
    "trainer",
    why="blocks run one by one in each process, and nothing in them waits for others",
    instead="leave sync_batchnorm out",
    training_only=False,
)
def _sync_batchnorm(run: Setup) -> str | None:
    return "Trainer(sync_batchnorm=True)" if getattr(run.trainer.strategy, "_layer_sync", None) is not None else None


@limit(
    "batch normalization with several devices",
    "trainer",
    why="each process would have statistics of its own, and checkpoints hold those of the first",
    instead="use devices=1, or normalize in another way (LayerNorm, GroupNorm, track_running_stats=False)",
)
def _batch_norm(run: Setup) -> str | None:
    if run.trainer.world_size == 1:
        return None
    for name, module in run.trainer.lightning_module.named_modules():
        known = any(base.__name__ == BATCH_NORM for base in type(module).__mro__)
        if known and getattr(module, "track_running_stats", False):
            return f"{type(module).__name__} {name} with devices={run.trainer.world_size}"
    return None


@limit(
    "anomaly detection",
    "trainer",
    why="it does not see into the blocks, which have graphs of their own",
    instead="set detect_anomaly=False, or search for the anomaly with strategy='auto' on a small model",
)
def _anomaly(run: Setup) -> str | None:
    return "Trainer(detect_anomaly=True)" if detects_anomaly(run.trainer) else None


@limit(
    "manual optimization",
    "trainer",
    why="updates belong to the planned iteration",
    instead="use automatic optimization with one optimizer",
)
def _manual(run: Setup) -> str | None:
    module = run.trainer.lightning_module
    return None if module.automatic_optimization else f"{type(module).__name__}.automatic_optimization=False"


@limit(
    "own optimizer_step, optimizer_zero_grad or backward",
    "trainer",
    why="the hook acts on an update that has happened already",
    instead="remove it; schedule the learning rate with an lr_scheduler of interval='step', average weights (EMA) in "
    "on_before_zero_grad or by Lightning's WeightAveraging",
)
def _step_hook(run: Setup) -> str | None:
    return overridden([run.trainer.lightning_module], ("optimizer_step", "optimizer_zero_grad", "backward"))


@limit(
    "callbacks that search for a learning rate or a batch size, or prune weights",
    "trainer",
    why="they train on trial before the run, with other shapes than the plan's or states that are thrown away, or put "
    "other tensors in the place of parameters",
    instead="use batch_size='auto', search with strategy='auto' on a small model, or prune before training",
)
def _searching_callback(run: Setup) -> str | None:
    # By the names of classes: there are two Lightnings, and none of them is imported here.
    for callback in run.trainer.callbacks:
        if _is_a(callback, {"BatchSizeFinder", "LearningRateFinder", "ModelPruning"}):
            return f"callback {type(callback).__name__}"
    return None


_AVERAGING = {"StochasticWeightAveraging", "WeightAveraging"}


@limit(
    "WeightAveraging and StochasticWeightAveraging with device='cuda'",
    "trainer",
    why="the average is a second model, in the memory that the plan has for the first",
    instead="leave device out, or set device='cpu'",
)
def _average_on_the_device(run: Setup) -> str | None:
    for callback in run.trainer.callbacks:
        where = averages_on(callback) if _is_a(callback, _AVERAGING) else None
        if where is not None and "cpu" not in str(where):
            return f"{type(callback).__name__}(device={str(where)!r})"
    return None


@limit(
    "EMAWeightAveraging, or another avg_fn of WeightAveraging, with stored weights",
    "trainer",
    why="the average of two equal bytes is rounded to another one, so that frozen weights would change",
    instead="use WeightAveraging without avg_fn, average the trained weights in on_before_zero_grad, or do not store "
    "the weights",
)
def _average_of_bytes(run: Setup) -> str | None:
    if all(parameter.is_floating_point() for parameter in run.trainer.lightning_module.parameters()):
        return None
    averages = (c for c in run.trainer.callbacks if _is_a(c, {"WeightAveraging"}) and own_average(c))
    return next((f"callback {type(callback).__name__}" for callback in averages), None)


# -- model ------------------------------------------------------------------------------------------------------------


@limit(
    "torch.compile of anything but single blocks, with CUDA graphs or autotuning",
    "model",
    why="weights move between blocks, which code across blocks or a CUDA graph cannot follow; autotuned code varies",
    instead="compile each layer by itself, with layer.compile() and the default mode",
    training_only=False,
)
def _compiled(run: Setup) -> str | None:
    from lt_offload.model.compiled import obstacle

    assert run.model is not None
    return obstacle(run.model, run.blocks)


@limit(
    "a model or an optimizer that fabric.setup has wrapped, in offloaded()",
    "model",
    why="Fabric has moved the weights, and its wrappers stand between the loop and the blocks, and before the updates",
    instead="give offloaded() the model and the optimizer before fabric.setup, and call them, loss.backward() and "
    "optimizer.step() without Fabric",
    training_only=False,
)
def _fabric(run: Setup) -> str | None:
    wrapped = [thing for thing in (run.model, *run.optimizers) if _is_a(thing, WRAPPERS_OF_FABRIC)]
    return f"{type(wrapped[0]).__name__} of Fabric" if wrapped else None


@limit(
    "output_hidden_states, output_attentions",
    "model",
    why="collected outputs keep activations on the device that the plan moves away",
    instead="set it to False for training",
)
def _collected_outputs(run: Setup) -> str | None:
    for name, module in _modules(run):
        # A model that is made of others has several configurations, and each of them may ask for it.
        for setting in ("output_hidden_states", "output_attentions"):
            if getattr(getattr(module, "config", None), setting, False) is True:
                return f"config.{setting}=True of {name}"
    return None


@limit(
    "float16 weights that train",
    "model",
    why="no GradScaler takes their gradients, and small ones come to nothing without",
    instead="load the model in float32, and compute in float16 by precision='16-mixed', fp16=True or torch.autocast",
)
def _half(run: Setup) -> str | None:
    # Here, as the table is also read where torch is not loaded.
    import torch

    halves = (n for n, p in _parameters(run) if p.requires_grad and p.dtype == torch.float16)
    return next((f"parameter {name} of dtype float16" for name in halves), None)


@limit(
    "weights that share memory",
    "model",
    why="each has a copy of its own on the host and on the device, and would not see the other's updates",
    instead="tie modules by giving them one and the same Parameter",
)
def _overlapping(run: Setup) -> str | None:
    from lt_offload.model.optimizers import overlap

    assert run.model is not None
    shared = overlap([*run.model.named_parameters(), *run.model.named_buffers()])
    return None if shared is None else f"{shared[0]} and {shared[1]}, which share memory"


@limit(
    "quantized weights",
    "model",
    why="the scales of most do not travel with them; those of bitsandbytes' 4 bits do, once quantized and frozen",
    instead="load the model in bfloat16, or in 4 bits (load_in_4bit=True, model.quantize=nf4); weights that do not fit "
    "are streamed",
    training_only=False,
)
def _quantized(run: Setup) -> str | None:
    for name, parameter in _parameters(run):
        kind, state = type(parameter).__name__, getattr(parameter, "quant_state", None)
        if kind == "Int8Params":
            return f"parameter {name} of 8 bits ({kind})"
        if kind == "Params4bit" and state is None:
            return f"parameter {name} ({kind}), which no .to(device) has quantized yet"
        if kind == "Params4bit" and getattr(state, "packing_format_for_cpu", False):
            return f"parameter {name} ({kind}), which a call in evaluation mode has packed for CPUs"
    return None


@limit(
    "models that accelerate offloads (cpu_offload, disk_offload, a device_map with cpu or disk)",
    "model",
    why="its hooks hold the weights, and bring them to the device and away again around each forward",
    instead="call accelerate.hooks.remove_hook_from_submodules(model), which gives the weights back, before the "
    "optimizer is made, or load the model without device_map",
    training_only=False,
)
def _offloaded_by_accelerate(run: Setup) -> str | None:
    for name, module in _modules(run):
        if _offloads(getattr(module, ACCELERATES_HOOK, None)):
            return f"{name} with a hook of accelerate's that offloads its weights"
    return None


def _offloads(hook: Any) -> bool:
    if _is_a(hook, {"SequentialHook"}):
        return any(map(_offloads, hook.hooks))
    return _is_a(hook, {"CpuOffload"}) or getattr(hook, "offload", False) is True


@limit(
    "weights on the meta device",
    "model",
    why="there is nothing to train",
    instead="load the weights in configure_model or before",
    training_only=False,
)
def _meta(run: Setup) -> str | None:
    if _offloaded_by_accelerate(run) is not None:
        return None  # they are somewhere else, and that row says how to get them back
    return next((f"parameter {n} on the meta device" for n, p in _parameters(run) if p.is_meta), None)


@limit(
    "sparse gradients",
    "model",
    why="gradients travel as dense tensors",
    instead="use sparse=False",
)
def _sparse(run: Setup) -> str | None:
    return next((f"{n} with sparse=True" for n, m in _modules(run) if getattr(m, "sparse", False) is True), None)


@limit(
    "sparse buffers and parameters",
    "model",
    why="a block's buffers are noted and put back by their memory, of which a sparse tensor has several pieces",
    instead="keep indices and values as two dense tensors, and make the sparse one of them in the forward",
    training_only=False,
)
def _sparse_members(run: Setup) -> str | None:
    assert run.model is not None
    for kind, named in (("buffer", run.model.named_buffers()), ("parameter", run.model.named_parameters())):
        for name, tensor in named:
            # By name, as this module is read without torch.
            if str(tensor.layout) != "torch.strided":
                return f"{kind} {name} of layout {str(tensor.layout).removeprefix('torch.')}"
    return None


@limit(
    "embeddings with max_norm",
    "model",
    why="the forward changes the weight, and that change would not be kept",
    instead="use max_norm=None",
    training_only=False,
)
def _renormalised(run: Setup) -> str | None:
    for name, module in _modules(run):
        if getattr(module, "max_norm", None) is not None:
            return f"{name} with max_norm={module.max_norm}"
    return None


@limit(
    "StochasticWeightAveraging of models with batch norm, without a validation after the last epoch",
    "model",
    why="Lightning then updates the averaged weights once more, with gradients of the last batch that it has not "
    "cleared, and they are gone here",
    instead="validate after the last epoch, which clears them, or leave batch norm out",
)
def _averaging_without_validation(run: Setup) -> str | None:
    trainer = trainer_of(run.model)
    normed = any(_is_a(module, {BATCH_NORM}) for _, module in _modules(run))
    if trainer is None or not normed or not any(_is_a(c, {"StochasticWeightAveraging"}) for c in trainer.callbacks):
        return None
    # The last epoch is validated if its number is a multiple of this, and then gradients are cleared in time.
    every = trainer.check_val_every_n_epoch or 1
    validated = trainer.enable_validation and trainer.max_epochs % every == 0
    # Without an end there is no last epoch.
    return None if validated or trainer.max_epochs == -1 else "StochasticWeightAveraging of a model with batch norm"


# -- optimizer --------------------------------------------------------------------------------------------------------


@limit(
    "no optimizer or several",
    "optimizer",
    why="each parameter has exactly one update per iteration",
    instead="return one optimizer; parameter groups may differ in every option, and a class of one's own may update "
    "them by different rules, e.g. matrices by Muon and the others by Adam",
)
def _not_one_optimizer(run: Setup) -> str | None:
    count = len(run.optimizers)
    return None if count == 1 else f"{count} optimizers from configure_optimizers"


_GLOBAL_OPTIMIZERS = {"LBFGS", "SAM", "ZeroRedundancyOptimizer"}
_GLOBAL_OPTIMIZERS |= {"DAdaptAdaGrad", "DAdaptAdam", "DAdaptLion", "DAdaptSGD", "Prodigy"}

limit(
    "optimizers that look across parameters or call a closure twice",
    "optimizer",
    why="each tensor is updated on its own as soon as its gradient is complete",
    instead="use AdamW, Adam, SGD, Adafactor or another optimizer that updates each tensor on its own",
)(_any_optimizer(lambda optimizer: _is_a(optimizer, _GLOBAL_OPTIMIZERS)))

limit(
    "optimizers whose step does more than update each tensor, e.g. clip all gradients first",
    "optimizer",
    why="a trial on small tensors gave other numbers one by one, in another order, than all at once, or other counts "
    "of steps without gradients than with them",
    instead="use an optimizer that updates each tensor from its own gradient and state alone",
)(_any_optimizer(lambda optimizer: _verdict(optimizer) == "joint"))

limit(
    "optimizers that draw random numbers, for all tensors or for some, from a generator that the tensors share",
    "optimizer",
    why="each tensor is updated when its gradient is complete, so that it would get the numbers of another",
    instead="draw from a torch.Generator that step() makes and seeds for each tensor, e.g. by a count in its state, "
    "with the same numbers under any strategy",
)(_any_optimizer(lambda optimizer: _verdict(optimizer) == "random" or _draws_for_large(optimizer)))

limit(
    "an optimizer that accelerator.prepare has wrapped",
    "optimizer",
    why="the wrapper skips steps and gives each to the optimizer inside, which has the groups and the states",
    instead="hand over prepared.optimizer (here and where else lt_offload asks for it), or the one that was prepared; "
    "the loop may go on with accelerator.backward and the wrapper's step()",
)(_any_optimizer(_is_prepared))

limit(
    "optimizers that hand their work to others, e.g. one of Muon and AdamW side by side, Lookahead",
    "optimizer",
    why="a step on small tensors in the parameter groups changed none of them, or the groups are another optimizer's: "
    "others have parameters of their own",
    instead="write one class that does what each group asks for, as SingleDeviceMuonWithAuxAdam does by use_muon",
)(
    # A wrapper of accelerate's hands it over, too, and has a row of its own, with a better way out.
    _any_optimizer(lambda optimizer: not _is_prepared(optimizer) and _verdict(optimizer) == "idle")
)

limit(
    "optimizers whose state has entries of no parameter, other than plain numbers that are there from the beginning",
    "optimizer",
    why="each tensor is updated when its gradient is complete, and what all tensors share would change once per tensor",
    instead="keep what belongs to a tensor in state[p], and what is counted per step in a parameter group",
)(_any_optimizer(lambda optimizer: _verdict(optimizer) == "shared"))


@limit(
    "optimizers with capturable=True or differentiable=True",
    "optimizer",
    why="torch captures updates in CUDA graphs only of weights on a GPU, and plans update some on the host; nor is an "
    "update part of a graph of autograd",
    instead="set it to False, which gives up nothing here",
)
def _captured(run: Setup) -> str | None:
    for optimizer in run.optimizers:
        for option in ("capturable", "differentiable"):
            if any(group.get(option) is True for group in optimizer.param_groups):
                return f"{type(optimizer).__name__}({option}=True)"
    return None


limit(
    "optimizers of sparse gradients, and states in CUDA's managed memory (paged optimizers of bitsandbytes)",
    "optimizer",
    why="gradients travel as dense tensors, and states as the plan says, which the driver may not move as well",
    instead="use Adam for SparseAdam, AdamW8bit for PagedAdamW8bit",
)(_any_optimizer(lambda optimizer: _is_a(optimizer, {"SparseAdam"}) or getattr(optimizer, "is_paged", False) is True))


@limit(
    "an optimizer whose step was replaced",
    "optimizer",
    why="tensors are updated by the step of its class",
    instead="write a subclass of torch.optim.Optimizer with that step",
)
def _replaced_step(run: Setup) -> str | None:
    for optimizer in run.optimizers:
        # Updates call the step of the class: one on the object would never run.
        step = vars(optimizer).get("step")
        # A scheduler puts a wrapper there that counts, and accelerate, with a scaler, the method itself.
        known = getattr(step, "__wrapped__", None), getattr(step, "__func__", None)
        if step is not None and type(optimizer).step not in known:
            return f"{type(optimizer).__name__}.step of the instance"
    return None


@limit(
    "trainable parameters without an optimizer",
    "optimizer",
    why="its gradient would be computed and never used",
    instead="give it to the optimizer or set requires_grad=False",
)
def _orphans(run: Setup) -> str | None:
    held = {id(p) for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in _parameters(run):
        if parameter.requires_grad and id(parameter) not in held:
            return f"trainable parameter {name} that the optimizer does not hold"
    return None


_LIGHTNING_BASE = re.compile(r"(lightning\.pytorch|pytorch_lightning)\.(core\.|callbacks\.callback$)")


def overrides(thing: object, hook: str) -> bool:
    """Return whether ``thing`` defines ``hook`` itself instead of inheriting it from Lightning."""
    owner = next((cls for cls in type(thing).__mro__ if hook in vars(cls)), None)
    inherited = owner is None or _LIGHTNING_BASE.match(owner.__module__) is not None
    # A hook may be set on the object as well.
    return hook in getattr(thing, "__dict__", ()) or not inherited


def overridden(things: Sequence[Any], hooks: Sequence[str]) -> str | None:
    """Return the first hook that one of ``things`` overrides."""
    named = (f"{type(thing).__name__}.{hook}" for thing in things for hook in hooks if overrides(thing, hook))
    return next(named, None)
