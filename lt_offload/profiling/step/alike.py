"""Runs of blocks with fake tensors: one of a kind runs, and the others return the like.

Numbers tell blocks of one kind apart, and fake tensors have none: a model of sixty like layers is known when one has
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import TreeSpec, address_of, tree_flatten, tree_unflatten
from lt_offload.model.calls import Call, held_by_nodes
from lt_offload.profiling.host_reads import Read, Readers

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
