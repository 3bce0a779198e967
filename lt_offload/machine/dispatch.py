"""Modes of torch that watch what runs, so that what runs is the same as without them.

A dispatch mode sees every operation of eager torch. Compiled code allocates by functions of its own, which no mode
sees, and Dynamo would trace a mode's Python handler as if it were part of the model.

A function mode sees calls. While there is one, ``torch.overrides.has_torch_function`` is true of everything, and
modules that ask it take another way: ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` leave torch's fast
path, whose last bits differ. So a mode that only watches is left out of the answer. The question is a builtin function
that nothing can be told, and modules look it up where it is each time: while such a mode is in place, that is the one
below. Code that has the function under a name of its own (``torch.nn.functional``) hands the call to the mode, which
runs it without being in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lt_offload.compat.torch import (
    ASKING,
    ASKING_NODES,
    AUTOCAST_ON_CPU,
    FAST_PATHS,
    TorchDispatchMode,
    allocate_compiled_with,
    before_dispatch,
    compiled_allocations,
    dispatch_modes,
    exclude_key,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    schema_of,
    skip_in_dynamo,
)


def writes(func: Any, position: int, positional: int, kwargs: dict[str, Any]) -> bool:
    """Return whether operation ``func`` writes its argument number ``position``, counted over args and kwargs."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return False
    if position < positional:
        argument = schema.arguments[position]
    else:
        name = list(kwargs)[position - positional]
        argument = next(a for a in schema.arguments if a.name == name)
    return argument.alias_info is not None and argument.alias_info.is_write


_PARTICULAR = frozenset(map(id, (*FAST_PATHS, *ASKING)))
"""Their identities: an operation's own hash would run Python code at every look-up."""


class _Made(threading.local):
    result: Any = None
    """The last operation's, if a node that asks for modes comes of it, once the modes are left."""


_made = _Made()


def needs_care(func: Any) -> bool:
    """Return whether :func:`called_with_care` has to run the operation ``func`` in a dispatch mode."""
    return id(func) in _PARTICULAR or _made.result is not None


