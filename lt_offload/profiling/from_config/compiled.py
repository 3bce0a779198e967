"""Blocks under ``torch.compile`` as they are planned: torch's own graphs, with fusible operations as one kernel.

Inductor makes the graphs of forward and backward, and so decides what is saved in between. Instead of code for a
machine that is not here, each run of cheap operations between two costly ones (products, attention) becomes one
operation, which reads what comes from elsewhere and writes what is used elsewhere; nothing in between is in memory.
That is how inductor fuses at best. Where its kernels write over what they read, the code takes less memory.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from typing_extensions import override

from lt_offload.compat.torch import Operation, lower_graphs, packet_of, schema_of
from lt_offload.model.blocks import Structure
from lt_offload.units import dtype_name

_library = torch.library.Library("lt_offload", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "fused(Tensor[] read, str written) -> Tensor[]"
)

_library.define("fused_into(Tensor[] read, Tensor(a!)[] written) -> ()")  # type: ignore[no-untyped-call]

_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var", "var_mean", "any", "all", "prod", "argmax", "argmin"})
_RANDOM = frozenset({"rand", "rand_like", "randn_like", "inductor_random", "inductor_randint", "inductor_seeds"})
"""Random numbers, made once and kept for the backward."""
_OTHERS = frozenset(
    {
        "_softmax", "_to_copy", "arange", "cat", "constant_pad_nd", "full", "full_like", "gather", "index",
        "inductor_lookup_seed", "iota", "scalar_tensor", "select_scatter", "slice_scatter", "tril", "triu",
    }
)  # fmt: skip
"""Operations that are neither marked as pointwise nor reductions, but part of fused kernels."""


@torch.library.register_fake("lt_offload::fused", lib=_library)  # type: ignore[untyped-decorator]
def _fused(read: list[Tensor], written: str) -> list[Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype)) for shape, stride, dtype in json.loads(written)
    ]


@torch.library.register_fake("lt_offload::fused_into", lib=_library)  # type: ignore[untyped-decorator]
def _fused_into(read: list[Tensor], written: list[Tensor]) -> None:
    pass


def compile_planned(structure: Structure) -> None:
    """Let calls of the layers of ``structure``, on fake tensors, run the graphs that stand for their compiled code."""
    for block in structure.blocks:
        if block.kind == "layer":
            block.module.compile(backend=partial(lower_graphs, lower=_lowered), dynamic=False)


def _lowered(module: GraphModule) -> Any:
    """Return a callable that runs a graph; it empties its list of arguments and frees each after its last use."""
    lowered = GraphModule(module, fuse(module.graph))
    # One for each run: it holds on to what the graph has returned.
    return lambda arguments: Interpreter(lowered).boxed_run(arguments)


def fuse(graph: Graph) -> Graph:
    """Return ``graph``, of aten operations on tensors of known sizes, with each run of cheap operations as one."""
    runs = _runs(graph)
    kept = _kept(graph, runs)
    new = Graph()
    made: dict[Node, Node] = {}

    def value(node: Node) -> Node:
        if node not in made:
            assert _is_view(node), node
            made[node] = new.node_copy(node, value)
        return made[node]

    waiting: list[Node] = []
    for node in graph.nodes:
        if node in runs:
            waiting += [node] if node in kept else []
        elif not _is_view(node):
            # First the results of the run before: this operation may read them.
            _write(new, waiting, made, value, kept=kept, runs=runs)
            waiting = []
            made[node] = new.node_copy(node, value)
    return new


def _write(
    new: Graph, outputs: list[Node], made: dict[Node, Node], value: Any, *, kept: set[Node], runs: dict[Node, int]
) -> None:
    if not outputs:
        return
    reads = list(dict.fromkeys(_reads(outputs, kept, runs)))
    tensors = [output.meta["val"] for output in outputs]
    written = json.dumps([written_as(tensor) for tensor in tensors])
    kernel = new.call_function(torch.ops.lt_offload.fused.default, ([value(node) for node in reads], written))
    for position, output in enumerate(outputs):
        made[output] = new.call_function(operator.getitem, (kernel, position))


def written_as(tensor: Tensor) -> list[Any]:
    """Return sizes, strides and dtype of ``tensor``, from which the operation makes one like it."""
    return [[int(size) for size in tensor.shape], [int(step) for step in tensor.stride()], dtype_name(tensor.dtype)]


def _reads(outputs: Iterable[Node], kept: set[Node], runs: dict[Node, int]) -> Iterator[Node]:
    """Yield the nodes in memory that are read to make ``outputs``; others are made, perhaps again, in registers."""
    seen: set[Node] = set(outputs)
    waiting = list(seen)
    run = runs[waiting[0]]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            base = _base(source)
            if base in seen:
                continue
            seen.add(base)
            if base in runs and (base not in kept or runs[base] == run):
                waiting.append(base)
            else:
                yield base


def _runs(graph: Graph) -> dict[Node, int]:
    """Return, for every node that fuses, the number of the run that it is in: costly operations divide them."""
    runs: dict[Node, int] = {}
    run = 0
    for node in graph.nodes:
        func = node.target
        plain = isinstance(func, Operation) and not func.is_view and not schema_of(func).is_mutable
        fuses = plain and (torch.Tag.pointwise in func.tags or _name(func) in _REDUCTIONS | _RANDOM | _OTHERS)
        if fuses or (func is operator.getitem and node.args[0] in runs):
            runs[node] = run
        elif node.op == "call_function" and not _is_view(node) and node.target is not operator.getitem:
            run += 1
    return runs


def _kept(graph: Graph, runs: dict[Node, int]) -> set[Node]:
    """Return the nodes of runs whose results are in memory: others read them, and later runs cannot make them again."""
    kept: set[Node] = set()
    for node in graph.nodes:
        if _is_view(node):
            continue
        for base in map(_base, node.all_input_nodes):
            if base in runs and runs.get(node) != runs[base]:
                # A later kernel makes the others again instead of reading them.
                costly = base.target is operator.getitem or _name(base.target) in _REDUCTIONS | _RANDOM
                if costly or node not in runs:
                    kept.add(base)
    return kept


def _base(node: Node) -> Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: Node) -> bool:
    return isinstance(node.target, Operation) and node.target.is_view


def _name(func: Any) -> str:
    return str(packet_of(func)).rpartition(".")[2]


# -- Liger's kernels --------------------------------------------------------------------------------------------------

# One operation each, with its reads and writes, without Triton or a GPU. What is saved follows ``liger_kernel.ops``
# (``rms_norm.py``, ``swiglu.py``, ``geglu.py``): a norm its input and a number per row, a gated activation its two
# inputs, over which its backward writes their gradients.


def _kernel(read: Sequence[Tensor], like: Sequence[Tensor], *, rows: int = 0) -> list[Tensor]:
    """Return the results of a kernel that reads ``read``: tensors as ``like``, and a number for each of the rows."""
    sizes = [written_as(tensor) for tensor in like] + ([[[rows], [1], "float32"]] if rows else [])
    written: list[Tensor] = torch.ops.lt_offload.fused.default(list(read), json.dumps(sizes))
    return written


class PlannedNorm(torch.autograd.Function):
    """RMSNorm over the last dimension, of shape (..., features); the root of each row is saved in float32."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, offset: float, casts: str, in_place: bool
    ) -> Tensor:
        x = x.contiguous()
        out, roots = _kernel([x, weight], [x], rows=x.numel() // x.shape[-1])
        ctx.save_for_backward(x, weight, roots)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, weight, roots = ctx.saved_tensors
        gradients = _kernel([grads[0], x, weight, roots], [x, weight] if ctx.needs_input_grad[1] else [x])
        return gradients[0], gradients[1] if len(gradients) > 1 else None, None, None, None, None


class PlannedGated(torch.autograd.Function):
    """The product of an activation of ``gate`` and ``up``, all of one shape."""

    @staticmethod
    @override
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        (out,) = _kernel([gate, up], [gate])
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        # Over its inputs, as Liger's does: new tensors would count as memory that it never takes.
        torch.ops.lt_offload.fused_into.default([grads[0], gate, up], [gate, up])
        return gate, up
