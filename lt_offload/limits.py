"""Every combination that is refused, in one table: what, why, and what works instead.

A setting is refused where the strategy could not honour it exactly. :func:`check` raises from the table before training
starts, :func:`markdown` prints it for the README, and what shows only while training runs raises its row's
:meth:`Limit.error`. Foreign optimizers are tried on a few small tensors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lt_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Scope = Literal["trainer", "model", "optimizer", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What is about to run, as far as it exists yet."""

    trainer: Any = None
    """A Lightning Trainer of either namespace; None in a plain loop."""
    model: nn.Module | None = None
    """The LightningModule, or the model of a plain loop."""
    optimizers: Sequence[Optimizer] = ()
    blocks: str | None = None
    """The name of what holds the model's layers, if the user has given one."""


Recogniser = Callable[[Setup], str | None]
"""Returns the offending setting with its value as the user wrote it, None if there is nothing to refuse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """One thing that is not supported."""

    name: str
    scope: Scope
    """From when on it can be recognised: once there is a trainer, a complete model, the optimizers; when it happens."""
    recognise: Recogniser
    why: str
    instead: str
    """The nearest thing that works."""
    training_only: bool = True
    """False if validation and prediction are refused too."""

    def error(self, use: str) -> UnsupportedError:
        """Return the error that refuses ``use``, which names what is used."""
        return UnsupportedError(f"{use}: {self.why}; {self.instead}")


def check(scope: Scope, run: Setup, *, training: bool = True) -> None:
    """Raise for everything in ``run`` that is not supported, all in one error.

    Raises:
        UnsupportedError: with one line per setting: the setting, its value, why, and what works instead.
    """
    rows = [limit for limit in LIMITS if limit.scope == scope and (training or not limit.training_only)]
    problems = [str(limit.error(setting)) for limit in rows if (setting := limit.recognise(run)) is not None]
    if problems:
        raise UnsupportedError("not supported by the offmate strategy:\n" + "\n".join(f"- {line}" for line in problems))


def unknown_optimizer(optimizer: Optimizer) -> bool:
    """Return whether nobody has vouched for ``optimizer`` updating each tensor on its own and no trial has shown it."""
    return _each_alone(optimizer) is None


def markdown() -> str:
    """Return the table for people: what is refused and what works instead."""
    rows = [f"| {limit.name} | {limit.why} | {limit.instead} |" for limit in LIMITS]
    return "\n".join(["| not supported | why | instead |", "|---|---|---|", *rows])


LIMITS: list[Limit] = []
"""The table, in the order of the README."""


def _limit(
    name: str, scope: Scope, *, why: str, instead: str, training_only: bool = True
) -> Callable[[Recogniser], Recogniser]:
    """Add the row that the decorated function recognises."""

    def add(recognise: Recogniser) -> Recogniser:
        LIMITS.append(
            Limit(name=name, scope=scope, recognise=recognise, why=why, instead=instead, training_only=training_only)
        )
        return recognise

    return add


# -- trainer ----------------------------------------------------------------------------------------------------------

_LIGHTNINGS_PRECISION = re.compile(r"(lightning\.pytorch|pytorch_lightning)\.plugins\.")


@_limit(
    "fp16, double and quantized precision, precision plugins of others",
    "trainer",
    why="loss scaling would have to know all gradients before the first update, and nobody knows what a plugin of "
    "somebody else does around a step",
    instead="use precision='bf16-mixed', 'bf16-true' or '32-true'",
    training_only=False,
)
def _precision(run: Setup) -> str | None:
    value, plugin = run.trainer.precision, type(run.trainer.precision_plugin)
    if _LIGHTNINGS_PRECISION.match(plugin.__module__) is None:
        return f"Trainer(plugins=[{plugin.__name__}(...)])"
    return None if value in ("32-true", "bf16-true", "bf16-mixed") else f"Trainer(precision={value!r})"


@_limit(
    "several devices or nodes, accelerators other than cuda and cpu",
    "trainer",
    why="one process plans for one device, a CUDA device or the emulated one",
    instead="use devices=1, num_nodes=1 and accelerator='cuda' or 'cpu'",
    training_only=False,
)
def _devices(run: Setup) -> str | None:
    devices = run.trainer.strategy.parallel_devices or ()
    for device in devices:
        if device.type not in ("cpu", "cuda"):
            return f"Trainer(accelerator={device.type!r})"
    if len(devices) > 1:
        return f"Trainer(devices={len(devices)})"
    nodes = run.trainer.num_nodes
    return f"Trainer(num_nodes={nodes})" if nodes > 1 else None


@_limit(
    "anomaly detection",
    "trainer",
    why="it does not see into the blocks, which have graphs of their own",
    instead="set detect_anomaly=False, or search for the anomaly with strategy='auto' on a small model",
)
def _anomaly(run: Setup) -> str | None:
    return "Trainer(detect_anomaly=True)" if getattr(run.trainer, "_detect_anomaly", False) else None


@_limit(
    "manual optimization",
    "trainer",
    why="updates belong to the planned iteration",
    instead="use automatic optimization with one optimizer",
)
def _manual(run: Setup) -> str | None:
    module = run.trainer.lightning_module
    return None if module.automatic_optimization else f"{type(module).__name__}.automatic_optimization=False"


@_limit(
    "own optimizer_step, optimizer_zero_grad or backward",
    "trainer",
    why="the hook acts on an update that has happened already",
    instead="remove it; schedule the learning rate with an lr_scheduler of interval='step'",
)
def _step_hook(run: Setup) -> str | None:
    return _overridden([run.trainer.lightning_module], ("optimizer_step", "optimizer_zero_grad", "backward"))


@_limit(
    "own configure_gradient_clipping that does not call self.clip_gradients",
    "trainer",
    why="gradients are where the plan has them, not in p.grad, and are clipped there",
    instead="call self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm='norm' or 'value') in "
    "it, as often and with what values it decides",
)
def _clipping_hook(run: Setup) -> str | None:
    name = "configure_gradient_clipping"
    module = run.trainer.lightning_module
    called = _names(getattr(inspect.unwrap(getattr(module, name)), "__code__", None))
    return None if called & {name, "clip_gradients"} else f"{type(module).__name__}.{name}"


def _names(code: Any) -> set[str]:
    """Return the attributes and globals that a function's code, and that of functions in it, names."""
    if not hasattr(code, "co_names"):
        return set()
    return {*code.co_names, *(name for constant in code.co_consts for name in _names(constant))}


