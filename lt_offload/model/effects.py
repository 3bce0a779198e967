"""What running a block changes beside its outputs, and what it depends on beside its inputs.

A block that runs twice, for its forward and again for its backward, must leave behind what one run leaves, and its
second run must see what the first one saw: buffers (running statistics), attributes of its modules (counters, lists),
the generators of Python, NumPy and its own, and the contexts around the call (``torch.autocast``). Torch's global
generators are the device's business.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch
from typing_extensions import override

from lt_offload.model import objects
from lt_offload.model.compiled import is_compiled
from lt_offload.model.objects import NOTHING, Contents, belongs_to_a_library, read, unchanged, write
from lt_offload.model.snapshot import version as _version

_INTERNAL = frozenset({"_parameters", "_buffers", "_modules", "forward", "_compiled_call_impl", "__getstate__"})
"""Attributes of ``nn.Module`` that a forward does not change, or that are looked at as a part of their own."""
_CONTAINERS = (list, dict, set)
_HOLDERS = (*_CONTAINERS, tuple)
_MISSING = object()
_Contents = tuple[tuple[Any, Contents], ...]
"""Containers, each with what it held."""


Owner = tuple[int, str]
"""An attribute: the identity of the dictionary that it is in, and its name."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a run has put a tensor of numbers, or a tuple with some."""

    owner: Owner
    holder: Any
    """A dictionary or list."""
    key: Any

    @property
    def value(self) -> Any:
        """What is there."""
        return objects.item_of(self.holder, self.key)

    def holds(self, value: object) -> bool:
        """Return whether ``value`` is still there."""
        with suppress(LookupError):
            return self.value is value
        return False

    def put(self, value: Any) -> None:
        """Put ``value`` there."""
        objects.set_item(self.holder, self.key, value)


class Effects:
    """The state of one block's modules that its runs may change.

    What a run does change is found by comparison: attributes and the versions of buffers in every run, generators and
    the contents of buffers (some operations write without a new version) in the first few, as that takes time. Whatever
    has changed once is taken to change in every run.
    """

    def __init__(self, module: nn.Module, *, watched: int = 3) -> None:
        self._parts: list[_Part] = []
        members = list(module.modules())
        for member in members:
            self._parts.append(_Attributes(member))
            self._parts += [_BufferPart(member._buffers, name) for name in member._buffers]
            tensors = [name for name, value in vars(member).items() if issubclass(type(value), Tensor)]
            self._parts += [_BufferPart(vars(member), name) for name in tensors]
        self._generators: list[_Part] = [_Python(), _NumPy()]
        held = [value for member in members for value in vars(member).values()]
        self._generators += [_Generator(value) for value in _below(held) if _is_generator(value)]
        self._mode = _Mode(members)
        self._left = watched
        self._seen: set[_Part] = set()
        self._graded: dict[Owner, bool] = {}

    @contextmanager
    def first_run(self) -> Iterator[Snapshot]:
        """Enclose the first of a block's runs; the snapshot that it yields is complete afterwards."""
        parts = [*self._parts, *self._generators]
        snapshot = Snapshot([(part, part.save()) for part in parts], self._graded)
        mode = self._mode.save()
        yield snapshot
        closely = self._left > 0
        changed = [(p, before) for p, before in snapshot.items if p in self._seen or p.differs(before, closely)]
        snapshot.items = [(self._mode, mode), *changed]
        self._seen |= {part for part, _ in changed}
        if closely:
            self._left -= 1
            if self._left == 0:
                self._generators = [part for part in self._generators if part in self._seen]


class Snapshot:
    """What a block's first run has changed, as it was before."""

    def __init__(self, items: list[tuple[_Part, Any]], graded: dict[Owner, bool]) -> None:
        self.items = items
        self.graded = graded
        """Whether the tensors that were found in an attribute, or in containers there, after the last run with a graph
        required grad."""

    def locations(self) -> list[Location]:
        """Return where the last run has put tensors of numbers that were not there."""
        return [location for part, before in self.items for location in part.locations(before)]

    @contextmanager
    def restored(self, *, graph: bool = False) -> Iterator[None]:
        """Enclose a run, perhaps with a graph, that sees the state as it was before; afterwards it is as it is now."""
        present = [(part, part.now()) for part, _ in self.items]
        for part, before in self.items:
            part.restore(before)
        try:
            yield
            if graph:
                graded: dict[Owner, bool] = {}
                for location in self.locations():
                    graded[location.owner] = graded.get(location.owner, False) or _requires_grad(location.value)
                self.graded.update(graded)
        finally:
            for part, now in present:
                part.restore(now)

    def undo(self) -> None:
        """Make the state what it was, for good."""
        for part, before in self.items:
            part.undo(before)


