"""Fine-tune language models that do not fit on the GPU, exactly, by planning one iteration and executing the plan.

``import lt_offload`` registers the strategy ``"offmate"`` with Lightning and imports nothing heavy: the public names
are loaded when they are first used.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from lt_offload.hf.accelerated import accelerated
    from lt_offload.hf.context import OffloadedTrainerMixin, hf_trainer
    from lt_offload.model.forms import open_weights, store_weights
    from lt_offload.model.head import chunked_loss_reference
    from lt_offload.model.parts import micro_batched_reference
    from lt_offload.model.tiles import tile_tokens
    from lt_offload.optim import AdamW
    from lt_offload.plan import simulate, solve
    from lt_offload.profiling.from_config import profile_config
    from lt_offload.profiling.measure import profile
    from lt_offload.schema.plan import Plan
    from lt_offload.schema.profile import Profile
    from lt_offload.schema.trace import Trace
    from lt_offload.session import offloaded
    from lt_offload.strategy.checkpoint.resume import ExactResume
    from lt_offload.strategy.offmate import OffmateStrategy

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "CheckpointError",
    "ConfigError",
    "ExactResume",
    "InfeasibleError",
    "ModelError",
    "OffloadError",
    "OffloadedTrainerMixin",
    "OffmateStrategy",
    "OverBudget",
    "Plan",
    "PlanError",
    "Profile",
    "Trace",
    "UnsupportedError",
    "accelerated",
    "chunked_loss_reference",
    "hf_trainer",
    "micro_batched_reference",
    "offloaded",
    "open_weights",
    "profile",
    "profile_config",
    "simulate",
    "solve",
    "store_weights",
    "tile_tokens",
]

_ERRORS = {name: "lt_offload.errors" for name in __all__ if name.endswith("Error")}
_LAZY = _ERRORS | {
    "AdamW": "lt_offload.optim",
    "ExactResume": "lt_offload.strategy.lightning",
    "OffloadedTrainerMixin": "lt_offload.hf.context",
    "OffmateStrategy": "lt_offload.strategy.lightning",
    "OverBudget": "lt_offload.errors",
    "Plan": "lt_offload.schema.plan",
    "Profile": "lt_offload.schema.profile",
    "Trace": "lt_offload.schema.trace",
    "accelerated": "lt_offload.hf.accelerated",
    "chunked_loss_reference": "lt_offload.model.head",
    "hf_trainer": "lt_offload.hf.context",
    "micro_batched_reference": "lt_offload.model.parts",
    "offloaded": "lt_offload.session",
    "open_weights": "lt_offload.model.forms",
    "profile": "lt_offload.profiling.measure",
    "profile_config": "lt_offload.profiling.from_config",
    "simulate": "lt_offload.plan",
    "solve": "lt_offload.plan",
    "store_weights": "lt_offload.model.forms",
    "tile_tokens": "lt_offload.model.tiles",
}


def __getattr__(name: str) -> object:
    """Load a public name."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    """Show the public names before they are loaded."""
    return sorted({*globals(), *__all__})


def _autoload() -> None:
    """Do nothing: torch loads this entry point at the end of its own import, and loading it has registered."""


# Every ``import torch`` of the environment comes here, and would fail with a broken installation of this package.
try:
    from lt_offload.strategy.register import install

    if os.environ.get("LT_OFFLOAD_AUTOLOAD", "1") != "0":
        install()
except Exception as error:
    sys.stderr.write(
        f"lt_offload: the strategy 'offmate' is not registered, as this installation is broken ({error}); install "
        "lt-offload again, or set LT_OFFLOAD_AUTOLOAD=0\n"
    )
