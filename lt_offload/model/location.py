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

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lt_offload.model.blocks import Block

Class = type[Any]

_homes: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()
"""Devices of modules, if they run elsewhere than where their parameters are."""
_replaced: dict[Class, _Home] = {}
"""By class whose ``device`` is replaced: by what, until no module is elsewhere any more."""
_changing = threading.RLock()


class _Home(property):
    """A class's ``device``: of modules that run elsewhere it is where they run, unless they do not say the host."""

    def __init__(self, original: property) -> None:
        self.original = original

        def answer(module: nn.Module) -> Any:
            device = original.__get__(module, type(module))
            if isinstance(device, torch.device) and device.type == "cpu":
                return _homes.get(module, device)
            return device

        super().__init__(answer, original.fset, original.fdel, original.__doc__)


@contextmanager
def staged(tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Have ``tensors`` on ``device``; they return to the very memory where they were."""
    moved = [(tensor, tensor.data) for tensor in tensors if tensor.device.type != device.type]
    try:
        for tensor, data in moved:
            tensor.data = data.to(device)
        yield
    finally:
        for tensor, data in moved:
            tensor.data = data


@contextmanager
def located(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context ``device`` of ``model``, and of each of its modules that has this property, is ``device``."""
    modules = list(model.modules()) if device.type != "cpu" else []
    owners = {type(module): _owner(type(module)) for module in modules}
    modules = [module for module in modules if owners[type(module)] is not None]
    classes = [owner for owner in dict.fromkeys(owners.values()) if owner is not None]
    with _changing:
        before = {module: _homes[module] for module in modules if module in _homes}
        for module in modules:
            _homes[module] = device
        for owner in classes:
            if owner not in _replaced:
                owner.device = _replaced[owner] = _Home(vars(owner)["device"])
    try:
        yield
    finally:
        with _changing:
            for module in modules:
                _homes.pop(module, None)
            # Contexts may be nested: where the outer one has modules counts again.
            _homes.update(before)
            if not _homes:
                for owner, home in _replaced.items():
                    if vars(owner).get("device") is home:  # otherwise somebody has replaced it in turn, and calls it
                        owner.device = home.original
                _replaced.clear()


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
    every = block.kind == "embedding"
    return _brought(args, device, every), _brought(kwargs, device, every)


def _brought(value: Any, device: torch.device, every: bool) -> Any:
    """Return ``value`` with its tensors on ``device``; itself if there are none elsewhere."""
    if isinstance(value, Tensor):
        counts = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        moves = value.device.type == "cpu" and (every or value.ndim > 1 or (value.ndim == 1 and not counts))
        return value.to(device) if moves else value
    if type(value) is dict:
        entries = {key: _brought(item, device, every) for key, item in value.items()}
        return entries if any(entries[key] is not item for key, item in value.items()) else value
    if type(value) in (tuple, list):
        items = [_brought(item, device, every) for item in value]
        return type(value)(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value