class _Part(ABC):
    """One piece of state."""

    @abstractmethod
    def save(self) -> Any:
        """Return the state, copied."""

    def now(self) -> Any:
        """Return the state, to be restored after a run that begins with another one."""
        return self.save()

    @abstractmethod
    def differs(self, before: Any, closely: bool) -> bool:
        """Return whether the state differs from ``before``; ``closely``: compare contents as well, which takes time."""

    @abstractmethod
    def restore(self, before: Any) -> None:
        """Make the state what it was."""

    def undo(self, before: Any) -> None:
        """Make the state what it was, in its own place."""
        self.restore(before)

    def locations(self, before: Any) -> Iterator[Location]:
        """Yield where tensors of numbers are that were not there before."""
        yield from ()


class _Mode(_Part):
    """Whether each module is in training mode: users may change it before the backward."""

    def __init__(self, members: list[nn.Module]) -> None:
        self._members = members

    @override
    def save(self) -> list[bool]:
        return [member.training for member in self._members]

    @override
    def differs(self, before: list[bool], closely: bool) -> bool:
        return before != self.save()

    @override
    def restore(self, before: list[bool]) -> None:
        for member, training in zip(self._members, before, strict=True):
            member.training = training


class _Attributes(_Part):
    """The attributes of a module: which objects they are, and what lists, dictionaries and sets among them hold."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @override
    def save(self) -> dict[str, tuple[Any, _Contents]]:
        return {
            name: (value, _contents(value) if issubclass(type(value), _HOLDERS) else ())
            for name, value in vars(self._module).items()
            if name not in _INTERNAL
        }

    @override
    def differs(self, before: dict[str, tuple[Any, _Contents]], closely: bool) -> bool:
        now = vars(self._module)
        if sum(name not in _INTERNAL for name in now) != len(before):
            return True
        return any(
            now.get(name, _MISSING) is not value or (held and not all(unchanged(*pair) for pair in held))
            for name, (value, held) in before.items()
        )

    @override
    def restore(self, before: dict[str, tuple[Any, _Contents]]) -> None:
        now = vars(self._module)
        for name in [name for name in now if name not in _INTERNAL and name not in before]:
            del now[name]
        for name, (value, held) in before.items():
            now[name] = value
            for pair in held:
                if not unchanged(*pair):
                    write(*pair)

    @override
    def locations(self, before: dict[str, tuple[Any, _Contents]]) -> Iterator[Location]:
        known = {id(value) for value, _ in before.values()}
        known |= {id(item) for _, held in before.values() for _, contents in held for item in contents[-1]}
        own = vars(self._module)
        for name, value in own.items():
            if name in _INTERNAL:
                continue
            if not issubclass(type(value), _CONTAINERS):
                if id(value) not in known and _has_numbers(value):
                    yield Location((id(own), name), own, name)
                continue
            for holder in _below([value]):
                for key, item in _entries(holder):
                    if id(item) not in known and _has_numbers(item):
                        yield Location((id(own), name), holder, key)


class _BufferPart(_Part):
    """A tensor of a module.

    A second run gets a clone: written in place, the present one would have another version, and the graph of the first
    run, which may have saved it, could not be used any more.
    """

    def __init__(self, holder: dict[str, Any], name: str) -> None:
        self._holder, self._name = holder, name

    @override
    def save(self) -> tuple[Tensor | None, int, Tensor | None]:
        buffer = self._holder.get(self._name)
        return (None, 0, None) if buffer is None else (buffer, _version(buffer), buffer.detach().clone())

    @override
    def now(self) -> tuple[Tensor | None, int, None]:
        return self._holder.get(self._name), 0, None

    @override
    def differs(self, before: tuple[Tensor | None, int, Tensor | None], closely: bool) -> bool:
        now, (known, version, content) = self._holder.get(self._name), before
        buffer: Tensor | None = now
        if buffer is None or content is None or buffer is not known:
            return buffer is not known
        if _version(buffer) != version:
            return True
        numbers = not (buffer.is_meta or type(buffer).__name__ == "FakeTensor")
        return closely and numbers and not torch.equal(buffer, content)

    @override
    def restore(self, before: tuple[Tensor | None, int, Tensor | None]) -> None:
        buffer, _, content = before
        self._holder[self._name] = buffer if content is None else content.clone()

    @override
    def locations(self, before: tuple[Tensor | None, int, Tensor | None]) -> Iterator[Location]:
        value = self._holder.get(self._name)
        if value is not before[0] and _has_numbers(value):
            yield Location((id(self._holder), self._name), self._holder, self._name)

    @override
    def undo(self, before: tuple[Tensor | None, int, Tensor | None]) -> None:
        buffer, _, content = before
        self._holder[self._name] = buffer
        if buffer is not None and content is not None:
            with torch.no_grad():
                buffer.copy_(content)


class _Generator(_Part):
    """A random generator that a module holds."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    @override
    def save(self) -> Any:
        held = self._generator
        if isinstance(held, torch.Generator):
            return held.get_state()
        if isinstance(held, random.Random):
            return held.getstate()
        return copy.deepcopy(held.bit_generator.state if hasattr(held, "bit_generator") else held.get_state())

    @override
    def differs(self, before: Any, closely: bool) -> bool:
        now = self.save()
        return not torch.equal(now, before) if isinstance(now, Tensor) else repr(now) != repr(before)

    @override
    def restore(self, before: Any) -> None:
        held = self._generator
        if isinstance(held, torch.Generator):
            held.set_state(before)
        elif isinstance(held, random.Random):
            held.setstate(before)
        elif hasattr(held, "bit_generator"):
            held.bit_generator.state = before
        else:
            held.set_state(before)


