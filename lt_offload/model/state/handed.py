"""The containers and objects that a block is called with: the caller's own, and what the block writes into them.

A block that is given a dictionary counts in it, collects tensors there, or leaves a loss that the model adds to its
own. It has to find the caller's own dictionary; but the tensors in it have to be those of the block's private graph
while it runs, a second run has to see what the first one saw, and what the block puts there is as much an output as
what it returns. So for the engine and the profile a call has lists of tensors where the caller had containers
(:attr:`Handed.args`), and the block's forward (:meth:`Handed.around`) fills the caller's containers from them, takes
out what the block has written, puts back what was there and returns the rest with the output. When the engine has made
that a part of the outer graph, :meth:`Handed.returned` writes it where the block wrote it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from lt_offload.compat.torch import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from lt_offload.model.blocks import Block
from lt_offload.model.location import brought
from lt_offload.model.objects import Contents, attributes_of, holders, kind_of, read, unchanged, write
from lt_offload.model.snapshot import version

Forward = Callable[..., Any]
_ATOMS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class _Stand:
    """Stands where a container holds a tensor of the call, one that the block has made, or another container."""

    kind: Literal["input", "output", "own"]
    at: int


_GIVEN = object()
"""Stands for an argument without containers, which is handed on as it is."""


@dataclass(frozen=True, slots=True)
class WrittenContainers:
    """Results of a run, written and returned, with outputs in place of tensors."""

    leaves: list[Any]
    spec: TreeSpec
    contents: list[tuple[Any, bool, Contents]]
    """Containers and objects, whether these are attributes, and what is there now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Containers:
    """The containers of a call and what they held when it was made, without the tensors: those come with each run."""

    own: list[Any]
    """Containers and objects."""
    contents: list[tuple[int, bool, Contents]]
    """By position among them: whether these are an object's attributes, and what was there."""
    args: list[Any]
    """Arguments that have containers, by position; ``_GIVEN`` for others."""
    kwargs: dict[str, Any]
    inner: frozenset[int]
    """Positions of the call's tensors that stay the caller's own where a container holds them afterwards.

    All but those that are arguments themselves and require grad: in plain PyTorch a later use of these gives its
    gradient before the block's own uses do, as that of an output does here.
    """

    def apart(self) -> Containers:
        """Return the same with containers of its own, which hold no tensors: for runs that only measure."""
        apart = replace(self, own=list(map(_another, self.own)))
        nothing = defaultdict[int, Any](type(None))
        for at, attributes, contents in apart.contents:
            write(_place(apart.own[at], attributes), _filled(contents, partial(apart._real, nothing)))
        return apart

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block as it was called, with the tensors among these arguments; leave its containers as they are now.

        Returns what it returns; if it has written to containers, or returns objects that hold tensors, all tensors that
        it has made, and a :class:`WrittenContainers`.
        """
        if not self.own:
            out = forward(*args, **kwargs)
            return out if isinstance(out, Tensor) else self._collected(out, [], [])
        tensors = _tensors((args, kwargs))
        real = partial(self._real, tensors)
        positional = [own if form is _GIVEN else _mapped(form, real) for form, own in zip(self.args, args, strict=True)]
        others = {key: kwargs[key] if form is _GIVEN else _mapped(form, real) for key, form in self.kwargs.items()}
        filled = [(_place(self.own[at], named), _filled(contents, real)) for at, named, contents in self.contents]
        present = [(place, contents) for _, place, contents in holders(self.own)]
        try:
            for place, contents in filled:
                write(place, contents)
            return self._collected(forward(*positional, **others), tensors, filled)
        finally:
            # Without this, the caller would find tensors of the private graph in its containers.
            for place, contents in present:
                write(place, contents)

    def _collected(self, out: Any, tensors: Sequence[Tensor], filled: Sequence[tuple[Any, Contents]]) -> Any:
        seen: dict[int, Any] = {}
        holding = holders(self.own, seen)
        keys = frozenset(seen)  # not the objects: torch's function is part of a cycle, and would keep them
        leaves, spec = tree_flatten(out, is_leaf=lambda value: id(value) in keys or kind_of(value) == "settings")
        inside = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and kind_of(leaf)]
        holding += holders(inside, seen)
        before = {id(place): contents for place, contents in filled}
        changed = [
            (value, place is not value, contents)
            for value, place, contents in holding
            if id(place) not in before or not unchanged(place, before[id(place)])
        ]
        if not changed and not inside:
            return out
        entered = {id(tensors[at]): at for at in self.inner}
        own = {id(value): at for at, value in enumerate(self.own)}
        made: dict[int, int] = {}
        outputs: list[Tensor] = []

        def output(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return _Stand("own", own[id(item)]) if id(item) in own else item
            if id(item) not in made:
                made[id(item)] = len(outputs)
                outputs.append(item)
            return _Stand("output", made[id(item)])

        def written(item: Any) -> Any:
            # What it was given there stays what it is: the caller's own tensor, with its place in the outer graph.
            return _Stand("input", entered[id(item)]) if id(item) in entered else output(item)

        returned = [output(leaf) for leaf in leaves]
        contents = [(output(value), named, _filled(held, written)) for value, named, held in changed]
        return outputs, WrittenContainers(returned, spec, contents)

    def _real(self, tensors: Any, item: Any) -> Any:
        if type(item) is not _Stand:
            return item
        return tensors[item.at] if item.kind == "input" else self.own[item.at]


class Handed:
    """One call of a block, with the arguments that its caller gave."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._copies: list[tuple[Tensor, Tensor, int]] = []
        self._tensors: list[Tensor] = []
        self.args, self.kwargs = args, kwargs
        """The arguments, with lists in place of containers."""
        values, seen = [*args, *kwargs.values()], dict[int, Any]()
        if not holders(values):
            self.containers = Containers(own=[], contents=[], args=[], kwargs={}, inner=frozenset())
            return

        holders_of = [holders([value], seen) for value in values]
        own: dict[int, tuple[int, Any]] = {}
        for value, _, _ in (holder for below in holders_of for holder in below):
            own.setdefault(id(value), (len(own), value))
        direct = [tensor for value in values if not _holds(value, own) for tensor in _tensors(value)]
        known = set(map(id, direct))
        # Numbers and keys, too: calls that differ in them may cost something else.
        packed = [
            list(_packed([value, *(contents for _, _, contents in below)], own, known)) if _holds(value, own) else value
            for value, below in zip(values, holders_of, strict=True)
        ]
        self.args, self.kwargs = tuple(packed[: len(args)]), dict(zip(kwargs, packed[len(args) :], strict=True))
        self._tensors = _tensors((self.args, self.kwargs))
        places = {id(tensor): at for at, tensor in reversed([*enumerate(self._tensors)])}

        def form(item: Any) -> Any:
            if id(item) in own:
                return _Stand("own", own[id(item)][0])
            return _Stand("input", places[id(item)]) if isinstance(item, Tensor) else item

        forms = [_mapped(value, form) if _holds(value, own) else _GIVEN for value in values]
        self.containers = Containers(
            own=[value for _, value in own.values()],
            contents=[
                (own[id(value)][0], place is not value, _filled(contents, form))
                for below in holders_of
                for value, place, contents in below
            ],
            args=forms[: len(args)],
            kwargs=dict(zip(kwargs, forms[len(args) :], strict=True)),
            inner=frozenset(places.values()) - {places[id(tensor)] for tensor in direct if tensor.requires_grad},
        )

    def bring(self, block: Block, device: torch.device) -> None:
        """Bring the tensors of the call to ``device``, see :func:`~lt_offload.model.location.brought`."""
        before = _tensors((self.args, self.kwargs))
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():  # tensors made there do not count what is written to them
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            self.args, self.kwargs = brought(block, self.args, self.kwargs, device)
        pairs = zip(before, _tensors((self.args, self.kwargs)), strict=True)
        self._copies = [(own, copied, version(copied)) for own, copied in pairs if copied is not own]

    def around(self, forward: Forward) -> Forward:
        """Return what runs the block's ``forward`` on arguments like :attr:`args` and :attr:`kwargs`.

        Any number of times; what it returns :meth:`returned` has to be given.
        """
        first, later = [self.containers], list[Containers]()

        def run(*args: Any, **kwargs: Any) -> Any:
            # The caller's own in the first run. It stays until the backward; they, and the tensors in them, need not.
            containers = first.pop() if first else later[0]
            if not later:
                later.append(containers.apart() if containers.own else containers)
            return containers.run(forward, args, kwargs)

        return run

    def returned(self, out: Any) -> Any:
        """Return what the block has returned, and write what it has written, with the tensors of ``out``."""
        for tensor, copied, known in self._copies:
            if version(copied) != known:  # in plain PyTorch there is one tensor, which the next block sees
                with torch.no_grad():
                    tensor.copy_(copied)
        if type(out) is not tuple or len(out) != 2 or type(out[1]) is not WrittenContainers:
            return out
        (outputs, written), own = out, self.containers.own

        def real(item: Any) -> Any:
            held = {"input": self._tensors, "output": outputs, "own": own}
            return held[item.kind][item.at] if type(item) is _Stand else item

        for value, attributes, contents in written.contents:
            write(_place(real(value), attributes), _filled(contents, real))
        return tree_unflatten([real(leaf) for leaf in written.leaves], written.spec)


