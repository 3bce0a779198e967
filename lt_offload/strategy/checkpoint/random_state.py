"""Random states as plain data for checkpoints: of the global generators, and of those that objects hold.

Everything is tensors, numbers, strings, lists and dicts, so that ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lt_offload.model.state.generators import GLOBAL, is_generator, set_state, state_of

_ON_CUDA = "cuda:"
"""The beginning of the names of CUDA devices' generators, of which another run may have more or fewer."""


def generators(owners: Mapping[str, object], device: torch.device | None = None) -> dict[str, Any]:
    """Return the global generators, and those that are attributes of ``owners``, by owner and attribute.

    CUDA devices have some once CUDA was used; with ``device``, the one of this process among several, no other one is
    touched.
    """
    held: dict[str, Any] = dict(zip(("python", "numpy", "torch"), (*GLOBAL, torch.default_generator), strict=True))
    for index, generator in enumerate(torch.cuda.default_generators):
        if device is None:
            held[f"{_ON_CUDA}{index}"] = generator
        elif device.type == "cuda" and index == device.index:
            held[_ON_CUDA] = generator
    for name, owner in owners.items():
        if is_generator(owner):
            held[name] = owner
        for key, value in getattr(owner, "__dict__", {}).items():
            if is_generator(value):
                held[f"{name}.{key}"] = value
    return held


def capture(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the generators ``held``, by the same names."""
    return {name: _plain(state_of(generator)) for name, generator in held.items()}


def restore(held: Mapping[str, Any], states: Mapping[str, Any]) -> list[str]:
    """Set ``held`` to ``states``; return the names that only one of the two has, but for CUDA devices."""
    for name in held.keys() & states.keys():
        state = _original(states[name])
        if isinstance(state, list):  # Python's
            version, words, gauss = state
            state = (version, tuple(words), gauss)
        set_state(held[name], state)
    return sorted(name for name in held.keys() ^ states.keys() if not name.startswith(_ON_CUDA))


def _plain(value: Any) -> Any:
    """Return ``value`` with NumPy's arrays and numbers as tensors and Python's numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        # Words of generators are unsigned: through 64 bits every one fits, and the same bits are a dtype of torch's.
        return {"dtype": str(value.dtype), "array": torch.tensor(value.astype(np.uint64).view(np.int64))}
    return value.item() if isinstance(value, np.generic) else value


def _original(value: Any) -> Any:
    """Return the argument of :func:`_plain` for its result; lists stay lists."""
    if isinstance(value, Mapping) and value.keys() == {"dtype", "array"}:
        return value["array"].numpy().view(np.uint64).astype(value["dtype"])
    if isinstance(value, Mapping):
        return {key: _original(item) for key, item in value.items()}
    return value
