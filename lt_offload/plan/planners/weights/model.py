"""The abstract problem of weight offloading: layers, one memory, one link. Knows no tensors and no plans.

After "Weight offloading strategies for training large DNN models" (Beaumont, Eyraud-Dubois, Shilova, Zhao, 2022). The
forward of layer ``k`` of ``L`` is step ``k``, its backward, which includes its update, step ``2L - 1 - k``. A weight is
on the device in these two steps; it may be absent in the gap after either of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from lt_offload.errors import ConfigError

Phase = Literal["forward", "backward"]


class Gap(NamedTuple):
    """The time between two uses of a weight: the paper's choice ``(k, 1)`` after the forward, ``(k, 0)`` otherwise."""

    layer: int
    after: Phase

    def steps(self, layers: int) -> range:
        """Return the steps strictly inside, cyclic: those from ``2 * layers`` on belong to the next iteration."""
        if self.after == "forward":
            return range(self.layer + 1, 2 * layers - 1 - self.layer)
        return range(2 * layers - self.layer, 2 * layers + self.layer)


@dataclass(frozen=True, kw_only=True)
class WeightChain:
    """One problem; sequences are per layer or per step."""

    weights: tuple[int, ...]
    """Bytes per layer."""
    seconds: tuple[float, ...]
    """Duration per step."""
    working: tuple[int, ...]
    """Bytes per step that are held besides weights: activations, gradient, workspace."""
    memory: int
    """Bytes for all of it."""
    h2d: float
    """Bytes per second to the device."""
    d2h: float
    """Bytes per second to the host."""
    changed: tuple[int, ...] = ()
    """Per layer, the bytes that go to the host after a backward if the weight is absent in the gap after it; default:
    the weight's."""
    states: tuple[int, ...] = ()
    """Per layer, bytes of optimizer states, on the device always if none of its gaps is chosen; default: none, as in
    the paper."""
    states_return: tuple[bool, ...] = ()
    """Per layer with a chosen gap, whether its states come to the device for the backward, or never."""

    def __post_init__(self) -> None:
        count = len(self.weights)
        for name in ("changed", "states", "states_return"):
            if not getattr(self, name):
                default = self.weights if name == "changed" else (0 if name == "states" else True,) * count
                object.__setattr__(self, name, default)
        if not count:
            raise ConfigError("layers=[]: at least one layer is needed")
        for name, size in (("seconds", 2 * count), ("working", 2 * count), ("changed", count), ("states", count)):
            if len(getattr(self, name)) != size:
                raise ConfigError(f"{name} has {len(getattr(self, name))} values; {count} layers need {size}")
        for name in ("weights", "seconds", "working", "changed", "states"):
            if min(getattr(self, name)) < 0:
                raise ConfigError(f"{name} has the value {min(getattr(self, name))}; sizes and times are at least 0")
        for name in ("memory", "h2d", "d2h"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}; it is more than 0")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.weights)

    @property
    def steps(self) -> int:
        """Number of steps of an iteration."""
        return len(self.seconds)

    @cached_property
    def compute_s(self) -> float:
        """Seconds of an iteration without any wait."""
        return sum(self.seconds)

    @property
    def largest(self) -> int:
        """Bytes of the largest weight."""
        return max(self.weights)

    def layer_of(self, step: int) -> int:
        """Return the layer that computes in ``step``."""
        return min(step, self.steps - 1 - step)

    def gaps(self) -> list[Gap]:
        """Return every gap in which a weight's absence frees memory in some step."""
        found = []
        for layer, nbytes in enumerate(self.weights):
            phases: tuple[Phase, ...] = ("forward", "backward")
            found += [gap for after in phases if nbytes and (gap := Gap(layer, after)).steps(self.layers)]
        return found
