"""Parameters that are trained: patterns on their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lt_offload.errors import ConfigError
from lt_offload.suggest import nearest


def choose_trained(model: nn.Module, *, freeze: Sequence[str] = (), train_only: Sequence[str] = ()) -> None:
    """Train only the parameters of ``model`` that ``train_only`` names, or all, without those that ``freeze`` names.

    A name is that of a parameter or of a module that it is in, with ``*`` for anything, or a regular expression that
    matches all of it. A tensor that has several names (tied embeddings) is meant by each of them. Raises
    ``ConfigError`` if a pattern names nothing, or nothing is left to be trained.
    """
    if train_only:
        chosen = _matching(model, train_only, "train_only")
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        for pattern in freeze:
            if not _matching(model, [pattern], "freeze") & chosen:
                raise ConfigError(
                    f"model.freeze={list(freeze)!r}: {pattern!r} changes nothing with "
                    f"model.train_only={list(train_only)!r}, which leaves it frozen; take it out"
                )
    frozen = _matching(model, freeze, "freeze")
    for parameter in model.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model.freeze={list(freeze)!r} leaves nothing to be trained; take a pattern out")


def _matching(model: nn.Module, patterns: Sequence[str], setting: str) -> set[int]:
    """Return the ids of the parameters that one of ``patterns`` names."""
    # Every name of a tensor counts: tied embeddings are named once otherwise, and a pattern may mean the other name.
    named = list(model.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for pattern in patterns:
        ids = {id(parameter) for name, parameter in named if _matches(name, pattern)}
        if not ids:
            names = [name for name, _ in named]
            raise ConfigError(
                f"model.{setting}={list(patterns)!r}: no parameter is called {pattern!r}; "
                f"{_nearest(pattern, names)}; a pattern is a name, a name with *, or a regular expression for all of it"
            )
        chosen |= ids
    return chosen


def _matches(name: str, pattern: str) -> bool:
    if any(fnmatchcase(part, pattern) for part in (name, *_above(name))):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False


def _above(name: str) -> Iterable[str]:
    """Yield the modules that the parameter ``name`` is in."""
    parts = name.split(".")
    return (".".join(parts[:n]) for n in range(1, len(parts)))


def _nearest(pattern: str, names: Sequence[str]) -> str:
    candidates = sorted({part for name in names for part in (name, *_above(name))})
    near = nearest(pattern, candidates, cutoff=0.3, most=1)
    return f"the nearest is {near[0] if near else names[0]!r}"
