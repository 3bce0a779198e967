"""Calls of a block, and what they return: enough to run it alone, and to see where its input comes from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lt_offload.compat.torch import DisableTorchDispatch, TreeSpec, tree_leaves, tree_unflatten
from lt_offload.model.compiled import cover, is_compiled
from lt_offload.model.parts import Cut, Cutter
from lt_offload.model.snapshot import version
from lt_offload.model.state.contexts import Ambient, within
from lt_offload.model.state.effects import Effects, Rest
from lt_offload.model.state.generators import global_states, set_global_states
from lt_offload.model.state.handed import Containers
from lt_offload.schema.profile import COLLECTED_BELOW


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """A block and what it was called with."""

    module: nn.Module
    leaves: list[Any]
    """Arguments as ``tree_flatten`` gives them."""
    spec: TreeSpec
    slots: tuple[int, ...]
    """Positions of the leaves that are activations."""
    needs_grad: tuple[bool, ...]
    """Per slot."""
    has_backward: bool
    contexts: Ambient
    """The contexts in which it was called."""
    reached: set[int]
    """Positions of the floating-point outputs that a loss has given gradients, as far as that is known.

    The first of them goes on to the next block.
    """
    other_kernels: bool = False
    """True once it is known that without a graph the numbers are others, of other kernels."""
    seen: Rest | None = None
    """The state of its modules as it has seen it, which others may have changed since; None if that is not known."""
    uses: list[int] | None = None
    """Uses of each activation, once it has run with a graph."""
    unrecorded: bool = False
    """True once a run of it has kept no graph."""
    operations: list[str] | None = None
    """The operations that it calls, with a graph and without one, if nothing is to be said of further runs that call
    the same."""
    alike: dict[object, Any] | None = None
    """Results by the forms of arguments; None if it leaves something else behind, as far as that is known."""
    held_bytes: int = 0
    """Device memory that remembering the state of its modules takes until a second run, that is to see it."""
    copied_bytes: int = 0
    """The same within the first run."""
    rehearsed: list[Tensor] = field(default_factory=list)
    """States of the generators that every trial of its costs begins with, if the block draws something."""
    cutter: Cutter | None = None
    """Cuts the batch in parts; None: the block takes all of it."""
    containers: Containers | None = None
    """Containers of the tensors among its arguments; None: nothing but the arguments themselves."""

    @property
    def inputs(self) -> list[Tensor]:
        """The activations."""
        return [self.leaves[slot] for slot in self.slots]

    @property
    def compiled(self) -> bool:
        """True if the block is compiled."""
        return is_compiled(self.module)

    @property
    def graphed(self) -> bool:
        """True if the block always runs with a graph, as it would have other numbers without."""
        return self.compiled or self.other_kernels

    @property
    def passing_bytes(self) -> int:
        """Bytes of gradients that plans add to a measured peak themselves, so that it must not contain them."""
        sizes = [parameter.nbytes for parameter in self.module.parameters() if parameter.requires_grad]
        large = [size for size in sizes if size >= COLLECTED_BELOW]
        return sum(sizes) - sum(large) + max(large, default=0)

    def draws(self) -> list[Tensor]:
        """Return the states of torch's global generators that the block may draw from."""
        return global_states(self.devices)

    def draw_from(self, states: list[Tensor]) -> None:
        """Let the block draw what follows these states."""
        set_global_states(states, self.devices)

    @property
    def devices(self) -> list[torch.device]:
        """The devices of its arguments."""
        return sorted({leaf.device for leaf in self.leaves if isinstance(leaf, Tensor)}, key=str)

    def cut(self) -> Cut | None:
        """Return how the batch is cut; None if it is not."""
        return None if self.cutter is None else self.cutter.cut(self.leaves, self.spec)

    def parts(self, cut: Cut) -> list[Call]:
        """Return the calls of the parts."""
        return [replace(self, leaves=leaves, cutter=None) for leaves in cut.parts(self.leaves)]

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Enclose runs that see the block's modules as they were at the call, and leave no trace in them."""
        with nullcontext() if self.seen is None else self.seen.restored(), Effects(self.module).untouched():
            yield

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Call the block on ``inputs``."""
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, inputs, strict=True):
            leaves[slot] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        with within(self.contexts):
            return self.around(self.module)(*args, **kwargs)

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward`` of the block, given the containers that its arguments were in."""
        containers = self.containers
        return forward if containers is None else lambda *args, **kwargs: containers.run(forward, args, kwargs)