def _place(value: Any, attributes: bool) -> Any:
    return attributes_of(value) if attributes else value


def _another(value: Any) -> Any:
    if kind_of(value) == "container":
        return copy.copy(value)
    cls: Any = type(value)
    made = SimpleNamespace.__new__(cls) if issubclass(cls, SimpleNamespace) else object.__new__(cls)
    write(attributes_of(made), read(attributes_of(value)))
    return made


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _packed(items: Sequence[Any], own: dict[int, Any], known: set[int]) -> Iterator[Any]:
    """Yield what stands for ``items``: each tensor once, and what describes the others."""
    for item in items:
        if isinstance(item, Tensor):
            if id(item) not in known:
                known.add(id(item))
                yield item
        elif type(item) is list and id(item) not in own or kind_of(item) == "tuple":
            yield from _packed([*item], own, known)
        elif id(item) not in own:
            yield item if isinstance(item, _ATOMS) else type(item).__qualname__


def _holds(value: Any, own: Collection[int]) -> bool:
    return id(value) in own or (kind_of(value) == "tuple" and any(_holds(item, own) for item in value))


def _filled(contents: Contents, real: Callable[[Any], Any]) -> Contents:
    """Return ``contents`` with ``real`` of every item; keys of a dictionary stay."""
    return (*contents[:-1], [_mapped(item, real) for item in contents[-1]]) if contents[-1] else contents


def _mapped(value: Any, real: Callable[[Any], Any]) -> Any:
    """Return ``real`` of a value; of a tuple the same with that of its items, itself if these are what they were."""
    # No function that calls itself from within another one: a cycle, which its tensors would have to wait for.
    if kind_of(value) != "tuple":
        return real(value)
    items = [_mapped(item, real) for item in tuple.__iter__(value)]
    if all(new is old for new, old in zip(items, tuple.__iter__(value), strict=True)):
        return value
    return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
