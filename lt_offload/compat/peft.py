"""Private names of peft: the use of each."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def parameter_adapter() -> Any:
    """Return the class of adapters of a parameter (``target_parameters``); None if peft is not installed."""
    return None if find_spec("peft") is None else import_module("peft.tuners.lora.layer").ParamWrapper


def use_parameter_adapter(kind: type) -> None:
    """Let peft make adapters of class ``kind``, a subclass of its own, from now on."""
    import_module("peft.tuners.lora.layer").ParamWrapper = kind  # type: ignore[attr-defined]