def called_with_care(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run, in a dispatch mode, an operation that gives other numbers where there is one, as without the mode.

    Some call others that autocast has to see; on CUDA modules leave those out where autocast is on. Of others the
    gradient is computed in another way: modes are taken away while their nodes run.
    """
    if _made.result is not None:
        node, _made.result = _made.result.grad_fn, None
        if node is not None and node.name().startswith(ASKING_NODES):
            _run_without_modes(node)
    if func in ASKING:
        _made.result = func(*args, **kwargs)
        return _made.result
    if func not in FAST_PATHS:
        return func(*args, **kwargs)
    with before_dispatch():
        autocast = torch.is_autocast_enabled("cpu")
    if not autocast:
        return func(*args, **kwargs)
    with exclude_key(AUTOCAST_ON_CPU, False):
        return func(*args, **kwargs)


def _run_without_modes(node: Any) -> None:
    aside = ExitStack()
    node.register_prehook(lambda _: aside.enter_context(DISPATCH_MODES.cut(0)))
    node.register_hook(lambda *_: aside.close())


class _Standing(threading.local):
    count = 1


_repeats = _Standing()


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """Let what runs within the context stand for so many runs of the same, one after the other, in a count of work."""
    before, _repeats.count = _repeats.count, _repeats.count * times
    try:
        yield
    finally:
        _repeats.count = before


def repeats() -> int:
    """Return how many runs what runs now stands for."""
    return _repeats.count


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose handler ``torch.compile`` is kept out of, at no cost.

    torch keeps it out by wrapping the handler in ``torch._dynamo.disable``, which takes as long as the dispatch itself.
    Here the handler's code object is marked instead, as ``torch._dynamo`` marks its own.
    """

    beside_compiled = True
    """True: compiled code runs as such under it. Uncompiled it would give other numbers."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        handler = getattr(cls.__torch_dispatch__, "__wrapped__", None)
        if handler is not None:
            skip_in_dynamo(handler)
            cls.__torch_dispatch__ = handler  # type: ignore[method-assign]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether compiled code runs as such."""
        return cls.beside_compiled


def _empty_strided_on(device: str) -> Callable[..., Tensor]:
    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty_strided


_SHOWN = {device: _empty_strided_on(device) for device in compiled_allocations}
_watchers = 0


def show_buffers() -> Callable[[], None]:
    """Let dispatch modes see the buffers that compiled code makes for itself; return a function that ends it.

    Generated code calls allocation functions of its own, which no dispatch mode sees: those are replaced.
    """
    global _watchers
    _watchers += 1
    if _watchers == 1:
        allocate_compiled_with(_SHOWN)

    def undo() -> None:
        global _watchers
        _watchers -= 1
        if _watchers == 0:
            allocate_compiled_with(compiled_allocations)

    return undo


class OperationLog(OperationMode):
    """Notes which operations are called, in their order; what only shows a tensor in another way does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        if not func.is_view and func.namespace != "prim":  # fake tensors are asked for their device all the time
            self.called.append(str(func))
        return func(*args, **(kwargs or {}))


# -- function modes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModeStack:
    """A thread's stack of modes of one kind."""

    size: Callable[[], int]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def lift(self, mode: object) -> int | None:
        """Take ``mode`` out; return how many modes were above it, None if it was not there."""
        above: list[Any] = []
        lifted = False
        while not lifted and self.size():
            top = self.pop()
            lifted = top is mode
            if not lifted:
                above.append(top)
        for other in reversed(above):
            self.push(other)
        return len(above) if lifted else None

    @contextmanager
    def cut(self, height: int) -> Iterator[None]:
        """Take out what lies above the lowest ``height`` modes; the context ends with it on top again."""
        above = [self.pop() for _ in range(self.size() - height)]
        try:
            yield
        finally:
            for mode in reversed(above):
                self.push(mode)

    def insert(self, mode: object, above: int) -> None:
        """Put ``mode`` back below the ``above`` modes on top."""
        others = [self.pop() for _ in range(above)] if above else []
        self.push(mode)
        for other in reversed(others):
            self.push(other)


# Not ``with mode``: that also tells torch.compile that modes are in use, which they are not inside compiled blocks.
DISPATCH_MODES = ModeStack(dispatch_modes, pop_dispatch_mode, push_dispatch_mode)
FUNCTION_MODES = ModeStack(function_modes, pop_function_mode, push_function_mode)


class WatchingMode(TorchFunctionMode):
    """A function mode that changes nothing, which ``torch.overrides.has_torch_function`` does not count."""

    def place(self, above: int = 0) -> None:
        """Begin to see calls, below the ``above`` modes on top."""
        FUNCTION_MODES.insert(self, above)
        _count(1)

    def lift(self) -> int | None:
        """End it; return how many modes were above this one, None if it was not in place."""
        above = FUNCTION_MODES.lift(self)
        if above is not None:
            _count(-1)
        return above


_OVERRIDES, _ASKED = vars(torch.overrides), "has_torch_function"
_original: Callable[[Any], bool] = _OVERRIDES[_ASKED]
_changing = threading.Lock()
_placed = 0
"""Watching modes that are in place, in all threads."""


def _count(change: int) -> None:
    global _original, _placed
    with _changing:
        _placed += change
        if _placed and _OVERRIDES[_ASKED] is not _has_torch_function:
            _original, _OVERRIDES[_ASKED] = _OVERRIDES[_ASKED], _has_torch_function
        # Who has put another function in place of ours keeps it, and calls ours, which answers as the original.
        elif not _placed and _OVERRIDES[_ASKED] is _has_torch_function:
            _OVERRIDES[_ASKED] = _original


def _has_torch_function(relevant_args: Any) -> bool:
    """Answer without the watching modes of this thread."""
    modes = [FUNCTION_MODES.pop() for _ in range(FUNCTION_MODES.size())]
    others = [mode for mode in modes if not isinstance(mode, WatchingMode)]
    for mode in reversed(others):
        FUNCTION_MODES.push(mode)
    try:
        return _original(relevant_args)
    finally:
        for _ in others:
            FUNCTION_MODES.pop()
        for mode in reversed(modes):
            FUNCTION_MODES.push(mode)
