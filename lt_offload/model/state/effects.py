"""Effects of a block's run beside its outputs, and what it depends on beside its inputs.

A block that runs twice, for its forward and again for its backward, must leave behind what one run leaves, and its
second run must see what the first one saw, whoever has changed it since: buffers (running statistics), attributes of
its modules (counters, lists, ``Dropout.p``) with what containers and objects of settings among them hold, and the
generators of Python, NumPy and its own. Torch's global generators are the device's business, the contexts around the
call (``torch.autocast``) that of ``contexts.py``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import HOOKS, MODULE_PARTS, address_of, buffers_of
from lt_offload.model.objects import Contents, built_in, holders, kind_of, read, same, unchanged, write
from lt_offload.model.snapshot import version as _version
from lt_offload.model.state.generators import GLOBAL, is_generator, same_state, set_state, state_of

_INTERNAL = MODULE_PARTS | {"forward", "__getstate__"}
"""Attributes of ``nn.Module`` that a forward does not change, or that are looked at as a part of their own."""
_BOOKKEEPING = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
_BOOKKEEPING -= HOOKS
"""Dictionaries of ``nn.Module`` that no run depends on."""
_Contents = list[tuple[Any, Contents]]
"""Containers and dictionaries of objects, each with what it held."""


_Clones = dict[int, Tensor]
"""By identity of a buffer: its clone, which all places share that the buffer is in."""
Owner = tuple[int, str]
"""An attribute: the identity of the dictionary that it is in, and its name."""


@dataclass(frozen=True, slots=True)
class Location:
    """A place where a run has put a tensor of numbers, or a tuple with some."""

    owner: Owner
    holder: Any
    """A dictionary or list."""
    key: Any

    @property
    def value(self) -> Any:
        """The tensor, or the tuple with some, that is there."""
        return built_in(self.holder).__getitem__(self.holder, self.key)

    def holds(self, value: object) -> bool:
        """Return whether ``value`` is still there."""
        with suppress(LookupError):
            return self.value is value
        return False

    def put(self, value: Any) -> None:
        """Put ``value`` there."""
        built_in(self.holder).__setitem__(self.holder, self.key, value)


class Effects:
    """The state of one block's modules that its runs may change.

    Changes are found by comparison: attributes and the versions of buffers in every run, generators and
    the contents of buffers (some operations write without a new version) in the first few, as that takes time. A part
    that has changed once is taken to change in every run.
    """

    def __init__(self, module: nn.Module, *, watched: int = 3) -> None:
        self._parts: list[_Part] = []
        members = list(module.modules())
        # Before the tensors: it puts attributes back as objects, and parts for the tensors among them put clones in
        # their place.
        self._parts.append(_Attributes(members))
        for path, member in module.named_modules():
            tensors = [name for name, value in vars(member).items() if issubclass(type(value), Tensor)]
            for holder, names in ((buffers_of(member), list(buffers_of(member))), (vars(member), tensors)):
                self._parts += [_BufferPart(holder, name, f"{path}.{name}" if path else name) for name in names]
        held = [value for member in members for value in vars(member).values()]
        own = (value for value in _below(held) if is_generator(value))
        self._generators: list[_Part] = [_Generator(generator) for generator in (*GLOBAL, *own)]
        self._left = watched
        self._seen: set[_Part] = set()
        self._graded: dict[Owner, bool] = {}

    def untouched(self) -> AbstractContextManager[None]:
        """Enclose runs that leave no trace: they see what there is now, with copies of tensors."""
        return _restored([(part, part.save()) for part in (*self._parts, *self._generators)])

    @contextmanager
    def first_run(self) -> Iterator[Snapshot]:
        """Enclose the first of a block's runs; the snapshot that it yields is complete afterwards."""
        parts = [*self._parts, *self._generators]
        snapshot = Snapshot([(part, part.save()) for part in parts], self._graded)
        snapshot.copied_bytes = sum(part.copied_bytes(before) for part, before in snapshot.items)
        yield snapshot
        closely = self._left > 0
        changed: list[tuple[_Part, Any]] = []
        untouched: list[tuple[_Part, Any]] = []
        for part, before in snapshot.items:
            if part in self._seen or part.differs(before, closely):
                changed.append((part, before))
            elif part not in self._generators:  # what draws nothing does not depend on what others draw
                untouched.append((part, before))
        snapshot.items = changed
        snapshot.rest = Rest([(part, part.thin(before)) for part, before in untouched])
        self._seen |= {part for part, _ in changed}
        if closely:
            self._left -= 1
            if self._left == 0:
                self._generators = [part for part in self._generators if part in self._seen]


