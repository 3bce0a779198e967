"""Whatever plain Python objects hold is written back after a run that only measures, or named."""

from __future__ import annotations

import collections
import functools
import io
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lt_offload.errors import UnsupportedError
from lt_offload.model import snapshot
from lt_offload.model.snapshot import untouched

COUNT = 1000
SEEN: list[int] = []


class Slotted:
    __slots__ = ("__hidden", "count", "later")

    def __init__(self) -> None:
        self.count, self.__hidden = 1000, 1000

    def advance(self) -> None:
        self.count += 1
        self.__hidden += 1
        self.later = 1

    def state(self) -> Any:
        return self.count, self.__hidden, hasattr(self, "later")


class Shared:
    count = 1000
    seen: list[int] = []  # noqa: RUF012

    def advance(self) -> None:
        type(self).count += 1
        type(self).fresh = 1  # type: ignore[attr-defined]
        self.seen.append(1)

    def state(self) -> Any:
        return Shared.count, list(Shared.seen), hasattr(Shared, "fresh")


class Global:
    def advance(self) -> None:
        step()

    def state(self) -> Any:
        return COUNT, list(SEEN)


def step() -> None:
    global COUNT
    COUNT += 1
    SEEN.append(COUNT)


class Closed:
    def __init__(self) -> None:
        count, seen = 1000, [1]

        def advance() -> None:
            nonlocal count
            count += 1
            seen.append(count)

        self.advance = functools.partial(advance)
        self.state = lambda: (count, list(seen))


class Holder:
    """Holds one thing, somewhere below."""

    def __init__(self, thing: Any, advance: Callable[[Any], Any], state: Callable[[Any], Any]) -> None:
        self.nested = types.SimpleNamespace(things=[{"it": (thing,)}])
        self._advance, self._state = advance, state

    @property
    def thing(self) -> Any:
        return self.nested.things[0]["it"][0]

    def advance(self) -> None:
        self._advance(self.thing)

    def state(self) -> Any:
        return self._state(self.thing)


def ordered() -> Any:
    return collections.OrderedDict([("b", 1), ("a", 2)])


def buffered() -> nn.Module:
    module = nn.Module()
    module.register_buffer("steps", torch.zeros(2))
    return module


THINGS: dict[str, Callable[[], Any]] = {
    "counter": lambda: Holder(types.SimpleNamespace(n=1000), lambda x: vars(x).update(n=x.n + 1), lambda x: x.n),
    "list": lambda: Holder([1000], lambda x: x.append(1), list),
    "rewritten list": lambda: Holder([1000], lambda x: x.__setitem__(0, 1001), list),
    "dict": lambda: Holder(ordered(), lambda x: x.move_to_end("b"), lambda x: list(x.items())),
    "default dict": lambda: Holder(collections.defaultdict(int), lambda x: x["a"], dict),
    "set": lambda: Holder({1}, lambda x: x.add(2), set),
    "deque": lambda: Holder(collections.deque([1], maxlen=1), lambda x: x.append(2), list),
    "bytes": lambda: Holder(bytearray(b"a"), lambda x: x.extend(b"b"), bytes),
    "array": lambda: Holder(np.zeros(3), lambda x: x.__iadd__(1), lambda x: x.tolist()),
    "tensor": lambda: Holder(torch.zeros(3), lambda x: x.add_(1), lambda x: x.tolist()),
    "tensor's data": lambda: Holder(torch.zeros(3), lambda x: setattr(x, "data", torch.ones(3)), lambda x: x.tolist()),
    "buffer": lambda: Holder(buffered(), lambda x: x.steps.add_(1), lambda x: x.steps.tolist()),
    "new buffer": lambda: Holder(buffered(), lambda x: setattr(x, "steps", torch.ones(2)), lambda x: x.steps.tolist()),
    "torch": lambda: Holder(torch.Generator(), lambda x: torch.rand(1, generator=x), lambda x: x.get_state().tolist()),
    "numpy": lambda: Holder(np.random.default_rng(0), lambda x: x.random(), lambda x: x.bit_generator.state),
    "numpy legacy": lambda: Holder(np.random.RandomState(0), lambda x: x.rand(), lambda x: x.get_state()[2]),
    "python": lambda: Holder(random.Random(0), lambda x: x.random(), lambda x: x.getstate()),
    "slots": Slotted,
    "class": Shared,
    "globals": Global,
    "closure": Closed,
}


