"""Checks while a plan is carried out: what must not change, which backwards can be, who else uses an input.

Each check raises at the first occurrence, naming the row of ``limits`` that says why and what works instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.compat.torch import (
    DisableTorchFunction,
    accumulated_hooks_of,
    address_of,
    parameters_of,
    submodules_of,
    tensor_hooks_of,
    version_of,
    will_run,
)
from lt_offload.execute.blocks.run import BlockRun
from lt_offload.execute.blocks.runs import BlockRuns
from lt_offload.execute.blocks.shared_inputs import RunningTotal
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.updates.optimizer import Updates
from lt_offload.model.blocks import Structure
from lt_offload.model.state.hooks import InnerHooks


def may_repeat(structure: Structure, blocks: Collection[int]) -> bool:
    """Return whether no hook of a user forbids that ``blocks`` run a second time for their backward."""
    return all(inner.find() is None for inner in _inner_hooks(structure, blocks))


def check_reached(weights: Iterable[Weight], runs: BlockRuns) -> None:
    """Raise ``RuntimeError`` if a backward has ended that did not reach every block."""
    unfinished = [weight.label for weight in weights if weight.seen]
    if unfinished or runs.open:
        raise RuntimeError(
            f"the backward did not reach every block that took part in the forward (open: {unfinished[:3]}); "
            "the loss must depend on the output of the whole model"
        )
    runs.check()


class UserHooks:
    """Hooks of users that would see other gradients than in plain PyTorch, or be called twice.

    ``repeated`` blocks run a second time for their backward. ``parted``: blocks take a batch in parts, so that every
    weight gets a gradient per part. ``deferred``: a backward follows several forwards, so that every weight gets a
    gradient per forward.
    """

    def __init__(
        self, structure: Structure, repeated: Collection[int], *, parted: bool = False, deferred: bool = False
    ) -> None:
        self._inner = _inner_hooks(structure, repeated)
        self._weights = [(f"weight {name}", param) for name, param in structure.tensors]
        self._own = [0] * len(self._weights)
        """Hooks of the engine's on each weight."""
        uses = Counter(tensor for block in structure.blocks for tensor in block.tensors)
        several = parted or deferred
        self._shared = [one for at, one in enumerate(self._weights) if several or uses[at] > 1]
        self._why = _PER_FORWARD if deferred else _SHARING[parted]

    def let_in(self) -> None:
        """Let hooks be that the engine itself has attached by now."""
        self._own = [len(accumulated_hooks_of(param) or ()) for _, param in self._weights]

    def check(self) -> None:
        """Refuse, by the name of the module or weight, hooks that the engine cannot call as plain PyTorch does."""
        for inner in self._inner:
            hook = inner.find()
            if hook is not None:
                raise limits.MODULE_HOOKS.error(hook)
        for (label, param), own in zip(self._weights, self._own, strict=True):
            # Not by functions: this is asked of every weight, twice an iteration, and mostly there is nothing.
            if len(accumulated_hooks_of(param) or ()) != own:
                raise limits.PARAMETER_HOOKS.error(f"post-accumulate hook on {label}")
            if tensor_hooks_of(param) and _has_joint_hook(param):
                raise limits.PARAMETER_HOOKS.error(f"register_multi_grad_hook on {label}")
        for label, param in self._shared:
            if tensor_hooks_of(param):
                raise limits.PARAMETER_HOOKS.error(f"tensor hook on {label}, which {self._why}")


class InstalledSetup:
    """What blocks consist of, trainable tensors, hooks and the optimizer's groups, as the engine was installed."""

    def __init__(
        self, structure: Structure, weights: Sequence[Weight], updates: Updates | None, hooks: UserHooks
    ) -> None:
        self.hooks, self._updates = hooks, updates
        self._members = set(map(id, updates.members)) if updates is not None else set()
        self._weights = [(w, w.param, w.param.requires_grad, address_of(w.param)) for w in weights]
        """With the address of what hooks of gradients are attached to: other tensors may be put into a parameter."""
        self._parts: list[tuple[dict[str, Any], str, object, str]] = [
            (parts, key, part, f"{block.name}.{path}.{key}".replace("..", "."))
            for block in structure.blocks
            for path, module in block.module.named_modules()
            for parts in (parameters_of(module), submodules_of(module))
            for key, part in parts.items()
        ]
        """Parameters and modules of blocks: where each is, and its name."""
        hooks.let_in()

    def check(self) -> None:
        """Compare with what there is now; raises ``UnsupportedError`` naming what has changed."""
        self.hooks.check()
        for weight, _, _, inside in self._weights:
            if address_of(weight.param) != inside:
                raise limits.CHANGED_PARAMETERS.error(f"another tensor was swapped into {weight.label}")
        if self._updates is not None:
            self._updates.index_groups()
        change = self.changed()
        if change is not None:
            raise limits.REFROZEN.error(change)

    def changed(self, optimizer: Optimizer | None = None) -> str | None:
        """Return what has changed that another plan could follow, as a clause; ``optimizer``: the present one."""
        for weight, param, trainable, _ in self._weights:
            if param.requires_grad is not trainable:
                what = "frozen" if trainable else "unfrozen"
                return f"requires_grad of {weight.label} was changed to {param.requires_grad} ({what})"
        for parts, key, known, name in self._parts:
            present = parts.get(key)
            # For the time of a call nothing (parametrized), or a tensor (functional_call), may be in its place.
            if present is not known and isinstance(present, (nn.Parameter, nn.Module)):
                return f"{name} was replaced by another {type(present).__name__}"
        if self._updates is None:
            return None
        if optimizer is not None and optimizer is not self._updates.optimizer:
            return "another optimizer is in use"
        groups = self._updates.optimizer.param_groups
        if {id(param) for group in groups for param in group["params"]} != self._members:
            return "parameters were added to the optimizer or removed from it"
        return None


