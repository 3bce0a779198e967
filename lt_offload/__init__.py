"""Fine-tune language models that do not fit on the GPU, exactly, by planning one iteration and executing the plan.

``import lt_offload`` registers the strategy ``"offmate"`` with Lightning and imports nothing heavy: the public names
are loaded when they are first used.

``lt_offload.profile`` is two things: the package with the profile's types, and the function that measures one
(``lt_offload.profile(model, batch, optimizer=...)``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lt_offload._register import install
from lt_offload.errors import (
    CheckpointError,
    ConfigError,
    InfeasibleError,
    ModelError,
    OffloadError,
    OverBudget,
    PlanError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from lt_offload.callbacks import ExactResume
    from lt_offload.optim import AdamW
    from lt_offload.plan import simulate, solve
    from lt_offload.plan.schedule import Plan
    from lt_offload.plan.trace import Trace
    from lt_offload.profile.fake import profile_config
    from lt_offload.profile.measure import profile
    from lt_offload.profile.types import Profile
    from lt_offload.session import offloaded
    from lt_offload.strategy import OffmateStrategy

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "CheckpointError",
    "ConfigError",
    "ExactResume",
    "InfeasibleError",
    "ModelError",
    "OffloadError",
    "OffmateStrategy",
    "OverBudget",
    "Plan",
    "PlanError",
    "Profile",
    "Trace",
    "UnsupportedError",
    "offloaded",
    "profile",
    "profile_config",
    "simulate",
    "solve",
]

_LAZY = {
    "AdamW": "lt_offload.optim",
    "ExactResume": "lt_offload.callbacks",
    "OffmateStrategy": "lt_offload.strategy",
    "Plan": "lt_offload.plan.schedule",
    "Profile": "lt_offload.profile.types",
    "Trace": "lt_offload.plan.trace",
    "offloaded": "lt_offload.session",
    "profile_config": "lt_offload.profile",
    "simulate": "lt_offload.plan",
    "solve": "lt_offload.plan",
}


def __getattr__(name: str) -> object:
    """Load a public name."""
    if name == "profile":  # the import system then binds the package, which is callable, to this very name
        return import_module("lt_offload.profile")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    """Show the public names before they are loaded."""
    return sorted({*globals(), *__all__})


install()
