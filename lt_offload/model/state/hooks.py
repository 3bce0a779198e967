"""The forward hooks inside a block: a second run of the block would call those of users once more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lt_offload.compat.torch import GLOBAL_FORWARD_HOOKS, all_hooks_of, forward_hooks_of, tensor_hooks_of
from lt_offload.model.compiled import is_compiled

_LIBRARIES = ("torch", "transformers", "peft", "lt_offload")
"""Packages whose hooks may be called any number of times: they compute weights from others, cast, or count nothing."""


class InnerHooks:
    """The forward hooks and pre-hooks inside one block, which a second run of the block would call again.

    Those on the block itself are not among them: calls of the block are intercepted below them, so that they are called
    once, unless the block is compiled with its hooks.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        own = is_compiled(module)
        self._hooks: list[tuple[str, dict[int, Callable[..., Any]]]] = [
            (f"{name}.{path}" if path else name, hooks)
            for path, member in module.named_modules()
            if path or own
            for hooks in forward_hooks_of(member)
        ]
        if self._hooks:
            # Torch calls hooks of every module for those inside a block, too.
            self._hooks += [("every module", hooks) for hooks in GLOBAL_FORWARD_HOOKS]
        self._held = [hooks for _, hooks in self._hooks]

    def find(self) -> str | None:
        """Return a hook of the user's own and where it is, as errors name it; None if there is none."""
        for path, hooks in self._hooks if any(self._held) else ():
            for hook in hooks.values():
                if _home(hook).partition(".")[0] not in _LIBRARIES:
                    hook = _plain(hook)
                    title = getattr(hook, "__qualname__", type(hook).__qualname__)
                    return f"forward hook {title} on {path}, in block {self._name}"
        return None


@contextmanager
def silenced(module: nn.Module) -> Iterator[None]:
    """Within the context no hook of a user's own is called in ``module``: it runs for its costs alone."""
    members = list(module.modules())
    hooks = [hooks for member in members for hooks in all_hooks_of(member)] + list(GLOBAL_FORWARD_HOOKS)
    hooks += [tensor_hooks_of(p) for p in module.parameters() if tensor_hooks_of(p)]
    before = [(held, dict(held)) for held in hooks if held]
    try:
        for held, known in before:
            for key, hook in known.items():
                if _home(hook).partition(".")[0] not in _LIBRARIES:
                    del held[key]
        yield
    finally:
        for held, known in before:
            # Emptied first: hooks are called in the order of insertion, and those that come back would be the last.
            held.clear()
            held.update(known)


def _plain(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _home(hook: Any) -> str:
    hook = _plain(hook)
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(getattr(named, "__module__", None) or "")