class _Python(_Part):
    """Python's global generator."""

    @override
    def save(self) -> Any:
        return random.getstate()

    @override
    def differs(self, before: Any, closely: bool) -> bool:
        return bool(random.getstate() != before)

    @override
    def restore(self, before: Any) -> None:
        random.setstate(before)


class _NumPy(_Part):
    """NumPy's global generator."""

    @override
    def save(self) -> Any:
        import numpy

        return numpy.random.get_state()

    @override
    def differs(self, before: Any, closely: bool) -> bool:
        now = self.save()
        return bool(now[2] != before[2] or (now[1] != before[1]).any() or now[3:] != before[3:])

    @override
    def restore(self, before: Any) -> None:
        import numpy

        numpy.random.set_state(before)


def _is_generator(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random)
    if issubclass(type(value), kinds):
        return True
    return numpy is not None and issubclass(type(value), (numpy.random.Generator, numpy.random.RandomState))


def _has_numbers(value: Any) -> bool:
    """Return whether ``value`` is a tensor that can require grad, or a plain tuple with one."""
    if issubclass(type(value), Tensor):
        return bool(value.is_floating_point())
    return type(value) is tuple and any(issubclass(type(item), Tensor) and item.is_floating_point() for item in value)


def _requires_grad(value: Any) -> bool:
    items = value if type(value) is tuple else [value]
    return any(issubclass(type(item), Tensor) and item.requires_grad for item in items)


def _entries(holder: Any) -> Iterable[tuple[Any, Any]]:
    """Return keys and items of a list or dictionary."""
    if issubclass(type(holder), dict):
        keys, values = read(holder)[0], read(holder)[-1]
        return zip(keys, values, strict=True)
    return enumerate(read(holder)[0]) if issubclass(type(holder), list) else ()


