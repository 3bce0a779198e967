"""Refusals of steps that write weights, or that torch itself does not let run in this way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload import limits
from lt_offload.compat.torch import (
    address_of,
    has_storage,
    schema_of,
)
from lt_offload.machine.dispatch import OperationMode, called_unseen, calls_others, writes
from lt_offload.model.blocks import Structure


class WrittenWeights(OperationMode):
    """Refuses a step that writes weights, by ``.data`` as well, which moves no version."""

    def __init__(self, structure: Structure) -> None:
        super().__init__()
        self._weights = dict([*structure.tensors, *structure.rest])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # PEFT's parametrization around each forward of experts with adapters gives a weight the memory that it has.
        same = func is torch.ops.aten.set_.source_Tensor and args[0].is_set_to(args[1])
        if schema_of(func).is_mutable and not same:
            for position, argument in enumerate((*args, *kwargs.values())):
                if writes(func, position, len(args), kwargs):
                    self._check(func, argument if isinstance(argument, (list, tuple)) else [argument])
        return called_unseen(func, *args, **kwargs) if calls_others(func) else func(*args, **kwargs)

    def _check(self, func: Any, written: Sequence[Any]) -> None:
        memory = {address_of(tensor.untyped_storage()) for tensor in written if type(tensor) in (Tensor, nn.Parameter)}
        for name, weight in self._weights.items():
            if has_storage(weight) and address_of(weight.untyped_storage()) in memory:
                raise limits.WRITTEN_WEIGHTS.error(f"weight {name} is written by {func} within the step")


@contextmanager
def runnable(structure: Structure) -> Iterator[None]:
    """Refuse by name TorchScript, and transforms that torch does not let run with hooks, in the steps enclosed."""
    for block in structure.blocks:
        for name, module in block.module.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                path = ".".join(filter(None, (block.name, name)))
                raise limits.SCRIPTED.error(f"module {path}, a {type(module).__name__} of torch.jit")

    def refuse(function: Any, *_args: Any, **_kwargs: Any) -> None:
        name = function.qualified_name.removeprefix("__torch__.")
        raise limits.SCRIPTED.error(f"function {name}, of torch.jit")

    scripted: Any = torch.jit.ScriptFunction
    call, scripted.__call__ = scripted.__call__, refuse
    try:
        yield
    except RuntimeError as error:
        # Blocks have no graph here that a step could differentiate through: torch finds no way.
        if "differentiated Tensor" in str(error):
            raise limits.PARTIAL_BACKWARD.error("the step calls torch.autograd.grad") from error
        if "torch.func" in str(error) and "saved tensor hooks" in str(error):
            raise limits.TRANSFORMED_INSIDE.error("a block calls torch.func.grad, vjp, jacrev or hessian") from error
        raise
    finally:
        scripted.__call__ = call
