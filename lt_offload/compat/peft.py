"""Private names of peft: the use of each."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn


def parameter_adapter() -> Any:
    """Return the class of adapters of a parameter (``target_parameters``); None if peft is not installed."""
    return None if find_spec("peft") is None else import_module("peft.tuners.lora.layer").ParamWrapper


def use_parameter_adapter(kind: type) -> None:
    """Let peft make adapters of class ``kind``, a subclass of its own, from now on."""
    import_module("peft.tuners.lora.layer").ParamWrapper = kind  # type: ignore[attr-defined]


def layer_adapter() -> Any:
    """Return the class of adapters of a linear layer."""
    return import_module("peft.tuners.lora.layer").Linear


def initializers() -> list[str]:
    """Return the names of the methods of a linear layer's adapter that read the layer's weight before training."""
    known = ("corda_init", "loftq_init", "mica_init", "olora_init", "orthogonal_init", "pissa_init")
    return [name for name in known if hasattr(layer_adapter(), name)]


def dora() -> Any:
    """Return what makes an adapter of a linear layer one of DoRA, which reads the layer's weight."""
    return import_module("peft.tuners.lora.variants").DoraLinearVariant


def has_adapters(model: nn.Module) -> bool:
    """Return whether a module of ``model`` is an adapter."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())