class Rest:
    """State that a block's first run has seen and left as it was; others may change it before a second run."""

    def __init__(self, items: list[tuple[_Part, Any]]) -> None:
        self._items = items

    def rewritten(self) -> str | None:
        """Return the name of a buffer that was written to since: what it held is gone."""
        return next((part.name for part, before in self._items if part.rewritten(before)), None)

    def restored(self) -> AbstractContextManager[None]:
        """Enclose another run, that sees the state as it was then; afterwards it is as it is now."""
        changed = [(part, before) for part, before in self._items if part.differs(before, False)]
        return _restored(changed) if changed else nullcontext()


class Snapshot:
    """State that a block's first run has changed, as it was before."""

    def __init__(self, items: list[tuple[_Part, Any]], graded: dict[Owner, bool]) -> None:
        self.items = items
        self.rest = Rest([])
        """The state that it has not changed."""
        self.graded = graded
        """By attribute: whether tensors that the last run with a graph has put there, or in containers there, required
        grad."""
        self.copied_bytes = 0
        """Bytes of copies of buffers, within the first run."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are held until the second run: copies, and what stood where the run put others of that size."""
        put = [value for location in self.locations() for value in _tensors(location.value)]
        replaced = {address_of(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in put}
        return sum(part.copied_bytes(before) for part, before in self.items) + sum(replaced.values())

    @property
    def changed(self) -> bool:
        """True if the run has changed anything."""
        return bool(self.items)

    def locations(self) -> list[Location]:
        """Return where the last run has put tensors of numbers that were not there."""
        return [location for part, before in self.items for location in part.locations(before)]

    @contextmanager
    def restored(self, *, graph: bool = False) -> Iterator[None]:
        """Enclose a run, perhaps with a graph, that sees the state as it was before; afterwards it is as it is now."""
        with self.rest.restored(), _restored(self.items) if self.items else nullcontext():
            yield
            if graph:
                graded: dict[Owner, bool] = {}
                for location in self.locations():
                    requires = any(tensor.requires_grad for tensor in _tensors(location.value))
                    graded[location.owner] = graded.get(location.owner, False) or requires
                self.graded.update(graded)


@contextmanager
def _restored(items: Iterable[tuple[_Part, Any]]) -> Iterator[None]:
    items, clones = list(items), _Clones()
    # Without copies, so that the very objects come back: a graph may have saved them.
    present = [(part, part.save(copies=False)) for part, _ in items]
    # A run may write a buffer by another reference, too, where no clone takes its place.
    reached = [held for part, before in items if (held := part.reached(before)) is not None]
    for part, before in items:
        part.restore(before, clones)
    try:
        yield
    finally:
        for part, now in present:
            part.restore(now, _Clones())
        for tensor, version, content in reached:
            if _version(tensor) != version:
                tensor.data.copy_(content)


class _Part:
    name = ""

    def save(self, *, copies: bool = True) -> Any:
        """Return the state; without ``copies`` of tensors it can be put back, and what is written to them stays."""
        raise NotImplementedError

    def copied_bytes(self, before: Any) -> int:
        """Return the device memory that copies in a saved state take."""
        return 0

    def thin(self, before: Any) -> Any:
        """Return what tells later whether somebody has changed the state since, and takes no device memory."""
        return before

    def rewritten(self, before: Any) -> bool:
        """Return whether the state was changed since in a way that cannot be undone."""
        return False

    def differs(self, before: Any, closely: bool) -> bool:
        """Return whether the state differs from ``before``; ``closely``: compare contents as well, which takes time."""
        raise NotImplementedError

    def reached(self, before: Any) -> tuple[Tensor, int, Tensor] | None:
        """Return the present tensor, if the state is one, with its version and content."""
        return None

    def restore(self, before: Any, clones: _Clones) -> None:
        """Make the state what it was."""
        raise NotImplementedError

    def locations(self, before: Any) -> Iterator[Location]:
        """Yield where tensors of numbers are that were not there before."""
        yield from ()


_PLAIN_DICTS = (dict, OrderedDict)


class _SavedAttributes:
    """The attributes of modules and the contents of what they hold, as they were."""

    def __init__(self, modules: list[dict[str, Any]]) -> None:
        self.own = [_own(now) for now in modules]
        self.contents = _contents(value for own in self.own for name, value in own.items() if name not in _BOOKKEEPING)
        held = [place for place, _ in self.contents]
        self._dicts = [*modules, *(place for place in held if type(place) in _PLAIN_DICTS)]
        self._lists = [place for place in held if type(place) is list]
        self._others = [pair for pair in self.contents if type(pair[0]) not in (*_PLAIN_DICTS, list)]
        others = (value for _, contents in self._others for value in contents[-1])
        self.holds_tensors = any(_tensors(value) for value in chain(self._all(), others))
        # Not the objects: those that count are held above, and others may refer to whoever has this.
        self._sizes, self._objects = self._found()

    def _all(self) -> Iterator[Any]:
        """Return the keys, values and items of all dictionaries and lists, keys in the dictionary's own order."""
        return chain.from_iterable(chain(self._dicts, map(dict.values, self._dicts), self._lists))

    def _found(self) -> tuple[list[int], list[int]]:
        """Return sizes and contents of all dictionaries and lists by identity; in C, as there are a hundred a block."""
        return [*map(len, self._dicts), *map(len, self._lists)], [*map(id, self._all())]

    def unchanged(self) -> bool:
        """Return whether the very same objects are there now, under the same names."""
        return (self._sizes, self._objects) == self._found() and all(unchanged(*pair) for pair in self._others)


class _Attributes(_Part):
    """The attributes of modules: which objects they are, and what containers and objects of settings below hold."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = [vars(module) for module in modules]
        self._last: _SavedAttributes | None = None
        """As they were the last time, if that keeps no tensor alive."""

    def save(self, *, copies: bool = True) -> _SavedAttributes:
        if self._last is not None and self._last.unchanged():
            return self._last
        saved = _SavedAttributes(self._modules)
        self._last = None if saved.holds_tensors else saved
        return saved

    def differs(self, before: _SavedAttributes, closely: bool) -> bool:
        if before.unchanged():
            return False
        # Names may be equal without being the same, and there are attributes that no run changes.
        pairs = zip(self._modules, before.own, strict=True)
        own = all(_same(_own(now), known) for now, known in pairs)
        return not (own and all(unchanged(*pair) for pair in before.contents))

    def restore(self, before: _SavedAttributes, clones: _Clones) -> None:
        for now, own in zip(self._modules, before.own, strict=True):
            for name in [name for name in now if name not in _INTERNAL and name not in own]:
                del now[name]
            now.update(own)
        for pair in before.contents:
            if not unchanged(*pair):
                write(*pair)

    def locations(self, before: _SavedAttributes) -> Iterator[Location]:
        known = {id(value) for own in before.own for value in own.values()}
        known |= {id(item) for _, contents in before.contents for item in contents[-1]}
        for now in self._modules:
            for name, value in _own(now).items():
                if id(value) not in known and _has_numbers(value):
                    yield Location((id(now), name), now, name)
                for holder, _ in _contents([value]):
                    for key, item in _entries(holder):
                        if id(item) not in known and _has_numbers(item):
                            yield Location((id(now), name), holder, key)


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _INTERNAL}


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return same(now.values(), before.values()) and now.keys() == before.keys()


class _BufferPart(_Part):
    """A tensor of a module.

    A second run gets a clone: written in place, the present one would have another version, and the graph of the first
    run, which may have saved it, could not be used any more.
    """

    def __init__(self, holder: dict[str, Any], name: str, path: str) -> None:
        self._holder, self._name = holder, name
        self.name = path

    def save(self, *, copies: bool = True) -> tuple[Tensor | None, int, Tensor | None]:
        buffer = self._holder.get(self._name)
        if buffer is None:
            return None, 0, None
        return buffer, _version(buffer), buffer.detach().clone() if copies else None

    def copied_bytes(self, before: tuple[Tensor | None, int, Tensor | None]) -> int:
        return 0 if before[2] is None else before[2].nbytes

    def thin(self, before: tuple[Tensor | None, int, Tensor | None]) -> tuple[Tensor | None, int, None]:
        return before[0], before[1], None

    def rewritten(self, before: tuple[Tensor | None, int, None]) -> bool:
        return before[0] is not None and _version(before[0]) != before[1]

    def differs(self, before: tuple[Tensor | None, int, Tensor | None], closely: bool) -> bool:
        now, (known, version, content) = self._holder.get(self._name), before
        buffer: Tensor | None = now
        if buffer is None or content is None or buffer is not known:
            return buffer is not known
        if _version(buffer) != version:
            return True
        numbers = not (buffer.is_meta or type(buffer).__name__ == "FakeTensor")
        return closely and numbers and not torch.equal(buffer, content)

    def reached(self, before: tuple[Tensor | None, int, Tensor | None]) -> tuple[Tensor, int, Tensor] | None:
        buffer: Tensor | None = self._holder.get(self._name)
        if buffer is None:
            return None
        known, version, content = before
        if content is None or buffer is not known or _version(buffer) != version:
            content = buffer.detach().clone()
        return buffer, _version(buffer), content

    def restore(self, before: tuple[Tensor | None, int, Tensor | None], clones: _Clones) -> None:
        buffer, _, content = before
        if content is not None:
            if id(buffer) not in clones:
                clones[id(buffer)] = content.clone()
            buffer = clones[id(buffer)]
        self._holder[self._name] = buffer

    def locations(self, before: tuple[Tensor | None, int, Tensor | None]) -> Iterator[Location]:
        value = self._holder.get(self._name)
        if value is not before[0] and _has_numbers(value):
            yield Location((id(self._holder), self._name), self._holder, self._name)


class _Generator(_Part):
    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def save(self, *, copies: bool = True) -> Any:
        return state_of(self._generator)

    def differs(self, before: Any, closely: bool) -> bool:
        return not same_state(self.save(), before)

    def restore(self, before: Any, clones: _Clones) -> None:
        set_state(self._generator, before)


def _has_numbers(value: Any) -> bool:
    """Return whether ``value`` is a tensor that can require grad, or a plain tuple with one."""
    return any(tensor.is_floating_point() for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors that ``value`` is, or those in a plain tuple."""
    items = value if type(value) is tuple else [value]
    return [item for item in items if issubclass(type(item), Tensor)]


def _entries(holder: Any) -> Iterable[tuple[Any, Any]]:
    """Return keys and items of a dictionary, list or deque."""
    if issubclass(type(holder), dict):
        keys, values = read(holder)[0], read(holder)[-1]
        return zip(keys, values, strict=True)
    return enumerate(read(holder)[0]) if issubclass(type(holder), (list, deque)) else ()


def _contents(values: Iterable[Any]) -> _Contents:
    return [(holder, contents) for _, holder, contents in holders(values)]


def _below(values: Iterable[Any]) -> Iterator[Any]:
    seen: dict[int, Any] = {}
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        yield value
        if kind_of(value) in ("container", "tuple") and id(value) not in seen:
            seen[id(value)] = value
            waiting += read(value)[-1]
