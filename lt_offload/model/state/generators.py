"""States of random generators: torch's, Python's and NumPy's, old and new."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
GLOBAL: tuple[Any, ...] = (random.random.__self__, np.random.random_sample.__self__)  # type: ignore[attr-defined]
"""Python's and NumPy's global generators."""


def is_generator(value: object) -> bool:
    """Return whether ``value`` is a random generator."""
    return issubclass(type(value), GENERATORS)


def state_of(generator: Any) -> Any:
    """Return a copy of the state of ``generator``; None if it has none."""
    if isinstance(generator, random.SystemRandom):
        return None  # that one draws from the system, and its ``getstate`` raises
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else _bits_of(generator).state


def set_state(generator: Any, state: Any) -> None:
    """Bring ``generator`` back to ``state``."""
    if hasattr(generator, "set_state"):
        generator.set_state(state)
    elif not isinstance(generator, random.Random):
        _bits_of(generator).state = state
    elif state is not None:
        generator.setstate(state)


def same_state(left: Any, right: Any) -> bool:
    """Return whether two states of a generator are equal: tensors, tuples, or dictionaries with arrays."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[key], right[key]) for key in left)
    return np.array_equal(left, right) if isinstance(left, np.ndarray) else bool(left == right)


@contextmanager
def generators_kept(devices: Sequence[int] = ()) -> Iterator[None]:
    """Leave all global generators as they are; ``devices``: those of CUDA whose generators are meant as well."""
    before = [state_of(generator) for generator in GLOBAL]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for generator, state in zip(GLOBAL, before, strict=True):
            set_state(generator, state)


def _bits_of(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def global_states(devices: Iterable[torch.device]) -> list[Tensor]:
    """Return the states of torch's global generators: that of the CPU, and those of the GPUs among ``devices``."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in devices if gpu.type == "cuda")]


def set_global_states(states: Sequence[Tensor], devices: Iterable[torch.device]) -> None:
    """Let torch's global generators go on from ``states``, what :func:`global_states` has returned."""
    torch.set_rng_state(states[0])
    for gpu, state in zip((device for device in devices if device.type == "cuda"), states[1:], strict=True):
        torch.cuda.set_rng_state(state, gpu)


def states_for(x: Tensor) -> list[Tensor]:
    """Return the states that a module called with ``x`` may draw from; none if ``x`` is fake."""
    return [] if x.is_meta or type(x).__name__ == "FakeTensor" else global_states([x.device])


@contextmanager
def drawing(devices: Sequence[torch.device], states: Sequence[Tensor]) -> Iterator[None]:
    """Let a run on ``devices`` draw what follows ``states``, and nobody else notice; without states whatever."""
    if not states:
        yield
        return
    now = global_states(devices)
    try:
        set_global_states(states, devices)
        yield
    finally:
        set_global_states(now, devices)
