"""The location of a model while its blocks run on a GPU: its answer to that, and what is brought there.

Between blocks weights are host tensors. A model that takes the device of its first parameter for its own, as those of
transformers do, would say that it is on the host: ``generate`` would put token ids there, and what a step makes with
``torch.arange(n, device=self.model.device)`` would meet activations of the GPU.

``device`` is a property of a class, which no attribute of an object can cover. Giving the object a class of its own
would show wherever somebody asks for ``type(model)``, pickles or copies it. So the property itself is replaced, by one
that answers for the modules that run on a GPU, and as before for all others, copies of these among them. It is put back
when the last of them is given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import tree_map
from lt_offload.machine.replaced import Replaced
from lt_offload.model.blocks import Block

Class = type[Any]

_homes: WeakKeyDictionary[nn.Module, list[torch.device]] = WeakKeyDictionary()
"""Devices of modules, if they run elsewhere than where their parameters are."""


class _Home(property):
    """A class's ``device``: of modules that run elsewhere it is where they run, unless they do not say the host."""

    def __init__(self, original: property) -> None:
        def answer(module: nn.Module) -> Any:
            device = original.__get__(module, type(module))
            if isinstance(device, torch.device) and device.type == "cpu":
                return (_homes.get(module) or [device])[-1]
            return device

        super().__init__(answer, original.fset, original.fdel, original.__doc__)


@cache
def _home_of(owner: Any) -> Replaced:
    return Replaced(lambda: owner, "device", _Home)


@contextmanager
def staged(tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Have ``tensors`` on ``device``; they return to the very memory where they were."""
    with ExitStack() as undo:
        for tensor in tensors:
            if tensor.device.type != device.type:
                undo.callback(setattr, tensor, "data", tensor.data)
                tensor.data = tensor.data.to(device)
        yield


@contextmanager
def located(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context ``device`` of ``model``, and of each of its modules that has this property, is ``device``."""
    modules = list(model.modules()) if device.type != "cpu" else []
    owners: dict[Any, Any] = {type(module): _owner(type(module)) for module in modules}
    modules = [module for module in modules if owners[type(module)] is not None]
    with ExitStack() as stack:
        for owner in dict.fromkeys(owners.values()):
            if owner is not None:
                stack.enter_context(_home_of(owner).active())
        for module in modules:
            homes = _homes.setdefault(module, [])
            homes.append(device)  # contexts may be nested, and end in any order
            stack.callback(homes.remove, device)
        yield


def _owner(cls: Class) -> Class | None:
    """Return the class from which ``cls`` has its property ``device``; None if it has no such property."""
    owner = next((base for base in cls.__mro__ if "device" in vars(base)), None)
    return owner if owner is not None and isinstance(vars(owner)["device"], property) else None


def brought(
    block: Block, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of ``block`` with their tensors on ``device``, where it runs.

    In plain PyTorch they would have to be there. Here code that asks a weight where it is puts them on the host.

    Single numbers and lists of integers stay where they are, unless they are token ids: they may be meant for the host
    (the lengths of a packed sequence), where they work in plain PyTorch, too.
    """

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu":
            return leaf
        counts = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
        moves = block.kind == "embedding" or leaf.ndim > 1 or (leaf.ndim == 1 and not counts)
        return leaf.to(device) if moves else leaf

    brought: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(moved, (args, kwargs))
    return brought
