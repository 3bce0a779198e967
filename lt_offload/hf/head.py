"""Calls of the head by the losses of TRL, which multiply with its weight themselves.

TRL computes log-probabilities tile by tile from the head's weight, in the model's own forward: the module that is a
block here is never called, and its weight is on the host then. Within :func:`called` that forward gets a stand-in for
the head. The stand-in's weight claims the device of the blocks; where TRL's function would receive it, the head is
called and applies that function to its real weight. All other callers of ``get_output_embeddings`` get the head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lt_offload.compat.hugging_face import CHUNKED_LOG_PROBS, FUSED_FORWARD
from lt_offload.machine.replaced import Replaced
from lt_offload.model.compiled import cover

_MODULE = "trl.trainer.utils"
_FUSED = "fused"
"""A mark of calls of a head that apply TRL's function."""


class HeadWeight:
    """A stand-in for the weight of ``head``, which runs on ``device`` and is to be called."""

    def __init__(self, head: nn.Module, device: torch.device) -> None:
        self.head, self.device = head, device


def _calling(original: Any) -> type[Any]:
    """Return a replacement of TRL's function."""

    class Function:
        @staticmethod
        def apply(hidden: Any, weight: Any, bias: Any, *others: Any) -> Any:
            """Call the head if ``weight`` is the stand-in of one, TRL's function otherwise."""
            if not isinstance(weight, HeadWeight):
                return original.apply(hidden, weight, bias, *others)
            return weight.head(hidden, _FUSED, *others)

    return Function


_FUNCTION = Replaced(lambda: sys.modules[_MODULE], CHUNKED_LOG_PROBS, _calling)


@contextmanager
def called(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let TRL's losses of ``model`` call its head, which runs on ``device``, within the context."""
    fused = [module for module in model.modules() if _is_fused(module)]
    if not fused:
        yield
        return
    with ExitStack() as undo:
        undo.enter_context(_FUNCTION.active())
        for module in fused:
            head = module.get_output_embeddings()  # type: ignore[operator]
            undo.callback(cover(head, "forward", _fusing(head, head.forward)))
            told = SimpleNamespace(weight=HeadWeight(head, device), bias=None)
            undo.callback(cover(module, "get_output_embeddings", _heads(module, told)))
        yield


def _is_fused(module: nn.Module) -> bool:
    """Return whether TRL has given ``module`` its forward, which may lie below one of accelerate's."""
    forward = vars(module).get("forward")
    while forward is not None:
        code = getattr(getattr(forward, "__func__", forward), "__code__", None)
        if code is not None and code.co_name == FUSED_FORWARD:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _heads(module: nn.Module, told: SimpleNamespace) -> Callable[[], Any]:
    original: Any = module.get_output_embeddings

    def get_output_embeddings() -> Any:
        caller = sys._getframe(1)
        ours = caller.f_code.co_name == FUSED_FORWARD and caller.f_globals.get("__name__") == _MODULE
        return told if ours else original()

    return get_output_embeddings


def _fusing(head: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward of ``head`` that applies TRL's function where it is asked to."""

    def fusing(hidden: Any, *others: Any) -> Any:
        if not others or not isinstance(others[0], str):
            return forward(hidden, *others)
        return _FUNCTION.original.apply(hidden, head.weight, getattr(head, "bias", None), *others[1:])

    return fusing
