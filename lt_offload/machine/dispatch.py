"""Dispatch modes beside ``torch.compile``: Dynamo skips their handlers, and they see the buffers of compiled code.

A dispatch mode sees every operation of eager torch. Compiled code allocates by functions of its own, which no mode
sees, and Dynamo would trace a mode's Python handler as if it were part of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_guards: Any = torch._C._dynamo.guards
_eval_frame: Any = torch._C._dynamo.eval_frame
_Mode = TypeVar("_Mode", bound=TorchDispatchMode)


def unseen_by_dynamo(mode: type[_Mode]) -> type[_Mode]:
    """Keep ``torch.compile`` out of what a dispatch mode does at each operation, at no cost (a class decorator).

    torch keeps it out by wrapping the handler in ``torch._dynamo.disable``, which takes as long as the dispatch itself.
    Here the handler's code object is marked instead, as ``torch._dynamo`` marks its own.
    """
    handler = getattr(mode.__torch_dispatch__, "__wrapped__", None)
    if handler is not None:
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(handler.__code__, _eval_frame._FrameExecStrategy(skip, skip))
        mode.__torch_dispatch__ = handler  # type: ignore[method-assign]
    return mode


def _empty_strided_on(device: str) -> Callable[..., Tensor]:
    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty_strided


_NAMES = {device: f"empty_strided_{device}" for device in ("cpu", "cuda")}
_HIDDEN = {name: getattr(_guards, f"_{name}") for name in _NAMES.values()}
_SHOWN = {name: _empty_strided_on(device) for device, name in _NAMES.items()}
_watchers = 0


def show_buffers() -> Callable[[], None]:
    """Let dispatch modes see the buffers that compiled code makes for itself; return a function that ends it.

    Generated code calls allocation functions of its own, which no dispatch mode sees: those are replaced.
    """
    global _watchers
    _watchers += 1
    if _watchers == 1:
        _allocate_with(_SHOWN)

    def undo() -> None:
        global _watchers
        _watchers -= 1
        if _watchers == 0:
            _allocate_with(_HIDDEN)

    return undo


def _allocate_with(functions: dict[str, Callable[..., Tensor]]) -> None:
    """Replace the allocation functions, for code that is generated from now on and in code that was generated."""
    for name, function in functions.items():
        setattr(_guards, f"_{name}", function)
    codecache = sys.modules.get("torch._inductor.codecache")
    for generated in codecache.PyCodeCache.modules if codecache is not None else ():
        for name in functions.keys() & vars(generated).keys():
            setattr(generated, name, functions[name])
