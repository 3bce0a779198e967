"""Switches of OFFMATE's linear program, and what it supposes about the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OffmateConfig:
    """Budgets, switches and modelling choices.

    The defaults describe how the engine executes.
    """

    budget_bytes: int | None
    """Device budget, context and shared bytes included; None: no limit."""
    host_budget_bytes: int | None = None
    """Host budget; None: no limit."""
    host_update: bool = True
    """True if the host may update parameters."""
    activation_offload: bool = True
    """True if options that copy activations to the host may be chosen."""
    recompute: bool = True
    """True if ``recompute`` and ``mixed`` may be chosen."""
    phi: float = 0.25
    """Part of the copies out of a group's own update step that cannot overlap with that step: 1 if they start at its
    end."""
    lag: int = 1
    """Offloaded activations keep their device memory this many steps after their forward and leave during any of them.
    With 0 the copy is supposed to overlap with the forward that makes them."""
    lookahead: int = 1
    """Offloaded activations take device memory this many steps before their backward and are fetched during any of
    them. With 0 a fetch is supposed to overlap with the backward that needs it."""
    optimistic: bool = False
    """For bounds of any planner's plans: also allow for activations that are dropped and computed again, at the cost of
    one forward, and let embeddings that can be read in host memory cost neither copies nor device memory."""
    lookups: bool = False
    """True if frozen tensors that embeddings alone use are read in host memory, and take no room on the device."""
    reach: int = 6
    """Steps before and after a use in which its transfers may run."""
    gradient_reach: int = 3
    """Steps in which gradients are copied to the host."""
    update_reach: int | None = None
    """With ``optimistic``: gradients are copied and updated with in so many steps after they are made, and updated with
    in so many before the next use; between, in those of all groups together. None: each in any of these steps."""
    traffic_weight: float = 1e-4
    """Weight of a second of copying in the objective; without it the solver returns pointless traffic."""
    gap: float = 0.01
    """Relative distance to the bound above which a rounded solution is not good enough."""
    time_limit: float = 30.0
    """Seconds for everything."""
