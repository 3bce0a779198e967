"""Blocks under ``torch.compile``: which uses of it can be trained, and where a call enters a compiled block.

``Module.compile()`` compiles the call, hooks included. A stand-in for a block takes the place of the compiled call and
calls it in turn, so that nothing of the stand-in becomes part of the compiled code.

Attributes that modules have for the time being are none of a copy's: ``copy.deepcopy(model)`` in a callback, an average
of weights or a pickled module are what plain PyTorch would make of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from lt_offload.compat.lightning import compiler_context
from lt_offload.compat.torch import COMPILED_CALL, PLAIN_CALL, WRAPPED_MODULE, compiled_call_of, plain_call_of
from lt_offload.errors import ModelError
from lt_offload.model.blocks import find_blocks

Forward = Callable[..., Any]

KERNELS = "lt_offload_kernels"
"""The attribute of a ``forward`` that computes with other kernels than the module's own code: a description."""


def kernels_of(model: nn.Module) -> str:
    """Return the description of the kernels that modules of ``model`` have instead of their own code, else ``""``."""
    described = (getattr(vars(module).get("forward"), KERNELS, "") for module in model.modules())
    return next(filter(None, described), "")


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of ``module`` itself, not of a part of it, run compiled code."""
    return compiled_call_of(module) is not None


def obstacle(model: nn.Module, blocks: str | None = None) -> str | None:
    """Return what is compiled otherwise than block by block with code that is always the same."""
    compiled = {
        module: name or type(model).__name__
        for name, module in model.named_modules()
        if is_compiled(module) or hasattr(module, WRAPPED_MODULE) or compiler_context(module) is not None  # Lightning's
    }
    if not compiled:
        return None
    try:
        known = {block.module for block in find_blocks(model, blocks).blocks}
    except ModelError:
        known = set()
    for module, name in compiled.items():
        if not is_compiled(module) or module not in known:
            return f"torch.compile of {name}, which is no block by itself"
        code: Any = called(module)
        config = code.get_compiler_config()
        if config is None:
            return f"torch.compile of {name} with a backend other than inductor"
        # CUDA graphs read weights at the addresses of their first run, and weights come to others; what is chosen by
        # timing kernels gives other numbers from process to process.
        for option in ("triton.cudagraphs", "max_autotune"):
            if config[option]:
                return f"torch.compile of {name} with {option}"
    return None


def uncompiled(module: nn.Module) -> Forward:
    """Return what a call of ``module`` runs, without ``torch.compile``."""
    return plain_call_of(module) if is_compiled(module) else module.forward


def called(module: nn.Module) -> Forward:
    """Return what a call of ``module`` runs."""
    entry: Forward = getattr(module, _entry(module))
    return entry


def without_gradients(module: nn.Module, run: Forward) -> Forward:
    """Return ``run``, a call of ``module``; where that is compiled, parameters have no ``grad`` while it lasts.

    Nothing in the code depends on that, but the compiler looks at every tensor, and what stands for a gradient between
    two steps is none that it knows.
    """
    if not is_compiled(module):
        return run

    def forward(*args: Any, **kwargs: Any) -> Any:
        with gradients_aside([parameter for parameter in module.parameters() if parameter.grad is not None]):
            return run(*args, **kwargs)

    return forward


@contextmanager
def gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let ``parameters`` have no gradient within the context, and those that they had afterwards."""
    with ExitStack() as undo:
        for parameter in parameters:
            undo.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        yield


def intercept(module: nn.Module, stand_in: Forward) -> Callable[[], None]:
    """Let calls of ``module`` run ``stand_in``; return a function that ends it."""
    entry = _entry(module)
    return cover(module, entry, StandIn(module, entry, vars(module).get(entry), stand_in))


def around_calls(module: nn.Module, around: Callable[[Any, Any], AbstractContextManager[None]]) -> Callable[[], None]:
    """Run each call of ``module`` within ``around`` of its arguments and keyword arguments; return what ends that.

    It is entered before the module's hooks, unlike one of them: those that it adds or removes count in the same call.
    """
    plain = plain_call_of(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        with around(args, kwargs):
            return plain(*args, **kwargs)

    return cover(module, PLAIN_CALL, call)


def cover(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Let ``module``, and no copy of it, have an attribute of its own; return a function that puts back what was there.

    Nothing covers an attribute that is covered already.
    """
    attributes, missing = vars(module), object()
    own = attributes.get(name, missing)

    def uncovered(state: dict[str, Any]) -> None:
        # Whoever has set the attribute since keeps what he has set.
        if state.get(name) is value:
            del state[name]
            if own is not missing:
                state[name] = own

    ended = hide_from_copies(module, uncovered)
    attributes[name] = value

    def undo() -> None:
        uncovered(attributes)
        ended()

    return undo


def hide_from_copies(module: nn.Module, hide: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """Let ``hide`` change the attributes that copies of ``module`` get; return a function that ends it."""
    attributes = vars(module)
    own = attributes.get(_STATE)
    state: _StateOfCopies = own if isinstance(own, _StateOfCopies) else _StateOfCopies(module, own)
    attributes[_STATE] = state
    state.hide.append(hide)

    def undo() -> None:
        state.hide.remove(hide)
        if not state.hide and attributes.get(_STATE) is state:
            del attributes[_STATE]
            if state.own is not None:
                attributes[_STATE] = state.own

    return undo


_STATE = "__getstate__"


class _StateOfCopies:
    """The ``__getstate__`` of a module: what copies and pickles of it are made of."""

    def __init__(self, module: nn.Module, own: Any) -> None:
        self._module, self.own = module, own
        self.hide: list[Callable[[dict[str, Any]], None]] = []

    def __call__(self) -> Any:
        get: Any = partial(type(self._module).__getstate__, self._module) if self.own is None else self.own
        state = get()
        if not isinstance(state, dict):
            return state
        state = dict(state)
        if state.get(_STATE) is self:
            # A module's state is its dictionary, in which this object is as well.
            del state[_STATE]
            if self.own is not None:
                state[_STATE] = self.own
        # The last to cover comes first: each puts back what it found, which may be a cover of another's.
        for hide in reversed(self.hide):
            hide(state)
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self._module, _STATE)  # where a module's class has a way of its own to make copies


class StandIn:
    """The function called in place of a module's own, mostly its forward, which a copy of the module gets instead."""

    def __init__(self, module: nn.Module, entry: str, own: Any, function: Forward) -> None:
        self._module, self._entry, self._own, self._function = module, entry, own, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._own is not None:
            return _itself, (self._own,)
        # The copy of the module exists already when its attributes are copied, and finds the method of its class.
        return getattr, (self._module, self._entry)


def _itself(value: Any) -> Any:
    return value


def _entry(module: nn.Module) -> str:
    return COMPILED_CALL if is_compiled(module) else "forward"