def _contents(value: Any) -> _Contents:
    """Return the containers at and below ``value``, each with what it holds; those of libraries are left alone."""
    held = read(value)
    if held is NOTHING:
        return () if type(value) is tuple or belongs_to_a_library(value) else ((value, held),)
    if any(issubclass(kind, _HOLDERS) for kind in {*map(type, held[-1])}):
        containers = [holder for holder in _below([value]) if issubclass(type(holder), _CONTAINERS)]
    else:
        containers = [value] if issubclass(type(value), _CONTAINERS) else []
    return tuple((holder, read(holder)) for holder in containers if not belongs_to_a_library(holder))


def _below(values: Iterable[Any]) -> Iterator[Any]:
    """Yield ``values`` and what containers and tuples among them hold, at any depth."""
    seen: dict[int, Any] = {}
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        yield value
        if issubclass(type(value), _HOLDERS) and id(value) not in seen:
            seen[id(value)] = value
            waiting += read(value)[-1]


class Ambient(NamedTuple):
    """The contexts around a call."""

    casts: tuple[tuple[str, bool, torch.dtype], ...]
    """Autocast per kind of device: whether it is on, and its dtype."""
    caches_casts: bool
    """Whether autocast casts a weight once, however often it is used: its gradients are then added up in the low
    precision, so that this is a matter of bits."""
    attention: tuple[bool, ...]
    """Which attention kernels may be used."""
    default_dtype: torch.dtype

    @property
    def autocasts(self) -> bool:
        """Whether operations choose their own precision."""
        return any(enabled for _, enabled, _ in self.casts)


def ambient() -> Ambient:
    """Return the contexts of this moment."""
    return Ambient(
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
        _attention_kernels(),
        torch.get_default_dtype(),
    )


@contextmanager
def within(contexts: Ambient) -> Iterator[None]:
    """Enclose a run of a block that shall see ``contexts``.

    Autocast keeps the casts of weights that it has made, until its outermost context ends. Here they end with the run:
    they are device memory that no plan knows, and weights change.
    """
    present = ambient()
    with ExitStack() as stack:
        for cast in contexts.casts:
            kind, enabled, dtype = cast
            if enabled or cast not in present.casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=contexts.caches_casts))
        if contexts.attention != present.attention:
            stack.callback(_choose_attention_kernels, present.attention)
            _choose_attention_kernels(contexts.attention)
        if contexts.default_dtype != present.default_dtype:
            stack.callback(torch.set_default_dtype, present.default_dtype)
            torch.set_default_dtype(contexts.default_dtype)
        if contexts.autocasts:
            stack.callback(torch.clear_autocast_cache)
        yield


def _attention_kernels() -> tuple[bool, ...]:
    cuda: Any = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()


def _choose_attention_kernels(enabled: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    choose = (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp)
    for function, value in zip(choose, enabled, strict=True):
        function(value)


_LIBRARIES = ("torch", "transformers", "peft", "lt_offload")
"""Whose own hooks may be called any number of times: they compute weights from others, cast, or count nothing."""


class InnerHooks:
    """The forward hooks and pre-hooks inside one block, which a second run of the block would call again.

    Those on the block itself are not among them: calls of the block are intercepted below them, so that they are called
    once, unless the block is compiled with its hooks.

    Args:
        name: of the block.
        module: the block.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        own = is_compiled(module)
        self._hooks: list[tuple[str, dict[int, Callable[..., Any]]]] = [
            (f"{name}.{path}" if path else name, hooks)
            for path, member in module.named_modules()
            if path or own
            for hooks in (member._forward_pre_hooks, member._forward_hooks)
        ]
        if self._hooks:
            self._hooks += [("every module", _torch._global_forward_pre_hooks)]
            self._hooks += [("every module", _torch._global_forward_hooks)]

    def find(self) -> str | None:
        """Return a hook of the user's own and where it is, as errors name it; None if there is none."""
        return next(self._of_users(), None)

    def _of_users(self) -> Iterator[str]:
        for path, hooks in self._hooks:
            if hooks:
                for hook in hooks.values():
                    if _home(hook).partition(".")[0] not in _LIBRARIES:
                        yield f"forward hook {_title(hook)} on {path}, in block {self._name}"


def _plain(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _home(hook: Any) -> str:
    """Return the module that a hook's code is from."""
    hook = _plain(hook)
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(getattr(named, "__module__", None) or "")


def _title(hook: Any) -> str:
    hook = _plain(hook)
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
