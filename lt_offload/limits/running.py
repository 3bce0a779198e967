"""Uses that are refused where they happen; the first step finds most of them before it updates anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lt_offload.limits.table import limit

OUTSIDE_USE = limit(
    "a loss that uses a layer's weight outside the layer (penalties on weights)",
    why="its gradient would come from two places, and the weight may have left the device",
    instead="use it inside the module that owns it, or detach it if the loss does not need it",
)
INNER_TENSOR = limit(
    "a loss that uses tensors from inside a block (router logits, attentions, hooks, attributes)",
    why="only what a block returns is part of the outer graph; the inside is computed again, or moved away",
    instead="let the block return them, or leave them out of the loss (output_router_logits=False)",
)
LOGITS = limit(
    "logits of a training forward (`outputs.logits`), where the plan computes projection and loss together",
    why="they never all exist, or their gradients take their place",
    instead="use them in every training step, so that the plan keeps them, or plan with recompute=False, or call the "
    "model under torch.no_grad() before the forward or after the optimizer step",
)
LOSS_IN_CHUNKS = limit(
    "chunked_loss with a step that calls the model several times with gradients, or uses its logits after the loss",
    why="the projection and the loss are computed together, so that all logits never exist; a first step does so "
    "without chunked_loss, too, where a GPU would have no room for the logits",
    instead="leave out chunked_loss; if it is not set, set more memory or a smaller batch",
)
SHARED_CAST = limit(
    "a weight that several blocks (micro_batches: parts) use under torch.autocast or parametrize.cached(), which keep "
    "what they make of it",
    why="plain PyTorch would add the gradients of what is kept, in its precision",
    instead="leave out cached(), use torch.autocast(..., cache_enabled=False), as Trainer(precision='bf16-mixed') does",
)
MICRO_BATCHES = limit(
    "micro_batches with blocks that do not treat every sample on its own or use a weight several times, and with "
    "several forwards before a backward",
    why="each block runs on a few samples at a time: statistics over the batch (BatchNorm), attention between samples, "
    "[sequence, batch, features] would be others, and gradients would be summed in another order",
    instead="set micro_batches=1 and accumulate_grad_batches instead; let dimension 0 be that of the samples",
)
SEVERAL_CONSUMERS = limit(
    "a block output that others use beside the next block (U-Net skips, deep supervision)",
    why="its gradients would be added in another order than plain PyTorch's, and the last bits would differ",
    instead="take the loss from the last block's output, or hand the tensor on through the blocks",
)
CALL_ARGUMENTS = limit(
    "use_cache, past_key_values, output_attentions, output_hidden_states as arguments of a training call",
    why="they collect what a block computes, twice where it is computed again",
    instead="leave them out of the training call",
)
HIDDEN_TENSORS = limit(
    "activations that blocks are given, or return, inside objects with __slots__ or of libraries' classes but UserDict "
    "and UserList",
    why="nobody looks into these, so that the gradients of what they hold would be lost",
    instead="hand over tensors, in lists, dictionaries, or objects of classes of your own without __slots__",
)
_COLLECTORS = (
    "use_cache",
    "past_key_values",
    "past_key_value",
    "cache",
    "layer_past",
    "output_attentions",
    "output_hidden_states",
)


SAVED_TENSORS_HOOKS = limit(
    "torch.autograd.graph.saved_tensors_hooks around a training call, e.g. to keep activations in fewer bits",
    why="what a block saves for its backward is kept, moved or computed again as the plan says, and no hook would be "
    "called for it",
    instead="leave them out; torch.utils.checkpoint and save_on_cpu, whose hooks change no number, may stay",
)
_EXACT_HOOKS = (
    ("torch.utils.checkpoint", "_checkpoint_hook."),
    ("torch.autograd.graph", "save_on_cpu."),
    ("trl.models.activation_offloading", "OffloadActivations."),
)
"""Hooks that give back the numbers they were given: module, and beginning of the qualified name."""


def check_call(block: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse a call of ``block`` in training by its arguments, and by hooks that would change what it saves."""
    # Here, as the table is also read where torch is not loaded.
    from lt_offload.compat.torch import top_saved_tensors_hooks

    hooks: tuple[Callable[..., Any], ...] | None = top_saved_tensors_hooks(True)
    if hooks is not None:
        name, module = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__), hooks[0].__module__
        # By where their code is from: hooks are closures, which nothing else tells apart.
        if not any(module == home and name.startswith(owner) for home, owner in _EXACT_HOOKS):
            shown = name.replace(".<locals>", "")
            raise SAVED_TENSORS_HOOKS.error(f"saved_tensors_hooks({shown}, ...) around block {block}")
    for name in _COLLECTORS:
        value = kwargs.get(name)
        if name == "cache" and not hasattr(value, "get_seq_length"):
            continue  # a word that others use for other things
        # Layers hand such arguments on as None or False where nobody has asked for anything.
        if value is not None and value is not False:
            shown = value if isinstance(value, (bool, int)) else type(value).__name__
            raise CALL_ARGUMENTS.error(f"block {block} was called with {name}={shown}")


