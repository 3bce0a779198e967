"""One call of a model, observed between its blocks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lt_offload.compat.torch import TreeSpec, address_of, tensor_hooks_of, tree_flatten, tree_leaves, tree_unflatten
from lt_offload.model.blocks import Block
from lt_offload.model.calls import BlockOutput, Call, edges, held_by_nodes, is_block_node, numbers_of, tensors_of
from lt_offload.model.compiled import Forward, is_compiled
from lt_offload.model.head import HeadLoss
from lt_offload.model.parts import Cutter
from lt_offload.model.saving import activations_of
from lt_offload.model.state.contexts import ambient, within
from lt_offload.model.state.handed import Containers
from lt_offload.profiling.host_reads import Read, Readers

if TYPE_CHECKING:
    from lt_offload.profiling.step.first import FirstStep


@dataclass(kw_only=True, slots=True)
class Seam:
    """The model's own code between the return of one block and the call of the next."""

    live: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage that is there when the block is called, and that it is not given."""
    lingering: int = 0
    """Bytes of those that do not stay until the backward: the model's own code holds them for the moment."""
    forward: int = 0
    """Bytes that it has had at most beyond what it has left."""
    backward: int = 0
    """Bytes that its backward has at most, with the gradients that it begins with."""
    rest: list[nn.Parameter] = field(default_factory=list)
    """Parameters outside the blocks that get gradients in it."""


