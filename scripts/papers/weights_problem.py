"""The problem of weight offloading (2022) in the paper's quantities, and a lower bound of its time.

The bound is the mixed-integer program of the paper (eqs. 2-8), or its relaxation. Per layer ``i`` and step ``j``, in
units of the largest weight: ``O`` is copied to the host, ``P`` to the device and ``D`` given back between the start of
step ``j`` and the start of the next; ``m`` is on the device when step ``j`` starts, ``c`` has been copied to the host
since the layer's backward. ``g`` and ``f`` are the backward and the forward of the layer.
What is corrected against the print:

- (4) limits ``sum_i m`` over all layers to ``M - M_k``, but ``M_k`` contains the own weight already: the sum is over
  the others. As printed, the program is not a bound of the problem that the text states.
- (5) the first sum runs over ``j = 0 .. 2L - 1`` of steps that are numbered ``1 .. 2L``; all steps are meant.
- (6) the first inequality has the wrong sign: what is fetched is at most what was given back, ``sum P - D <= 0``. Here
  that is the upper bound of ``m``.

Sums over the steps since the backward are the variables ``m`` and ``c``, so that the rows stay short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import pulp

from lt_offload.errors import ConfigError
from lt_offload.plan.planners.lp import Pair, require, run
from lt_offload.plan.planners.weights.model import WeightChain, require_room


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayer:
    """One layer as the paper has it; sizes in bytes, times in seconds."""

    weight_bytes: int
    forward_s: float
    backward_s: float
    activation_bytes: int = 0
    """Size of its output, held until the backward of the layer after it."""


def weight_chain(layers: Sequence[WeightLayer], *, memory: int, bandwidth: float) -> WeightChain:
    """Return the problem ``OFF(L, memory, bandwidth)``.

    The working bytes are those of eq. 1 less the layer's own weight: the outputs of all layers up to it, and in the
    backward a gradient as large as the weight.
    """
    held = list(accumulate(layer.activation_bytes for layer in layers))
    backward = [total + layer.weight_bytes for total, layer in zip(held, layers, strict=True)]
    return WeightChain(
        weights=tuple(layer.weight_bytes for layer in layers),
        seconds=(*(layer.forward_s for layer in layers), *(layer.backward_s for layer in reversed(layers))),
        working=(*held, *reversed(backward)),
        memory=memory,
        h2d=bandwidth,
        d2h=bandwidth,
    )


def l2l_s(chain: WeightChain) -> float:
    """Return the seconds of an L2L iteration in closed form.

    Both fetches of every weight are exposed, and the copies to the host hide behind the next fetch and computation.
    """
    return chain.compute_s + 2 * sum(chain.weights) / chain.h2d


def weights_bound(
    chain: WeightChain,
    *,
    relaxed: bool = True,
    time_limit: float = 60.0,
    gap: float = 1e-4,
) -> float:
    """Return the seconds that no iteration of ``chain`` can beat, whatever is absent when.

    It is not the time of a schedule: memory is only counted at the starts of steps, and parts of weights may travel.

    Args:
        chain: the problem, without optimizer states.
        relaxed: whether a weight may also be absent in parts; else the program is branched on.
        time_limit: seconds.
        gap: relative gap of the waits at which branching stops; it is taken off, so that the value remains a bound.

    Raises:
        InfeasibleError: if the memory is too small.
        ConfigError: if the time limit is too short.
    """
    assert not any(chain.states), "the program knows no optimizer states"
    require_room(chain, chain.gaps())
    program = _Program(chain, whole=not relaxed)
    outcome = run(program.problem, time_limit=time_limit, gap=None if relaxed else gap)
    assert outcome != "infeasible", "every weight may be absent between its uses"
    if outcome == "stopped":
        raise ConfigError(f"time_limit={time_limit:g} is too short for the bound of {chain.layers} layers")
    idle = max(0.0, float(pulp.value(program.problem.objective))) * program.seconds_unit
    return chain.compute_s + idle * (1 if relaxed else 1 - gap)


class _Program:
    def __init__(self, chain: WeightChain, *, whole: bool) -> None:
        self.chain, self.whole = chain, whole
        self.bytes_unit = float(chain.largest or 1)
        self.seconds_unit = chain.compute_s / chain.steps or self.bytes_unit / chain.h2d
        self.problem = pulp.LpProblem("weights", pulp.LpMinimize)
        steps = range(chain.steps)
        self.idle = [self.problem.add_variable(f"idle_{step:03d}", 0) for step in steps]
        self.h2d: list[list[Pair]] = [[] for _ in steps]
        self.d2h: list[list[Pair]] = [[] for _ in steps]
        self.others: list[list[Pair]] = [[] for _ in steps]
        for layer, nbytes in enumerate(chain.weights):
            if nbytes:
                self._add_layer(layer)
        for step in steps:
            self._limit_step(step)
        self.problem.setObjective(pulp.lpSum(self.idle))

    def _size(self, nbytes: float) -> float:
        return nbytes / self.bytes_unit

    def _binary(self, name: str) -> pulp.LpVariable:
        return self.problem.add_variable(name, 0, 1, cat=pulp.LpBinary if self.whole else pulp.LpContinuous)

    def _add_layer(self, layer: int) -> None:
        chain, problem, steps = self.chain, self.problem, self.chain.steps
        weight, changed = self._size(chain.weights[layer]), self._size(chain.changed[layer])
        backward = steps - 1 - layer
        name = f"w{layer:03d}"
        on_device: pulp.LpVariable | float = weight
        on_host: pulp.LpVariable | float = 0.0
        removed: dict[Literal["forward", "backward"], list[Pair]] = {"forward": [], "backward": []}
        for tau in range(steps):
            step, now, copied = (backward + tau) % steps, on_device, on_host
            out = problem.add_variable(f"{name}_O_{step:03d}", 0, changed)
            fetched = problem.add_variable(f"{name}_P_{step:03d}", 0, weight)
            given = problem.add_variable(f"{name}_D_{step:03d}", 0, weight)
            self.h2d[step].append((1, fetched))
            self.d2h[step].append((1, out))
            if step == backward:
                require(problem, [(1, self.idle[step]), (-self._duration(chain.d2h), out)], ">=")  # (3)
            elif step != layer:
                self.others[step].append((1, now))
            else:
                require(problem, [(1, now)], "==", weight)  # (5), second
            removed["backward" if tau <= 2 * layer else "forward"].append((1, given))
            on_device = weight if tau == steps - 1 else problem.add_variable(f"{name}_m_{step:03d}", 0, weight)  # (6)
            on_host = problem.add_variable(f"{name}_c_{step:03d}", 0, changed)
            require(problem, [(1, on_device), (-1, now), (-1, fetched), (1, given)], "==")  # (5), first
            require(problem, [(1, on_host), (-1, copied), (-1, out)], "==")
            require(problem, [(1, on_host), (1, on_device)], ">=", changed)  # (6), second: less than all is current
        require(problem, [(1, on_host), (-changed, self._binary(f"{name}_O"))], "==")  # (7)
        for phase, given_back in removed.items():
            require(problem, [*given_back, (-weight, self._binary(f"{name}_D_{phase}"))], "==")  # (8)

    def _limit_step(self, step: int) -> None:
        chain = self.chain
        for copies, rate in ((self.h2d[step], chain.h2d), (self.d2h[step], chain.d2h)):
            pairs = [(self._duration(rate) * factor, term) for factor, term in copies]
            own = chain.seconds[step] / self.seconds_unit
            require(
                self.problem, [(1, self.idle[step]), *((-factor, term) for factor, term in pairs)], ">=", -own
            )  # (2)
        left = chain.memory - chain.working[step] - chain.weights[chain.layer_of(step)]
        require(self.problem, self.others[step], "<=", self._size(left))  # (4)

    def _duration(self, rate: float) -> float:
        """Return how long a unit of bytes takes, in units of time."""
        return self.bytes_unit / rate / self.seconds_unit
