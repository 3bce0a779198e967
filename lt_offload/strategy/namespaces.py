"""One class for every Lightning: ``lightning.pytorch`` and ``pytorch_lightning`` have base classes of their own.

A class here is written without Lightning at runtime, and :func:`bind` puts it on the base class of a namespace when a
Trainer of that namespace needs it.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
STRATEGY_NAME = "offmate"
"""The strategy's name in the registries of both."""

named: dict[str, tuple[type[Any], type[Any]]] = {}
"""The strategy's two classes by namespace: under its own name, and under its name in the registry."""


@cache
def bind(core: type, namespace: str, base: str, *, module: str | None = None) -> type[Any]:
    """Return ``core``, a class free of Lightning, as a subclass of ``base`` of a Lightning namespace.

    ``base`` is a path in that namespace, e.g. ``"strategies.Strategy"``. ``module`` is where others find the class,
    e.g. those that read a saved config; None: ``core``'s.
    """
    folder, _, name = base.rpartition(".")
    members = {"__module__": module or core.__module__, "__doc__": core.__doc__, "namespace": namespace}
    return type(core.__name__, (core, getattr(import_module(f"{namespace}.{folder}"), name)), members)


def namespace_of(thing: object) -> str | None:
    """Return the Lightning namespace that the class of ``thing`` or the nearest of its bases is from."""
    modules = (base.__module__ for base in type(thing).__mro__)
    return next((name for module in modules for name in NAMESPACES if module.startswith(f"{name}.")), None)


def introduce() -> None:
    """Let the Trainers of all imported namespaces, which ask by ``isinstance``, take the strategies of the others.

    Without the second registration Trainers of several processes fail at the loader: they divide samples only for a
    ``ParallelStrategy``.
    """
    for namespace in NAMESPACES:
        strategies = sys.modules.get(f"{namespace}.strategies")
        base, parallel = (getattr(strategies, name, None) for name in ("Strategy", "ParallelStrategy"))
        for other, (strategy, _) in named.items():
            if base is not None and other != namespace:
                base.register(strategy)
            if parallel is not None:
                parallel.register(strategy)