@pytest.mark.parametrize("name", THINGS)
def test_whatever_changes_is_written_back(name: str) -> None:
    thing = THINGS[name]()
    before = thing.state()
    with untouched(thing=thing):
        thing.advance()
        assert thing.state() != before
    assert thing.state() == before


def watched(base: type, ran: list[str]) -> type:
    """Return a class below a built-in one that notes which of its methods run, in ``ran``."""

    def noting(name: str) -> Any:
        return lambda *args, **kwargs: ran.append(name) or getattr(base, name)(*args, **kwargs)

    of_classes = {"__new__", "__class__", "__init_subclass__", "__subclasshook__"}
    names = [name for name in dir(base) if callable(getattr(base, name)) and name not in of_classes]
    asked = property(lambda self: ran.append("__class__") or base)
    return type("Watched", (base,), {name: noting(name) for name in names} | {"__slots__": "kept", "__class__": asked})


def moved_to_end(held: Any) -> None:
    collections.OrderedDict.move_to_end(held, "b")


CHANGES: dict[str, tuple[type, Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "ordered": (collections.OrderedDict, {"b": 1, "a": 2}, moved_to_end, collections.OrderedDict.items),
    "dict": (dict, {"b": 1}, lambda x: dict.__setitem__(x, "b", 2), dict.items),
    "list": (list, [1], lambda x: list.append(x, 2), list.__iter__),
    "set": (set, [1], lambda x: set.add(x, 2), set.__iter__),
    "deque": (collections.deque, [1], lambda x: collections.deque.append(x, 2), collections.deque.__iter__),
    "bytes": (bytearray, b"a", lambda x: bytearray.extend(x, b"b"), bytearray.__iter__),
    "text": (io.StringIO, "ab", lambda x: io.StringIO.read(x, 1), lambda x: [io.StringIO.tell(x)]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_code_of_a_class_runs(name: str) -> None:
    base, content, change, read = CHANGES[name]
    ran: list[str] = []
    thing = watched(base, ran)(content)
    slot = vars(type(thing))["kept"]
    slot.__set__(thing, 1000)
    holder = types.SimpleNamespace(thing=thing)
    before = list(read(thing))
    ran.clear()
    with untouched(holder=holder):
        change(thing)
        slot.__set__(thing, 2000)
        assert list(read(thing)) != before
    assert ran == []
    assert list(read(thing)) == before
    assert slot.__get__(thing) == 1000


def counted() -> Any:
    yield from range(1000, 2000)


def looped() -> Any:
    for _ in range(1000, 2000):
        yield


ONE_WAY: dict[str, Callable[[], Any]] = {
    "generator": counted,
    "generator with a loop": looped,
    "count": lambda: itertools.count(1000),
    "list": lambda: iter([1, 2, 3]),
    "enumerate": lambda: enumerate(["a", "b"]),
    "zip": lambda: zip([1, 2], [3, 4], strict=True),
    "map": lambda: map(str, counted()),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
}


def advance(holder: Any) -> None:
    with untouched(holder=holder):
        holder.count += 1
        next(holder.source)


@pytest.mark.parametrize("name", ONE_WAY)
def test_iterators_that_are_advanced_are_named(name: str) -> None:
    holder = types.SimpleNamespace(source=ONE_WAY[name](), count=0)
    with pytest.raises(UnsupportedError, match=r"holder\.source.* changes.*on_train_batch_start"):
        advance(holder)
    assert holder.count == 0
    with untouched(holder=holder):
        pass


def test_weights_that_a_step_writes_to_are_named() -> None:
    module = nn.Linear(2, 2)
    holder = types.SimpleNamespace(model=module)
    with pytest.raises(UnsupportedError, match=r"holder\.model\.weight changes"), untouched(holder=holder):
        module.weight.detach().clamp_(0, 1)


def test_more_than_can_be_searched_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST", 100)
    holder = types.SimpleNamespace(near=[1], far=[[i] for i in range(200)])
    with pytest.warns(UserWarning, match=r"more than 100 objects at and below holder\.far"), untouched(holder=holder):
        holder.near.append(2)
    assert holder.near == [1]