@_limit(
    "hooks that look at gradients",
    "trainer",
    why="gradients are consumed inside the backward, the hook would see none",
    instead="remove it; the gradient norm is logged as 'grad_norm'",
)
def _gradient_hook(run: Setup) -> str | None:
    things = [run.trainer.lightning_module, *run.trainer.callbacks]
    return _overridden(things, ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"))


_REWRITING = {"BaseFinetuning", "BatchSizeFinder", "LearningRateFinder", "ModelPruning"}
_REWRITING |= {"StochasticWeightAveraging", "WeightAveraging"}


@_limit(
    "callbacks that rewrite weights or the optimizer",
    "trainer",
    why="the plan is made for fixed weights, trainable tensors and batch size",
    instead="remove it",
)
def _rewriting_callback(run: Setup) -> str | None:
    for callback in run.trainer.callbacks:
        if _is_a(callback, _REWRITING):
            return f"callback {type(callback).__name__}"
    return None


# -- model ------------------------------------------------------------------------------------------------------------


@_limit(
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


@_limit(
    "output_hidden_states, output_attentions",
    "model",
    why="collected outputs keep activations on the device that the plan moves away",
    instead="set it to False for training",
)
def _collected_outputs(run: Setup) -> str | None:
    for name, module in _modules(run):
        for setting in ("output_hidden_states", "output_attentions"):
            if getattr(getattr(module, "config", None), setting, False) is True:
                return f"config.{setting}=True of {name}"
    return None


@_limit(
    "float16 weights",
    "model",
    why="they need loss scaling",
    instead="load the model in bfloat16 or float32",
)
def _half(run: Setup) -> str | None:
    import torch

    return next((f"parameter {n} of dtype float16" for n, p in _parameters(run) if p.dtype == torch.float16), None)


@_limit(
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


@_limit(
    "quantized weights",
    "model",
    why="their scales do not travel with them",
    instead="load the model in bfloat16; weights that do not fit are streamed",
    training_only=False,
)
def _quantized(run: Setup) -> str | None:
    for name, parameter in _parameters(run):
        if type(parameter).__name__ in {"Params4bit", "Int8Params"}:
            return f"quantized parameter {name} ({type(parameter).__name__})"
    return None


@_limit(
    "weights on the meta device",
    "model",
    why="there is nothing to train",
    instead="load the weights in configure_model or before",
    training_only=False,
)
def _meta(run: Setup) -> str | None:
    return next((f"parameter {n} on the meta device" for n, p in _parameters(run) if p.is_meta), None)


@_limit(
    "sparse gradients",
    "model",
    why="gradients travel as dense tensors",
    instead="use sparse=False",
)
def _sparse(run: Setup) -> str | None:
    return next((f"{n} with sparse=True" for n, m in _modules(run) if getattr(m, "sparse", False) is True), None)


@_limit(
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


# -- optimizer --------------------------------------------------------------------------------------------------------


@_limit(
    "no optimizer or several",
    "optimizer",
    why="each parameter has exactly one update per iteration",
    instead="return one optimizer; parameter groups may differ in every option",
)
def _not_one_optimizer(run: Setup) -> str | None:
    count = len(run.optimizers)
    return None if count == 1 else f"{count} optimizers from configure_optimizers"


_GLOBAL_OPTIMIZERS = {"LBFGS", "SAM", "ZeroRedundancyOptimizer"}
_GLOBAL_OPTIMIZERS |= {"DAdaptAdaGrad", "DAdaptAdam", "DAdaptLion", "DAdaptSGD", "Prodigy"}


@_limit(
    "optimizers that look across parameters or call a closure twice",
    "optimizer",
    why="each tensor is updated on its own as soon as its gradient is complete",
    instead="use AdamW, Adam, SGD, Adafactor or another optimizer that updates each tensor on its own",
)
def _global_optimizer(run: Setup) -> str | None:
    for optimizer in run.optimizers:
        if _is_a(optimizer, _GLOBAL_OPTIMIZERS):
            return f"optimizer {type(optimizer).__name__}"
    return None


def _each_alone(optimizer: Optimizer) -> bool | None:
    """Return whether ``optimizer`` updates each tensor on its own; None if that is not known."""
    from lt_offload.model.optimizers import each_alone

    return each_alone(optimizer)


@_limit(
    "optimizers whose step does more than update each tensor, e.g. clip all gradients first",
    "optimizer",
    why="a trial on small tensors gave other numbers one by one, in another order, than all at once",
    instead="use an optimizer that updates each tensor from its own gradient and state alone",
)
def _joint_optimizer(run: Setup) -> str | None:
    for optimizer in run.optimizers:
        if _each_alone(optimizer) is False:
            return f"optimizer {type(optimizer).__name__}"
    return None


@_limit(
    "an optimizer whose step was replaced",
    "optimizer",
    why="tensors are updated by the step of its class",
    instead="write a subclass of torch.optim.Optimizer with that step",
)
def _replaced_step(run: Setup) -> str | None:
    for optimizer in run.optimizers:
        step = vars(optimizer).get("step")  # a scheduler puts a wrapper there that counts
        if step is not None and getattr(step, "__wrapped__", step) is not type(optimizer).step:
            return f"{type(optimizer).__name__}.step of the instance"
    return None


@_limit(
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


# -- while it runs: the first pass of the profile finds most of these before training --------------------------------


def _while_running(name: str, *, why: str, instead: str) -> Limit:
    """Add a row that is recognised where it happens; whoever does raises its :meth:`Limit.error`."""
    limit = Limit(name=name, scope="run", recognise=lambda run: None, why=why, instead=instead)
    LIMITS.append(limit)
    return limit


OUTSIDE_USE = _while_running(
    "a loss that uses a weight outside its block (tied heads by F.linear, penalties on weights)",
    why="its gradient would come from two places, and the weight may have left the device",
    instead="use it inside the module that owns it, or detach it if the loss does not need it",
)
INNER_TENSOR = _while_running(
    "a loss that uses tensors from inside a block (router logits, attentions, hooks, attributes)",
    why="only what a block returns is part of the outer graph; the inside is computed again, or moved away",
    instead="let the block return them, or leave them out of the loss (output_router_logits=False)",
)
LOGITS = _while_running(
    "logits of a training forward (`outputs.logits`), where the plan computes projection and loss together",
    why="they never all exist, or their gradients take their place",
    instead="use them in every training step, so that the plan keeps them, or plan with recompute=False, or call the "
    "model under torch.no_grad() before the forward or after the optimizer step",
)
SHARED_CAST = _while_running(
    "a weight that several blocks compute with under torch.autocast, which keeps what it has cast",
    why="plain PyTorch would add the gradients of these blocks in the low precision",
    instead="use torch.autocast(..., cache_enabled=False), as Trainer(precision='bf16-mixed') does",
)
SEVERAL_CONSUMERS = _while_running(
    "a block output that others use beside the next block (U-Net skips, deep supervision)",
    why="its gradients would be added in another order than plain PyTorch's, and the last bits would differ",
    instead="take the loss from the last block's output, or hand the tensor on through the blocks",
)
CALL_ARGUMENTS = _while_running(
    "use_cache, past_key_values, output_attentions, output_hidden_states as arguments of a training call",
    why="they collect what a block computes, twice where it is computed again",
    instead="leave them out of the training call",
)
_COLLECTORS = (
    "use_cache",
    "past_key_values",
    "past_key_value",
    "layer_past",
    "output_attentions",
    "output_hidden_states",
)


def check_arguments(block: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse a call in training whose arguments make ``block`` collect what it computes.

    Raises:
        UnsupportedError: naming the argument.
    """
    for name in _COLLECTORS:
        value = kwargs.get(name)
        if value is not None and value is not False:
            shown = value if isinstance(value, (bool, int)) else type(value).__name__
            raise CALL_ARGUMENTS.error(f"block {block} was called with {name}={shown}")


HALFWAY = _while_running(
    "weights or optimizer states read or written between the backward and the optimizer step",
    why="they are updated during the backward, so that some are of this step and others of the next",
    instead="do it before the backward or after optimizer.step()",
)
DURING_FORWARD = _while_running(
    "weights or optimizer states written between the forward and the optimizer step",
    why="a block that runs again would see other weights than the first time",
    instead="write before the forward or after optimizer.step()",
)
GRADIENTS = _while_running(
    "gradients in a loop of one's own: torch's clipping functions, GradScaler, edits, reading p.grad",
    why="each gradient is consumed by its update during the backward",
    instead="leave gradients alone; clip with engine.clip_value or engine.clip_grad_norm_(...)",
)
ONE_BACKWARD = _while_running(
    "more backwards per optimizer step than was said, or none: skipped steps, retain_graph",
    why="the last backward updates the weights, also one that fails on its way",
    instead="call forward, backward and optimizer.step() once each per iteration, or as often as accumulate=... of "
    "offloaded says; after an error in a backward go on from a checkpoint",
)
CLIPPING = _while_running(
    "engine.clip_grad_norm_ and engine.clip_grad_value_ in a loop of one's own without delayed=True",
    why="updates run during the backward, before all gradients are there",
    instead="offloaded(..., delayed=True) lets updates wait for optimizer.step(); engine.clip_value needs no waiting",
)
CLIPPED = _while_running(
    "gradients that are clipped by norm after by value, twice by norm, or before the last backward",
    why="they are clipped when updates use them, all of them once: first by norm, then by value",
    instead="clip once, after the last backward, by norm before by value",
)
WINDOW = _while_running(
    "windows of other numbers of micro-batches than was said, last micro-batches without a loss",
    why="the last backward of a window updates the weights, so that it has to be known before it begins",
    instead="set accumulate=... of offloaded, or engine.accumulate before a window, to the number of backwards per "
    "optimizer.step(); return a loss for the last micro-batch",
)
BACKWARD_OUTSIDE = _while_running(
    "a backward through the model outside the training step (in a callback or hook)",
    why="every backward through the blocks updates the weights",
    instead="call the model under torch.no_grad() there, or a deepcopy of it",
)
PARTIAL_BACKWARD = _while_running(
    "torch.autograd.grad, backward(inputs=...) and create_graph=True through the model",
    why="a block's backward computes all of its gradients, once, and updates its weights",
    instead="call loss.backward(), or differentiate a deepcopy of the model",
)
PARAMETER_HOOKS = _while_running(
    "post-accumulate hooks and register_multi_grad_hook on parameters, tensor hooks on those that several blocks share",
    why="the engine collects gradients in that place, block by block, and a shared weight's arrives once per block",
    instead="remove the hook",
)
MODULE_HOOKS = _while_running(
    "forward hooks added to modules inside a block after planning, where the plan runs that block twice",
    why="the block runs again for its backward, and would call them again",
    instead="add hooks before training starts, so that the plan is made for them, or to the block itself",
)
CHANGED_OPTIONS = _while_running(
    "options of the optimizer changed between the backward and optimizer.step()",
    why="the updates of this iteration have used the options that were there during the backward",
    instead="change them before the backward or after optimizer.step(), schedulers too",
)
EXCHANGED_MEMORY = _while_running(
    "param.data = ... while a tensor of the old memory is kept (backup = param.data), share_memory_() during training",
    why="weights stay where they are, so that the values are copied, and the kept tensor would change with them",
    instead="keep a clone (backup = param.data.clone()), write with param.data.copy_(...), share before training",
)
OTHER_SECOND_RUN = _while_running(
    "blocks whose second run differs: by grad mode, by state in globals and helper objects",
    why="a block may run a second time for its backward, and its first run may be without gradients",
    instead="draw from torch's generators, keep state in attributes or buffers, do not ask for the grad mode",
)
IN_PLACE_INPUT = _while_running(
    "blocks that write to their input",
    why="the block before has handed it on, and a block that runs again needs it",
    instead="write out of place",
)
SUBSTITUTED = _while_running(
    "torch.func.functional_call of the model in training",
    why="the substituted weights are gone when a block runs again",
    instead="write the values into the parameters, or call a deepcopy of the model",
)
TRANSFORMED = _while_running(
    "torch.func transforms (grad, vmap, jvp) around the model",
    why="weights are copied to and from the device while the model runs, which a transform cannot follow",
    instead="call loss.backward(), or transform a deepcopy of the model",
)
OTHER_THREAD = _while_running(
    "a training loop in another thread than the one that began",
    why="what its lines read of weights in flight is not seen",
    instead="enter lt_offload.offloaded, or call Trainer.fit, in the thread that trains",
)
CHANGED_PARAMETERS = _while_running(
    "requires_grad, shape, dtype or parameter groups changed during training, torch.utils.swap_tensors",
    why="the plan is made for fixed trainable tensors and one optimizer",
    instead="make the change before training starts and train again from there",
)


# -- helpers ----------------------------------------------------------------------------------------------------------


def _modules(run: Setup) -> Iterator[tuple[str, Any]]:
    assert run.model is not None
    for name, module in run.model.named_modules():
        yield name or type(module).__name__, module


def _parameters(run: Setup) -> Iterator[tuple[str, nn.Parameter]]:
    assert run.model is not None
    return run.model.named_parameters()


def _is_a(thing: object, names: set[str]) -> bool:
    """Return whether ``thing``'s class or a base of it has one of ``names``; namespaces do not matter."""
    return any(cls.__name__ in names for cls in type(thing).__mro__)


_LIGHTNING_BASE = re.compile(r"(lightning\.pytorch|pytorch_lightning)\.(core\.|callbacks\.callback$)")


def overrides(thing: object, hook: str) -> bool:
    """Return whether ``thing`` defines ``hook`` itself instead of inheriting it from Lightning."""
    owner = next((cls for cls in type(thing).__mro__ if hook in vars(cls)), None)
    return hook in vars(thing) or (owner is not None and _LIGHTNING_BASE.match(owner.__module__) is None)


def _overridden(things: Sequence[Any], hooks: Sequence[str]) -> str | None:
    """Return the first hook that one of ``things`` overrides."""
    found = (f"{type(thing).__name__}.{hook}" for thing in things for hook in hooks if overrides(thing, hook))
    return next(found, None)
