"""The models beside the one that is trained: a reference, a teacher. They stay on the host, too.

Their blocks get their weights when they are called and give them back afterwards; the profile's step calls them as the
training does, so that a plan knows what that takes. On the emulated device, where both are RAM, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lt_offload.errors import UnsupportedError
from lt_offload.execute.memory.groups import move_rest
from lt_offload.hf import head
from lt_offload.model.blocks import Block, find_blocks
from lt_offload.model.compiled import called, intercept
from lt_offload.model.location import located, staged
from lt_offload.model.quantized import tensors_of
from lt_offload.model.state.handed import Handed


def at_home(model: nn.Module) -> nn.Module:
    """Return ``model`` on the host: TRL loads the reference that it makes to a GPU, where no plan has room for it."""
    places = set(getattr(model, "hf_device_map", {}).values())
    if len(places) > 1 or getattr(model, "is_quantized", False):
        return model  # such a model cannot be moved
    return model.to("cpu")


@contextmanager
def computing(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let ``model``, which is on the host, run on ``device`` within the context, block by block, without gradients."""
    if device.type == "cpu":
        yield
        return
    structure = find_blocks(model)
    with ExitStack() as undo:
        undo.enter_context(head.called(model, device))
        undo.enter_context(located(model, device))
        # Before anything is moved, so that a failure half way is undone as well.
        undo.callback(move_rest, model, structure, torch.device("cpu"))
        move_rest(model, structure, device)
        for block in structure.blocks:
            undo.callback(intercept(block.module, _staging(block, called(block.module), device)))
        yield


def _staging(block: Block, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"block {block.name} of a second model was called with gradients, when its weights will be on the host "
                "by then; call that model under torch.no_grad(), or move it to the device yourself"
            )
        handed = Handed(args, kwargs)
        handed.bring(block, device)
        with staged(tensors_of(block.module), device):
            return handed.returned(handed.around(forward)(*handed.args, **handed.kwargs))

    return run
