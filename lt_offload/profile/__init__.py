"""What a model and a machine cost: measured with the real weights, or estimated from a configuration.

Knows neither plans nor budgets. The package can be called: ``lt_offload.profile(model, sample_batch, optimizer=...)``
is :func:`lt_offload.profile.measure.profile`. Nothing is loaded before it is used, because planning needs the types
without torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lt_offload.profile.fake import profile_config
    from lt_offload.profile.hardware import load_hardware, measure_hardware
    from lt_offload.profile.measure import profile
    from lt_offload.profile.types import Profile

__all__ = ["Profile", "load_hardware", "measure_hardware", "profile", "profile_config"]

_LAZY = {
    "Profile": "lt_offload.profile.types",
    "load_hardware": "lt_offload.profile.hardware",
    "measure_hardware": "lt_offload.profile.hardware",
    "profile": "lt_offload.profile.measure",
    "profile_config": "lt_offload.profile.fake",
}


def __getattr__(name: str) -> object:
    """Load a public name."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


class _CallablePackage(ModuleType):
    """The import system binds this package to the name of the public function, so the package is that function too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Profile:
        """Measure a model; see :func:`lt_offload.profile.measure.profile`."""
        from lt_offload.profile.measure import profile

        return profile(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
