"""Whatever plain Python objects hold is written back after a run that only measures, or named."""

from __future__ import annotations

import collections
import itertools
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lt_offload
from lt_offload.errors import UnsupportedError
from lt_offload.model import snapshot
from lt_offload.model.snapshot import untouched
from tests.support import models


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
    "array": lambda: Holder(np.zeros(3), lambda x: x.__iadd__(1), lambda x: x.tolist()),
    "tensor": lambda: Holder(torch.zeros(3), lambda x: x.add_(1), lambda x: x.tolist()),
    "tensor's data": lambda: Holder(torch.zeros(3), lambda x: setattr(x, "data", torch.ones(3)), lambda x: x.tolist()),
    "buffer": lambda: Holder(buffered(), lambda x: x.steps.add_(1), lambda x: x.steps.tolist()),
    "new buffer": lambda: Holder(buffered(), lambda x: setattr(x, "steps", torch.ones(2)), lambda x: x.steps.tolist()),
    "torch": lambda: Holder(torch.Generator(), lambda x: torch.rand(1, generator=x), lambda x: x.get_state().tolist()),
    "numpy": lambda: Holder(np.random.default_rng(0), lambda x: x.random(), lambda x: x.bit_generator.state),
    "numpy legacy": lambda: Holder(np.random.RandomState(0), lambda x: x.rand(), lambda x: x.get_state()[2]),
    "python": lambda: Holder(random.Random(0), lambda x: x.random(), lambda x: x.getstate()),
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
    return type("Watched", (base,), {name: noting(name) for name in names} | {"__class__": asked})


def moved_to_end(held: Any) -> None:
    collections.OrderedDict.move_to_end(held, "b")


CHANGES: dict[str, tuple[type, Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "ordered": (collections.OrderedDict, {"b": 1, "a": 2}, moved_to_end, collections.OrderedDict.items),
    "dict": (dict, {"b": 1}, lambda x: dict.__setitem__(x, "b", 2), dict.items),
    "list": (list, [1], lambda x: list.append(x, 2), list.__iter__),
    "set": (set, [1], lambda x: set.add(x, 2), set.__iter__),
    "deque": (collections.deque, [1], lambda x: collections.deque.append(x, 2), collections.deque.__iter__),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_code_of_a_class_runs(name: str) -> None:
    base, content, change, read = CHANGES[name]
    ran: list[str] = []
    thing = watched(base, ran)(content)
    holder = types.SimpleNamespace(thing=thing)
    before = list(read(thing))
    ran.clear()
    with untouched(holder=holder):
        change(thing)
        assert list(read(thing)) != before
    assert ran == []
    assert list(read(thing)) == before


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


def test_files_that_are_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("a\nb\nc\n")
    with path.open() as file:
        holder = types.SimpleNamespace(file=file)
        with untouched(holder=holder):
            pass
        with pytest.raises(UnsupportedError, match=r"holder\.file changes"), untouched(holder=holder):
            file.readline()


def test_weights_that_a_step_writes_to_are_named() -> None:
    module = nn.Linear(2, 2)
    holder = types.SimpleNamespace(model=module)
    with pytest.raises(UnsupportedError, match=r"holder\.model\.weight changes"), untouched(holder=holder):
        module.weight.detach().clamp_(0, 1)


def test_large_tensors_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LARGEST", 8)
    holder = types.SimpleNamespace(big=torch.zeros(3))
    with pytest.raises(UnsupportedError, match=r"holder\.big changes"), untouched(holder=holder):
        holder.big.add_(1)
    with untouched(holder=holder):
        holder.big.sum()


def test_an_error_in_the_run_comes_first() -> None:
    holder = types.SimpleNamespace(source=iter([1, 2]), count=0)
    next(holder.source)
    next(holder.source)
    with pytest.raises(StopIteration) as caught:
        advance(holder)
    assert "holder.source changes" in caught.value.__notes__[0]
    assert holder.count == 0


class Counting(nn.Module):
    """Stands where a layer's norm was: counts and draws from every generator there is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls, self.seen = inner, 0, {"shapes": [(0,)]}
        self.own = torch.Generator().manual_seed(3), random.Random(3), np.random.default_rng(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen["shapes"].append(tuple(x.shape))
        torch.rand((), generator=self.own[0])
        noise = self.own[1].random() + self.own[2].random() + random.random() + np.random.random()  # noqa: NPY002
        return self.inner(x) + torch.rand(()) * noise * 1e-3

    def state(self) -> Any:
        torch_state, python, numpy = self.own
        return self.calls, self.seen, torch_state.get_state().tolist(), python.getstate(), numpy.bit_generator.state


def generators() -> Any:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest), torch.random.get_rng_state().tolist()


def counting() -> Any:
    model = models.build("llama", layers=2)
    layer = model.model.layers[0]
    layer.input_layernorm = Counting(layer.input_layernorm)
    return model, layer.input_layernorm


def test_profiling_a_model_leaves_no_trace() -> None:
    model, counter = counting()
    optimizer = torch.optim.AdamW(model.parameters())
    before = counter.state(), generators()
    lt_offload.profile(model, models.batch(model), optimizer=optimizer)
    assert (counter.state(), generators()) == before


def test_a_plain_loop_begins_as_without_offloading() -> None:
    model, counter = counting()
    optimizer = torch.optim.AdamW(model.parameters())
    before = counter.state(), generators()
    with lt_offload.offloaded(model, optimizer, models.batch(model), memory="100MB", accelerator="cpu"):
        assert (counter.state(), generators()) == before


class Objects(collections.OrderedDict):  # type: ignore[type-arg]
    """As transformers' table of activations: holds classes, and gives objects of them."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def test_registries_of_libraries_are_not_asked() -> None:
    from transformers import MODEL_MAPPING

    modules, registry = set(sys.modules), Objects(gelu=nn.GELU)
    with untouched(mapping=MODEL_MAPPING, registry=registry):
        pass
    assert set(sys.modules) == modules
    assert dict.get(registry, "gelu") is nn.GELU