class ModelCall:
    """The calls of blocks in a step, each of which may turn out to be the last."""

    def __init__(self, step: FirstStep) -> None:
        self._step, self._account = step, step.account
        self.calls: list[Call] = []
        self.chained: list[bool] = []
        self.seams: list[Seam] = []
        self.between = self.below = self.output_bytes = 0
        self.masks: set[int] = set()
        """Storages that ``between`` is about."""
        self.before_loss: set[int] = set()
        """Storages that were alive when the last block returned, without its results."""
        self._last_output = BlockOutput(())
        self._shared: list[Tensor] = []
        """Arguments that are no activations: they live until the backward."""
        self._graph: list[Any] = []
        """Nodes of operations between blocks: their saved tensors live until the backward, too."""
        self.interfaces: set[int | None] = set()
        """Storages of activations between blocks."""
        self._activations: list[weakref.ref[Tensor]] = []
        """Arguments and results of blocks, as the model sees them."""
        self._handed: list[Tensor] = []
        """Arguments and results that were alive at the last block's call, held until the loss's backward has run."""
        self._copies: set[int | None] = set()
        """Storages that calls hold, which training would not have."""
        self._inner: set[int | None] = set()
        """Storages that graphs of blocks hold beside their saved tensors."""
        self._inner_bytes = 0
        self.ends: dict[GradientEdge, int] = {}
        """Ends of the graph between blocks: outputs of blocks, and their bytes."""
        self._leaves: dict[int, Tensor] = {}
        """Activations that no operation has made and that require gradients, as adapters have it of embeddings."""
        self.last_ends: dict[GradientEdge, int] = {}
        """Those of the last call."""
        self._given: list[list[tuple[int | None, bool, int]]] = []
        """Storage, need of a gradient and bytes of each activation, by call."""
        self._returned: list[int] = []

    def let_go(self) -> None:
        """Let go of arguments, and of tensors saved between blocks, whose backward is not run."""
        self._graph.clear()
        self._shared.clear()
        self._handed.clear()

    def saved_between(self, live: Mapping[int, int], in_graph: Set[int | None]) -> set[int | None]:
        """Return storages of ``live`` of blocks and of operations between them, which save ``in_graph``."""
        alive = {self._account.serial(tensor) for held in self._activations if (tensor := held()) is not None}
        others = {self._account.serial(tensor) for tensor in (*self._shared, *self._leaves.values())}
        # A result that an operation has saved is no longer alive where the model's own variable is gone.
        others |= {self._account.serial(tensor) for tensor in self._handed} - alive - in_graph
        return (self.interfaces & live.keys() & self.before_loss) - self._copies - others

    def retained_bytes(self) -> int:
        """Return the bytes of gradients that outputs of blocks retain, and of leaves with theirs.

        A leaf lives as long as the graph, which the next forward begins beside: its caller still has the loss.
        """
        alive = {id(tensor): tensor for held in self._activations if (tensor := held()) is not None}
        retained = sum(tensor.nbytes for tensor in alive.values() if tensor.retains_grad)
        return retained + 2 * sum(leaf.nbytes for leaf in self._leaves.values())

    def run(
        self,
        index: int,
        block: Block,
        original: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        containers: Containers,
    ) -> Any:
        """Run one block, which others of the step may follow."""
        step, account, cutter = self._step, self._account, self._step.cutters[index]
        known = len(step.by_signature)
        current = account.current  # first: it takes off what has died
        seam = Seam(forward=account.peak - current)
        self.seams.append(seam)
        # In a list that is emptied: who keeps `body` would keep the arguments, which the model may have let go of.
        call, pending = self._call(block, args, kwargs, cutter, containers, seam), [(args, kwargs)]
        self.calls.append(call)
        if cutter is not None and len(step.by_signature) > known:
            with step.stage(block.module), within(call.contexts):
                step.boundary.check_samples(block, call, original)
        leaves = tree_leaves((args, kwargs))
        inputs = [leaves[slot] for slot in call.slots]
        self._given.append([(account.serial(x), x.requires_grad, x.nbytes) for x in inputs])
        del inputs, leaves
        if self._handed:  # held for the call before, which was not the last one
            self._handed.clear()
            self._shared.clear()
        if index == len(step.blocks) - 1:
            # Held until the loss's backward has run. Arguments, and results of others, are blocks', even those that the
            # model's own code has in its variables only: it is not the loss that gives them back.
            self._shared += [tensor.detach() for tensor in tensors_of((args, kwargs))]
            self._handed = [tensor.detach() for held in self._activations if (tensor := held()) is not None]
        live = account.live()
        self.masks = live.keys() - self.interfaces - self._inner
        self.between = sum(live[serial] for serial in self.masks) + self._inner_bytes

        parts = iter(range(1 << 30))

        def body(*inner: Any, **named: Any) -> Any:
            (args, kwargs), *_ = pending
            first, before = next(parts) == 0, account.live().keys()
            out = step.boundary.run(index, call, original, args, kwargs, (inner, named), first=first)
            # Storages that the graph of the block's output holds: an unplanned step keeps all graphs. A step that runs
            # aside does not; but the memory that it names has to do for one that counts.
            returned = {account.serial(tensor) for tensor in tensors_of(out)}
            held = {account.serial(tensor) for tensor in held_by_nodes(out)} - before - returned
            self._inner |= held
            self._inner_bytes += sum(nbytes for serial, nbytes in account.live().items() if serial in held)
            return out

        positions: list[int] = []
        with step.stage(block.module):
            repeats = step.boundary.repeats(index, call)
            reached = partial(_reached, call.reached, positions)
            again = original if repeats else None
            out = step.join(index, args, kwargs, body, cutter=cutter, again=again, reached=reached)
        pending.clear()
        del args, kwargs
        tensors = tensors_of(out)
        floating = iter(range(len(tensors)))
        positions += [next(floating) if tensor.is_floating_point() else -1 for tensor in tensors]
        self.interfaces |= {account.serial(tensor) for tensor in tensors}
        outputs = {account.serial(t): t.untyped_storage().nbytes() for t in numbers_of(out)}
        self.output_bytes = sum(outputs.values())
        self._returned.append(self.output_bytes)
        self.below = account.current - self.output_bytes
        self.before_loss = account.live().keys() - outputs.keys()
        account.reset_peak()
        step.meter.lap()
        self.last_ends = {get_gradient_edge(tensor): tensor.nbytes for tensor in tensors if tensor.requires_grad}
        self.ends |= self.last_ends
        self._activations += [weakref.ref(tensor) for tensor in tensors]
        self._last_output = BlockOutput(out)
        if isinstance(call.module, HeadLoss):
            step.after.begin(out)
        elif index == len(step.blocks) - 1:
            step.watch.begin(out)
        return out

    def forget(self) -> None:
        """Let go of all calls and of the graph."""
        self.let_go()
        self.calls.clear()
        self.ends.clear()
        self.last_ends = {}
        self._leaves.clear()

    def input_bytes_of(self, at: int) -> int:
        """Return the bytes of the activations of one call."""
        return sum(nbytes for _, _, nbytes in self._given[at])

    def waiting_bytes(self, visits: Sequence[int]) -> int:
        """Return the bytes that a forward of these calls keeps until its backward, if others follow it."""
        inputs = sum(self.input_bytes_of(at) for at in visits if not self.chained[at])
        return inputs + self._returned[visits[-1]]

    def several_bytes_of(self, visits: Sequence[int]) -> int:
        """Return the bytes of activations that several blocks of a forward are given."""
        activations = [item for at in visits for item in self._given[at]]
        users = Counter(serial for serial, needs, _ in activations if needs)
        sizes = {serial: nbytes for serial, _, nbytes in activations}
        return sum(sizes[serial] for serial, count in users.items() if count > 1)

    def seam_before(self, at: int, others: Collection[int]) -> Seam:
        """Return the seam before a call, with those of ``others`` before it, which are of no block."""
        seam = self.seams[at]
        while at - 1 in others:
            at -= 1
            other = self.seams[at]
            seam = replace(
                seam,
                forward=max(seam.forward, other.forward),
                backward=max(seam.backward, other.backward),
                rest=[*seam.rest, *other.rest],
            )
        return seam

    def _call(
        self,
        block: Block,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cutter: Cutter | None,
        containers: Containers,
        seam: Seam,
    ) -> Call:
        """Return the call, the same for blocks that cost the same; fill in the seam before it."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [(slot, leaf) for slot, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        slots = activations_of(leaves, spec.child(0).num_leaves)
        needs_grad = tuple(leaves[slot].requires_grad for slot in slots)
        self.chained.append(self._last_output.sources([leaves[slot] for slot in slots]) is not None)
        self._differentiate([leaves[slot] for slot in slots], seam)
        for slot, leaf in tensors:
            if slot in slots:
                serial = self._account.serial(leaf)
                self.interfaces.add(serial)
                self._graph.append(leaf.grad_fn)
                self._activations.append(weakref.ref(leaf))
            else:
                self._shared.append(leaf)
        arguments = {self._account.serial(leaf) for _, leaf in tensors}
        others = arguments | self._copies | self._inner
        seam.live = {serial: size for serial, size in self._account.live().items() if serial not in others}
        parameters = list(block.module.parameters())
        signature = (
            repr(block.module),
            is_compiled(block.module),
            [_flags(module) for module in block.module.modules()],
            tuple((p.shape, p.dtype, p.requires_grad) for p in parameters),
            tuple(map(described, leaves)),
            spec,
            needs_grad,
            ambient(),
            cutter is None,
        )
        key = repr(signature)
        if key not in self._step.by_signature:
            self._step.by_signature[key] = Call(
                module=block.module,
                leaves=[self._own(leaf, copy=slot in slots) for slot, leaf in enumerate(leaves)],
                spec=spec,
                slots=slots,
                needs_grad=needs_grad,
                has_backward=any(needs_grad) or any(p.requires_grad for p in parameters),
                contexts=ambient(),
                reached={0},
                cutter=cutter,
                containers=containers.apart(),
            )
        return self._step.by_signature[key]

    def _differentiate(self, inputs: Sequence[Tensor], seam: Seam) -> None:
        """Run the backward of the operations before a block, unless they are users' own code, and count its bytes."""
        roots = [leaf for leaf in inputs if leaf.requires_grad]
        nodes = [get_gradient_edge(leaf).node for leaf in roots]
        nodes += [node for node, _ in edges(nodes, outer=True)]
        variables = {id(node.variable): node.variable for node in nodes if hasattr(node, "variable")}
        rest = [p for p in self._step.rest if id(p) in variables]
        leaves = {key: leaf for key, leaf in variables.items() if not any(leaf is p for p in rest)}
        self._leaves |= leaves
        between = [node for node in nodes if not hasattr(node, "variable") and not is_block_node(node)]
        if self.chained[-1] or any(isinstance(node, BackwardCFunction) for node in between):
            return
        alive = [tensor for held in self._activations if (tensor := held()) is not None]
        watched = [*roots, *rest, *leaves.values(), *alive]
        # Hooks of users would be called once more than in training.
        if not between or any(map(tensor_hooks_of, watched)):
            return
        ends = {edge: nbytes for edge, nbytes in self.ends.items() if any(edge.node is node for node in nodes)}
        # Blocks lie above what else these lead to, and would have their backward.
        below = {id(node) for node, _ in edges(edge.node for edge in ends)}
        seam.rest = rest
        wanted = [tensor for tensor in (*rest, *leaves.values()) if id(get_gradient_edge(tensor).node) not in below]
        reached = [edge for edge in ends if id(edge.node) not in below]
        before = self._account.current
        self._account.reset_peak()
        if wanted or reached:
            zeros = [torch.zeros_like(root) for root in roots]
            torch.autograd.grad(roots, [*wanted, *reached], zeros, retain_graph=True, allow_unused=True)
        seam.backward = self._account.peak - before + sum(ends.values()) - sum(ends[edge] for edge in reached)

    def _own(self, leaf: Any, *, copy: bool) -> Any:
        """Return an argument as a call keeps it: a copy of an activation, so that the model's own may be freed."""
        if not isinstance(leaf, Tensor):
            return leaf
        plain = leaf.detach()
        own = plain.clone() if copy else plain
        # A copy of a tensor with gaps or repeated rows lies in memory otherwise, and kernels are chosen by that.
        if own is plain or own.stride() != leaf.stride():
            return plain
        self._copies.add(self._account.serial(own))
        self.interfaces |= self._copies
        return own