TABLE_ELSEWHERE = limit(
    "tied embeddings that are used otherwise than by looking rows up in the first block and for all rows in the last, "
    "where a plan updates them in two parts",
    why="rows that a batch does not look up are updated when the last block has its gradient",
    instead="set planner='greedy', whose plans update every tensor at once",
)
HALFWAY = limit(
    "weights or optimizer states read or written between the backward and the optimizer step",
    why="they are updated during the backward, so that some are of this step and others of the next",
    instead="do it before the backward or after optimizer.step()",
)
DURING_FORWARD = limit(
    "weights or optimizer states written between the forward and the optimizer step",
    why="a block that runs again would see other weights than the first time",
    instead="write before the forward or after optimizer.step()",
)
WRITTEN_WEIGHTS = limit(
    "weights written within the step: weight.data.clamp_() in a forward, nn.Embedding(max_norm=...) outside the blocks",
    why="blocks compute with copies of weights, and a block, or the whole step, may run a second time",
    instead="write in on_train_batch_end, or in a loop of one's own after optimizer.step()",
)
GRADIENTS = limit(
    "gradients in a loop of one's own without delayed=True: torch's clipping functions, edits, reading p.grad; "
    "GradScaler; p.grad after its update",
    why="each gradient is consumed by its update, which is during the backward where updates do not wait",
    instead="use offloaded(..., delayed=True) and look at gradients between the last backward and optimizer.step(), "
    "under a Trainer in on_after_backward or on_before_optimizer_step (a module or callback with on_before_zero_grad "
    "finds the last ones in training_step, too), of transformers at the end of training_step, in on_pre_optimizer_step "
    "or in on_optimizer_step; clip with engine.clip_value or engine.clip_grad_norm_(...); after training call "
    "optimizer.zero_grad() before a loop that goes on",
)
SET_GRADIENT = limit(
    "gradients of blocks' weights that are there before the backward (p.grad = noise in on_before_backward)",
    why="those of the backward are added to them, which takes memory of the device that no plan has",
    instead="add to p.grad after the backward: in on_before_optimizer_step, or in a loop of one's own with "
    "delayed=True before optimizer.step()",
)
KEPT_GRADIENT = limit(
    "gradients that are kept (self.before = p.grad) while they are still to change, views of them",
    why="they stand where sums of gradients are, and the next ones will",
    instead="keep a clone (p.grad.clone())",
)
ONE_BACKWARD = limit(
    "more backwards per optimizer step than was said, retain_graph",
    why="the last backward updates the weights, also one that fails on its way",
    instead="call forward, backward and optimizer.step() once each per iteration, or as often as accumulate=... of "
    "offloaded says; after an error in a backward go on from a checkpoint",
)
CLIPPING = limit(
    "engine.clip_grad_norm_ and engine.clip_grad_value_ in a loop of one's own without delayed=True",
    why="updates run during the backward, before all gradients are there",
    instead="offloaded(..., delayed=True) lets updates wait for optimizer.step(); engine.clip_value needs no waiting",
)
CLIPPED = limit(
    "gradients that are clipped by norm after by value, twice by norm, or before the last backward",
    why="they are clipped when updates use them, all of them once: first by norm, then by value",
    instead="clip once, after the last backward, by norm before by value",
)
FORWARDS = limit(
    "other calls of the model between a forward and its backward than in the measured step, backwards in another order",
    why="the plan says which forwards wait for others before their backward, and autograd goes through the last first",
    instead="take the loss of all forwards in one backward; in a loop of one's own say by run=... of offloaded what "
    "computes the loss of a batch",
)
BACKWARD_OUTSIDE = limit(
    "a backward through the model outside the training step (in a callback, a hook, log_graph)",
    why="every backward through the blocks updates the weights",
    instead="call the model under torch.no_grad() there, or a deepcopy of it",
)
PARTIAL_BACKWARD = limit(
    "torch.autograd.grad, backward(inputs=...) and create_graph=True through the model",
    why="a block's backward computes all of its gradients, once, and updates its weights",
    instead="call loss.backward(), or differentiate a deepcopy of the model",
)
PARAMETER_HOOKS = limit(
    "post-accumulate hooks and register_multi_grad_hook on parameters, tensor hooks on those that several blocks share "
    "(with micro_batches, or several forwards before a backward: on all)",
    why="the engine collects gradients in that place, and a shared weight's arrives once per block, part or forward",
    instead="remove the hook",
)
MODULE_HOOKS = limit(
    "forward hooks added to modules inside a block after planning, where the plan runs that block twice",
    why="the block runs again for its backward, and would call them again",
    instead="add hooks before training starts, so that the plan is made for them, or to the block itself",
)
WITHOUT_GRADIENT = limit(
    "tensors without a gradient, where the optimizer changes those, too (zeros in place of None)",
    why="a tensor is updated when its gradient is complete, and this one had none in this iteration",
    instead="skip tensors whose grad is None in the optimizer's step, or use every parameter in every forward",
)
UNTRIED = limit(
    "optimizers whose step cannot be run on tensors of its own, without a closure",
    why="updates are measured before training, and done tensor by tensor",
    instead="use an optimizer that updates each tensor from its own gradient and state alone, in a step that needs no "
    "closure",
)
RANDOM_UPDATE = limit(
    "optimizers that begin to draw random numbers while they train",
    why="each tensor is updated when its gradient is complete, so that it would get the numbers of another",
    instead="draw from a torch.Generator that step() makes and seeds for each tensor, e.g. by a count in its state",
)
STEP_ARGUMENTS = limit(
    "optimizer.step() with arguments beside a closure, e.g. MuonClip's attention_max_logits",
    why="the updates of this iteration are made without them, tensor by tensor, most of them during the backward",
    instead="let the step find what it needs in a parameter group, set before the backward",
)
CHANGED_OPTIONS = limit(
    "options of the optimizer changed between the backward and optimizer.step()",
    why="the updates of this iteration have used the options that were there during the backward",
    instead="change them before the backward or after optimizer.step(), schedulers too",
)
EXCHANGED_MEMORY = limit(
    "param.data = ... while a tensor of the old memory is kept (backup = param.data), share_memory_() during training",
    why="weights stay where they are, so that the values are copied, and the kept tensor would change with them",
    instead="keep a clone (backup = param.data.clone()), write with param.data.copy_(...), share before training",
)
ONE_PROCESS = limit(
    "weights, optimizer states or gradients that only some of several processes write (a callback that asks for rank "
    "0), or write with other values",
    why="all processes train one model, with one copy of it in the machine's memory",
    instead="write the same in every process, as under ddp, which would go on with other weights in each",
)
OTHER_SECOND_RUN = limit(
    "blocks whose second run differs: by state in global variables and closures",
    why="a block may run a second time for its backward",
    instead="draw from torch's generators, keep state in attributes or buffers",
)
REWRITTEN = limit(
    "arguments (positions, masks) and buffers of a block that are written to between its forward and its backward, and "
    "were not in the measured step",
    why="the block runs again for its backward, and what they held is gone",
    instead="write out of place (positions = positions + 1), or before the forward",
)
MODES = limit(
    "function and dispatch modes of one's own around a training call that the measured step did not have, where the "
    "plan runs a block twice",
    why="the block runs again for its backward, and would call the mode again",
    instead="enter the mode inside the step, from the first one on, so that the plan is made for it",
)
IN_PLACE_INPUT = limit(
    "blocks that write to their input",
    why="the block before has handed it on, and a block that runs again needs it",
    instead="write out of place",
)
SUBSTITUTED = limit(
    "torch.func.functional_call of the model in training",
    why="the substituted weights are gone when a block runs again",
    instead="write the values into the parameters, or call a deepcopy of the model",
)
TRANSFORMED = limit(
    "torch.func transforms (grad, vmap, jvp) around the model",
    why="weights are copied to and from the device while the model runs, which a transform cannot follow",
    instead="call loss.backward(), or transform a deepcopy of the model",
)
TRANSFORMED_INSIDE = limit(
    "torch.func.grad, vjp, jacrev and hessian within a block",
    why="they do not work with hooks for saved tensors, by which a block's activations travel",
    instead="use torch.func.jvp, jacfwd or vmap, or torch.autograd.grad(..., create_graph=True) of tensors that the "
    "block makes",
)
SCRIPTED = limit(
    "steps with functions, or blocks with modules, of torch.jit.script and torch.jit.trace",
    why="TorchScript computes otherwise, with other last bits, the more often it has been called, and a block is "
    "called more often than in plain training",
    instead="set PYTORCH_JIT=0 in the environment, which leaves both out, or compile with torch.compile",
)
OTHER_THREAD = limit(
    "a training loop in another thread than the one that began",
    why="what its lines read of weights in flight is not seen",
    instead="enter lt_offload.offloaded, or call Trainer.fit, in the thread that trains",
)
OTHER_STREAM = limit(
    "the model on a CUDA stream of one's own (`with torch.cuda.stream(...)`) inside a step or inside offloaded",
    why="memory is planned for one stream, and torch's allocator has a pool for each",
    instead="leave it out, as copies and updates have streams of their own; or enter it around Trainer.fit, around "
    "the whole of offloaded",
)
CHANGED_PARAMETERS = limit(
    "shape or dtype of weights changed during training, torch.utils.swap_tensors",
    why="the plan is made for tensors of these sizes",
    instead="make the change before training starts and train again from there: under a Trainer in "
    "configure_optimizers, as precision='bf16-true' casts all weights after __init__, setup and configure_model",
)
REFROZEN = limit(
    "weights frozen, unfrozen or replaced, parameters added to the optimizer, in a loop of one's own or in "
    "training_step",
    why="only another plan has the right gradients and updates",
    instead="leave the with-block of offloaded and enter it again, which plans anew; under a Trainer do it in a hook "
    "before the training step (on_train_epoch_start, on_train_batch_start), where the strategy plans anew by itself",
)
FROZEN_HALFWAY = limit(
    "weights frozen, or taken from the optimizer, between the micro-batches of one update",
    why="plain PyTorch would update them once more, with the gradients of the micro-batches before",
    instead="freeze them after an update: in on_train_epoch_start, or when trainer.fit_loop._should_accumulate() "
    "was false for the batch before",
)
