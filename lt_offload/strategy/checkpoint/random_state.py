"""Random states as plain data for checkpoints: of the global generators, and of those that objects hold.

Everything is tensors, numbers, strings, lists and dicts, so that ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def capture(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of the global generators: Python's, NumPy's, torch's on the host and on every CUDA device.

    With ``device``, the one of this process among several, no other CUDA device is touched.
    """
    states: dict[str, Any] = {
        "python": _plain(random.getstate()),
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": [],
    }
    # Asking for a state would start CUDA in a process that has not used it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all() if device is None else [_of_cuda(device)]
    return states


def _of_cuda(device: torch.device) -> torch.Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def restore(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Set the global generators to what :func:`capture` returned; CUDA devices as far as there are as many."""
    random.setstate(_python_state(states["python"]))
    np.random.set_state(_original(states["numpy"]))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        devices: Iterable[Any] = range(torch.cuda.device_count()) if device is None else [device]
        for one, state in zip(devices, states["cuda"], strict=False):
            if state is not None:
                torch.cuda.set_rng_state(state, one)


def generators(owners: Mapping[str, object]) -> dict[str, Generator]:
    """Return the generators that are attributes of ``owners``, by owner and attribute."""
    held: dict[str, Generator] = {}
    for name, owner in owners.items():
        if isinstance(owner, _KINDS):
            held[name] = owner
        for key, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, _KINDS):
                held[f"{name}.{key}"] = value
    return held


def capture_from(held: Mapping[str, Generator]) -> dict[str, Any]:
    """Return the states of ``held``, by the same names."""
    return {name: _state(generator) for name, generator in held.items()}


def restore_to(held: Mapping[str, Generator], states: Mapping[str, Any]) -> list[str]:
    """Set ``held`` to ``states``; return the names that only one of the two has."""
    for name in held.keys() & states.keys():
        _set_state(held[name], states[name])
    return sorted(held.keys() ^ states.keys())


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.getstate())


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _original(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_original(state))
    else:
        generator.setstate(_python_state(state))


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


def _python_state(state: list[Any]) -> tuple[Any, ...]:
    """Return the form that ``random.setstate`` takes."""
    version, words, gauss = state
    return version, tuple(words), gauss