def _reached(reached: set[int], positions: Sequence[int], number: int) -> None:
    if number < len(positions) and positions[number] >= 0:
        reached.add(positions[number])


def _flags(module: nn.Module) -> list[str]:
    """Return the flags that are set in ``module``; torch's own, such as for hooks, say nothing of its numbers."""
    return [name for name, value in vars(module).items() if value is True and not name.startswith("_")]


# -- like calls --------------------------------------------------------------------------------------------------------

# Numbers tell blocks of one kind apart, and fake tensors have none: one of a kind runs, and the others return the like,
# so that a model of sixty like layers is known when one has run.

_ATOMS = (bool, int, float, str, type(None))


def result_like(call: Call, leaves: Sequence[Any], module: nn.Module, readers: Readers) -> Callable[[], Any] | None:
    """Return a function that stands for a run of ``module`` on ``leaves``; None if it has to run."""
    known = call.alike.get((*map(described, leaves),)) if call.alike else None
    if known is None:
        return None
    make, ran, reads = known
    readers.note_like(reads, ran, module)
    return make  # type: ignore[no-any-return]


def note_result(call: Call, leaves: Sequence[Any], module: nn.Module, out: Any, reads: list[Read]) -> None:
    """Note a run of ``module`` on ``leaves``, if its results are new tensors, and its graph holds none beside."""
    if call.alike is None:
        return
    outputs, spec = tree_flatten(out)
    if not all(isinstance(leaf, Tensor) for leaf in outputs):
        return
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    known = [*module.parameters(), *module.buffers(), *inputs, *held_by_nodes(inputs)]
    held = {id(tensor) for tensor in held_by_nodes(out)} - set(map(id, known))
    before, after = ([address_of(x.untyped_storage()) for x in tensors] for tensors in (known, outputs))
    new = len({*after} - {*before}) == len(outputs)
    whole = all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in outputs)
    if new and whole and not held and all(isinstance(leaf, (Tensor, *_ATOMS)) for leaf in leaves):
        make = partial(_made, [partial(torch.empty_strided, **_form(tensor)) for tensor in outputs], spec)
        call.alike[(*map(described, leaves),)] = make, module, reads


def described(leaf: Any) -> object:
    """Return the form of an argument, on which the cost of a call depends."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.stride()
    return leaf if isinstance(leaf, _ATOMS) else type(leaf)


def _form(tensor: Tensor) -> dict[str, Any]:
    form = {name: getattr(tensor, name) for name in ("dtype", "device", "requires_grad")}
    return {"size": tensor.shape, "stride": tensor.stride(), **form}


def _made(makers: Sequence[Callable[[], Tensor]], spec: TreeSpec) -> Any:
    return tree_unflatten([make() for make in makers], spec)
