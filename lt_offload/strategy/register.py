"""Registration of the strategy ``"offmate"`` with every Lightning namespace, without importing any of them.

Lightning has no hook for strategies from outside: its registry is filled while ``<namespace>.strategies`` is imported.
So a namespace that is imported already gets the strategy at once, and for the others one finder on ``sys.meta_path``
adds it right after that import. The strategy's own code, and torch, are imported only when a Trainer asks for it.

Nothing here may raise: the package is imported at the end of every ``import torch`` in the environment (entry point
group ``torch.backends``). ``LT_OFFLOAD_AUTOLOAD=0`` switches it off: then there is no name, and the object alone.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lt_offload.errors import UnsupportedError
from lt_offload.strategy.namespaces import NAMESPACES, STRATEGY_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_log = logging.getLogger(__name__)
_REGISTRIES = {f"{namespace}.strategies": namespace for namespace in NAMESPACES}
_COMMAND_LINES = {f"{namespace}.cli": namespace for namespace in NAMESPACES}
_FABRIC = ("lightning.fabric.strategies", "lightning_fabric.strategies")
_FOLLOWED = (*_REGISTRIES, *_COMMAND_LINES, *_FABRIC)


def install() -> None:
    """Register with the namespaces that are imported, now, and with the others when they are. Safe to call again."""
    try:
        for name in _FOLLOWED:
            if name in sys.modules:
                _register(sys.modules[name])
        # By an attribute: a second import of this package has another class of this name.
        if not any(getattr(finder, "registers_offmate", False) for finder in sys.meta_path):
            # In front of the other finders: the search ends with the first that has a spec.
            sys.meta_path.insert(0, _Finder())
    except Exception:
        _log.debug("could not register the strategy %r", STRATEGY_NAME, exc_info=True)


class _Finder:
    """A finder that lets the others find a followed module and adds the registration to its loader."""

    registers_offmate = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _FOLLOWED:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                _register_after(spec)
                return spec
        return None


def _register_after(spec: ModuleSpec) -> None:
    """Make ``spec``'s loader register the strategy once it has executed the module."""
    loader: Any = spec.loader
    try:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module)

        # On the object, which serves this one module.
        loader.exec_module = exec_module
    except Exception:
        _log.debug("cannot follow the import of %s", spec.name, exc_info=True)


def _register(module: ModuleType) -> None:
    """Add the strategy to the registry of a ``strategies`` module, or to the classes that a ``cli`` module can name."""
    try:
        if module.__name__ in _FABRIC:
            said = "Is for Trainers: says what to use instead in a loop of Fabric's"
            module.STRATEGY_REGISTRY.register(STRATEGY_NAME, _refuse_fabric, description=said, override=True)
            return
        if module.__name__ in _COMMAND_LINES:
            _classes().named_classes(_COMMAND_LINES[module.__name__])
            return
        namespace = _REGISTRIES.get(module.__name__)
        if namespace is not None:
            for name in (STRATEGY_NAME, "offmatestrategy"):  # the class's name in lower case, as Trainers ask for it
                module.StrategyRegistry.register(
                    name,
                    partial(_build, namespace),
                    description="Executes a planned iteration inside a memory budget",
                    override=True,  # a second import of this package must not fail
                )
            ours = sys.modules.get("lt_offload.strategy.offmate")
            if ours is not None:
                ours.introduce()
    except Exception:
        _log.debug("could not register %r with %s", STRATEGY_NAME, module, exc_info=True)


def _refuse_fabric(**options: Any) -> None:
    raise UnsupportedError(
        "Fabric(strategy='offmate'): Fabric leaves the loop to you, and this strategy runs a Trainer's; use "
        "lt_offload.offloaded(model, optimizer, batch) around your loop, with model and optimizer as they are before "
        "fabric.setup"
    )


def _build(namespace: str, **options: Any) -> Any:
    return _classes().strategy_class(namespace)(**options)


def _classes() -> Any:
    """Return the module with the strategy's classes, which imports torch: here for the first time."""
    return import_module("lt_offload.strategy.offmate")