def _inner_hooks(structure: Structure, blocks: Collection[int]) -> list[InnerHooks]:
    return [InnerHooks(block.name, block.module) for index, block in enumerate(structure.blocks) if index in blocks]


def _has_joint_hook(param: Tensor) -> bool:
    """Return whether ``param`` has a hook that waits for the gradients of several tensors in one backward."""
    hooks = tensor_hooks_of(param)
    # Such a hook is a function that torch.autograd.graph has made, and nothing else tells it from others.
    return bool(hooks) and any(getattr(hook, "__globals__", {}) is vars(graph) for hook in hooks.values())


_PER_FORWARD = "has a gradient per forward of the model"
_SHARING = ("several blocks share", "has a gradient per part of the batch (micro_batches)")


class OwnParameters:
    """The parameters of a block's modules, which a call in training must find in their places."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        members = list(module.named_modules())
        self._places = [(parameters_of(m), key, f"{path}.{key}") for path, m in members for key in parameters_of(m)]

    def check(self) -> None:
        """Refuse tensors that stand for parameters during one call; raises ``UnsupportedError`` naming one."""
        for parameters, key, path in self._places:
            present = parameters.get(key)
            # As torch.func.functional_call does it, for the time of one call.
            if present is not None and not isinstance(present, nn.Parameter):
                raise limits.SUBSTITUTED.error(f"block {self._name} was called with another tensor as {path}")


class Backward:
    """Tells a backward of everything from one of some inputs: that leaves ``anchor`` out, below every block's node."""

    def __init__(self, anchor: Tensor) -> None:
        self._end = get_gradient_edge(anchor).node

    def check(self, run: BlockRun) -> None:
        """Refuse what a block's backward cannot do, from within it; raises ``UnsupportedError`` naming the block."""
        if torch.is_grad_enabled():
            # Within a backward, autograd enables gradients for create_graph only.
            raise limits.PARTIAL_BACKWARD.error(f"block {run.name} was differentiated with create_graph=True")
        # Every block's node leads to the anchor, which a backward for some inputs leaves out.
        if not will_run(self._end):
            raise limits.PARTIAL_BACKWARD.error(
                f"block {run.name} was differentiated by torch.autograd.grad or backward(inputs=...)"
            )
        if run.forgotten:
            raise limits.FORWARDS.error("the model was called again between a forward and its backward")
        if run.done:
            raise limits.ONE_BACKWARD.error(f"the backward of block {run.name} ran a second time")


class Consumers:
    """Watches the gradients of the inputs of blocks, to see whether anybody else uses those tensors.

    Plain PyTorch adds the gradients of a tensor one by one, in the order of its uses; a block that uses its input more
    than once gives their sum, which is another order of summation. If nobody else uses the tensor, its node receives
    the very tensor that the block has given. ``uses`` says how often a block uses each of its inputs, by its index,
    once its backward has begun.
    """

    def __init__(self, name: Callable[[int], str], uses: dict[int, Counter[int]]) -> None:
        self._name, self._uses = name, uses
        self._given: dict[tuple[int, int], tuple[tuple[int, int], bool]] = {}

    def watch(self, block: int, inputs: Sequence[Tensor]) -> None:
        """See the gradients of what ``block`` is about to be called with, before hooks of users change them."""
        for slot, tensor in enumerate(inputs):
            if tensor.requires_grad and torch.is_grad_enabled():
                users = dict(tensor_hooks_of(tensor) or {})
                tensor.register_hook(partial(self._arrived, block, slot))  # type: ignore[no-untyped-call]
                for key, hook in users.items():  # to the end: autograd calls hooks in the order of insertion
                    del tensor_hooks_of(tensor)[key]
                    tensor_hooks_of(tensor)[key] = hook

    def given(self, block: int, gradients: Sequence[Tensor | None], totals: Sequence[RunningTotal | None]) -> None:
        """Note what the backward of ``block`` has found, per input; ``totals``: whether other blocks use it, too."""
        for slot, (gradient, total) in enumerate(zip(gradients, totals, strict=True)):
            if gradient is not None:
                several = total is not None and total.users > 1
                self._given[block, slot] = _identity(gradient), several or self._uses[block][slot] > 1

    def _arrived(self, block: int, slot: int, gradient: Tensor) -> None:
        known, several = self._given.pop((block, slot), (None, False))
        if several and _identity(gradient) != known:
            raise limits.SEVERAL_CONSUMERS.error(f"the input of block {self._name(block)} is used in several places")


def _identity(tensor: Tensor) -> tuple[int, int]:
    """Return what differs once something was added to ``tensor``, or ``tensor`` to something; it must be alive."""
    with DisableTorchFunction():
        return address_of(tensor.untyped_storage()), version_of(tensor)