def has_values(call: Call) -> bool:
    """Return whether a block was called with numbers, and not with fake tensors."""
    # Embeddings of positions may be called with a length alone.
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)] or list(call.module.parameters())
    return all(type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta for tensor in tensors)


class BlockOutput:
    """The output of a block, to be recognised among the arguments of the next one; keeps nothing alive.

    Recognised by storage, form and version. The address alone would not do: once a storage has died, another may have
    it.
    """

    def __init__(self, out: Any) -> None:
        self._known = [(weakref.ref(t.untyped_storage()), _describe(t)) for t in tensors_of(out)]

    def sources(self, inputs: Sequence[Tensor]) -> tuple[int, ...] | None:
        """Return, per input, which of the returned tensors it is, untouched.

        None if there are no inputs, or one of them is something else: recomputing the block would not give it.
        """
        positions = [self._source(tensor) for tensor in inputs]
        known = tuple(position for position in positions if position is not None)
        return known if known and len(known) == len(positions) else None

    def _source(self, tensor: Tensor) -> int | None:
        storage, description = tensor.untyped_storage(), _describe(tensor)
        matches = (i for i, (ref, known) in enumerate(self._known) if ref() is storage and known == description)
        return next(matches, None)


def tensors_of(out: Any) -> list[Tensor]:
    """Return the tensors among what a block returned, in their order."""
    return [out] if type(out) is Tensor else [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def numbers_of(out: Any) -> list[Tensor]:
    """Return the tensors of numbers among what a block returned: the first one goes on to the next block."""
    return [tensor for tensor in tensors_of(out) if tensor.is_floating_point()]


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of so many bytes."""


def bit_sums(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of the tensors' bits, taken as integers of their size: the same in any order, and no copy."""
    plain = [t for t in outputs if type(t) is Tensor and t.layout == torch.strided and t.element_size() in _BITS]
    bits = [_BITS[tensor.element_size()] for tensor in plain]
    with torch.no_grad(), DisableTorchDispatch():  # these few bytes are in no plan
        # Integers wrap around: their sum does not depend on the order in which a kernel adds.
        return [tensor.view(kind).sum(dtype=kind) for tensor, kind in zip(plain, bits, strict=True)]


class BlockNode(torch.autograd.Function):
    """The node of a block in the outer graph; ``index`` and ``reached``, called with an output's number, are in it."""


class EntryNode(torch.autograd.Function):
    """The node of an activation, number ``slot``, where the private graph of a block begins: it holds nothing.

    ``anchor`` requires grad, so that there is a node although inputs are detached from the outer graph. ``catch`` takes
    the gradient.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, block: int, slot: int, catch: Callable[[Tensor], object]
    ) -> Tensor:
        ctx.block, ctx.slot, ctx.catch = block, slot, catch
        return x.view_as(x)  # an output of its own: the graph begins at this node and not at the input

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        ctx.catch(grads[0])
        return (None,) * 5


def is_block_node(node: Any) -> bool:
    """Return whether ``node`` stands for a block in the outer graph."""
    return issubclass(getattr(type(node), "_forward_cls", object), BlockNode)


def is_entry_node(node: Any) -> bool:
    """Return whether ``node`` is where the private graph of a block begins."""
    return issubclass(getattr(type(node), "_forward_cls", object), EntryNode)


def edges(roots: Iterable[Any], *, outer: bool = False) -> Iterator[tuple[Any, int]]:
    """Yield every edge of the graph below ``roots``, as node and number; ``outer``: not behind the nodes of blocks."""
    seen: dict[int, Any] = {}  # keeps the nodes alive: the identity of one that is gone may be another's
    waiting = [node for node in roots if node is not None]
    while waiting:
        node = waiting.pop()
        if id(node) in seen or (outer and is_block_node(node)):
            continue
        seen[id(node)] = node
        for following, number in _following(node):
            if following is not None:
                yield following, number
                waiting.append(following)


def saved_by(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operation has saved for its backward."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        names = ["saved_tensors"]
    for name in names:
        try:
            yield from tensors_of(getattr(node, name))
        except RuntimeError:  # it has been used, or its saved tensors have hooks of users
            continue


def kept_by_functions(out: Any) -> list[Any]:
    """Return what users' ``autograd.Function``s have kept in ``ctx`` for the backward of ``out``, to be compared.

    Two runs may give the same numbers and keep something else: a counter, or a seed, of which only a gradient depends.
    """
    kept = []
    for node in _nodes(out):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            saved: Any = node
            kept += [_comparable(value) for value in (*vars(saved).items(), *saved.saved_tensors)]
    return kept


def held_by_nodes(out: Any) -> Iterator[Tensor]:
    """Yield the tensors that the graph of ``out`` holds beside what it saves: leaves, and users' attributes of ``ctx``.

    Hooks for saved tensors are not shown them, so that they stay where they are until the backward.
    """
    for node in _nodes(out):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            held: Any = node
            yield from tensors_of(list(vars(held).values()))
        elif isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf


def _nodes(out: Any) -> Iterable[Any]:
    roots = [tensor.grad_fn for tensor in tensors_of(out)]
    return {id(node): node for node in (*roots, *(node for node, _ in edges(roots))) if node is not None}.values()


def _comparable(value: Any) -> Any:
    """Return something that is equal for two values if their numbers are."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, [int(total) for total in bit_sums([value])]
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return [_comparable(pair) for pair in value.items()]
    return value if isinstance(value, (bool, int, float, complex, str, bytes, type(None))) else type(value)


def _following(node: Any) -> Sequence[tuple[Any, int]]:
    try:
        following: Sequence[tuple[Any, int]] = node.next_functions
    except RuntimeError:  # until torch 2.12 the Python object of an autograd.Function's node may outlive the node
        return ()
    return following


def _describe(tensor: Tensor) -> tuple[torch.dtype, int, torch.Size, tuple[int, ...], int]:
    return tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride(), version(tensor)


def switched_off(model: nn.Module) -> Iterator[str]:
    """Yield a sentence about each thing that :func:`plainly` switches off and that people may want to know of."""
    flags = ((name, module) for name, module in model.named_modules() if hasattr(module, "gradient_checkpointing"))
    names = [name or type(model).__name__ for name, module in flags if module.gradient_checkpointing is True]
    if names:
        yield (
            f"gradient checkpointing of {len(names)} modules, such as {names[0]}, is off while the model trains here: "
            "the plan says what is computed again, and the numbers are the same"
        )
    configs = (getattr(module, "config", None) for module in model.modules())
    if any(getattr(c, "is_encoder_decoder", False) and getattr(c, "use_cache", False) for c in configs):
        yield (
            "config.use_cache is off while the model trains here, which may change the last bits of a decoder's "
            "attention: set config.use_cache=False elsewhere, too, for the same numbers"
        )


@contextmanager
def plainly(model: nn.Module) -> Iterator[None]:
    """Within the context ``model`` keeps no caches and recomputes nothing by itself: its flags for that are off."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    flags: list[tuple[Any, str]] = [(config, "use_cache") for config in configs.values()]
    flags += [(module, "gradient_checkpointing") for module in model.modules()]
    changed = [(owner, flag) for owner, flag in flags if getattr(owner, flag, None) is True]
    with ExitStack() as undo:
        for owner, flag in changed:
            # A copy of the module that is made meanwhile (a callback's average of weights) has the flag as the user has
            # set it.
            if flag in vars(owner) and isinstance(owner, nn.Module):
                undo.callback(cover(owner, flag, False))
            else:
                setattr(owner, flag, False)
                undo.callback(setattr, owner, flag, True)
        yield
