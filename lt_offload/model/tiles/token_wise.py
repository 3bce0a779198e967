"""The search for parts of a model that treat each token on its own: it runs them on a few tokens.

What depends on the input of a module is followed through its operations. Those that are known to keep tokens apart are
few (products with weights, functions of each number, norms and sums over what a token has); any other refuses.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import address_of, all_hooks_of, schema_of
from lt_offload.machine.accounting import storage_bytes, tensors_in
from lt_offload.machine.dispatch import OperationMode
from lt_offload.model.blocks import find_blocks
from lt_offload.model.state.generators import drawing, states_for

_SAMPLES, _TOKENS = 3, 7
"""The form of the input on which modules are tried."""
_WIDTHS = 4
"""So many widths of it are tried: those of the module's weights."""
_WORTH = 1.25
"""A module is tiled if it saves more than so many times its input."""


class _MixesError(Exception):
    """Tokens are mixed, or it is not known that they are not."""


def modules_of(model: nn.Module, blocks: str | None) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the modules to be tiled, and whether each may draw random numbers."""
    known: dict[Any, bool | None] = {}
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    waiting = [block.module for block in reversed(find_blocks(model, blocks).blocks) if block.kind != "head"]
    seen = set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        waiting += reversed([*module.children()])
        # In tiles, hooks of what is inside would see tiles, twice.
        if any(any(all_hooks_of(other)) for other in module.modules() if other is not module):
            continue
        kind = _kind(module)
        if kind not in known:
            known[kind] = _tried(module, dtype)
        draws = known[kind]
        if draws is not None:
            # A dropout of 0 draws nothing yet.
            yield module, draws or any(isinstance(other, nn.Dropout) for other in module.modules())


def _kind(module: nn.Module) -> Any:
    """Return what two modules have in common that are of one kind: classes, sizes and what they may decide by."""
    tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    settings = [
        (name, value)
        for other in module.modules()
        for name, value in vars(other).items()
        if value is None or isinstance(value, (bool, int, float, str)) or inspect.isfunction(value)
    ]
    return type(module), repr(module), tuple(tensors), tuple(settings)


def _tried(module: nn.Module, dtype: torch.dtype) -> bool | None:
    """Return whether ``module`` may draw random numbers; None: it cannot be tiled, or need not be.

    ``dtype``: of what blocks hand on.
    """
    weights = [*module.parameters()]
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # no function of Python
        return None
    inputs = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if type(module) is nn.Linear or not weights or not 1 <= len(inputs) <= 2:
        return None
    features = [getattr(other, "in_features", None) for other in module.modules()]
    sizes = [size for size in features if size] + [size for p in weights for size in reversed(p.shape[-2:])]
    # Layers of four bits, for example, note the dtype of the first input that they see.
    before = [(vars(other), dict(vars(other))) for other in module.modules()]
    try:
        for state, _ in before:
            state["training"] = True
        for width in [*dict.fromkeys(sizes)][:_WIDTHS]:
            x = torch.zeros(_SAMPLES, _TOKENS, width, dtype=dtype, device=weights[0].device)
            try:
                with drawing([x.device], states_for(x)):
                    return _TokenWise.check(module, [x.clone() for _ in inputs])
            except _MixesError:
                return None
            except Exception:  # not its width, or not its kind of input: whatever it says
                continue
    finally:
        for state, known in before:
            state.clear()
            state.update(known)
    return None


_ALONE = {"_to_copy", "alias", "detach", "lift_fresh", "copy_", "fill_", "zero_", "bernoulli_", "native_dropout"}
_ALONE |= {"zeros_like", "ones_like", "full_like", "rand_like", "empty_like"}
"""Operations on each number alone that torch does not mark as such."""
_FORMS = {"view", "_unsafe_view", "reshape", "expand", "_reshape_alias"}
"""Operations that keep the order of numbers: tokens stay the first dimensions if these have the sizes for it."""
_ALONG = {"mean", "sum", "amax", "amin", "var", "std", "var_mean", "linalg_vector_norm", "_softmax", "_log_softmax"}
_ALONG |= {"cat", "stack", "split", "split_with_sizes", "chunk", "unbind", "slice", "select", "squeeze", "unsqueeze"}
_ALONG |= {"transpose", "glu", "topk", "sort", "argmax", "cumsum"}
"""Operations along dimensions that are arguments."""
_NORMS = {"native_layer_norm", "_fused_rms_norm"}
_PRODUCTS = {"mm": 0, "addmm": 1, "linear": 0, "gemm_4bit": 0}
"""Products, with the position of the matrix that has a row per token."""


class _TokenWise(OperationMode):
    """Follows what depends on the inputs of a module through its operations, and refuses what may mix tokens.

    Of all that depends on them tokens are the first dimensions: samples and tokens, or one for both.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._weights = {*module.parameters()}
        self._inputs = {address_of(x.untyped_storage()) for x in inputs}
        self._alive = [*inputs]
        """Tensors that depend on the inputs, for as long as addresses of storages shall tell."""
        self._known = set(self._inputs)
        self._own: set[int] = set()
        """Storages that operations have made of other things than tokens, as opened weights are."""
        self._blank: set[int] = set()
        """Storages without numbers yet, which code that no mode sees might write."""
        self.draws = False

    @classmethod
    def check(cls, module: nn.Module, inputs: list[Tensor]) -> bool | None:
        """Return whether ``module`` may draw; None if it saves too little. ``_MixesError`` if it cannot be tiled."""
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.detach())
            return saved[-1]

        for x in inputs:
            x.requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.enable_grad(), hooks, cls(module, inputs) as mode:
            out = module.forward(*inputs)  # without its hooks
        if not isinstance(out, Tensor) or not mode._depends(out) or out.shape[:-1] != inputs[0].shape[:-1]:
            raise _MixesError("it returns something else than one tensor")
        own = storage_bytes(tensor for tensor in saved if mode._depends(tensor))
        return mode.draws if own > _WORTH * storage_bytes(inputs) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation if it is known to treat each token alone; raises ``_MixesError`` otherwise."""
        tensors = [*tensors_in((args, kwargs or {}))]
        depending = [x for x in tensors if self._depends(x)]
        strange = [x for x in tensors if x.requires_grad and x.is_leaf and x not in self._weights]
        if func.namespace != "prim" and any(not self._depends(x) for x in strange):
            raise _MixesError(f"{schema_of(func).name} has a weight of another module, which would get no gradient")
        schema = schema_of(func)
        named = {a.name: a.default_value for a in schema.arguments}
        named |= dict(zip(named, args, strict=False)) | (kwargs or {})
        outs = [named[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written = {address_of(x.untyped_storage()) for x in tensors_in(outs)}
        if written - self._known - (self._own if not depending else set()) or written & self._inputs:
            raise _MixesError(f"{schema.name} writes to what is not the module's own")
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded and not depending:
            raise _MixesError(f"{schema.name} draws for all tokens")
        if not depending or func.namespace == "prim":  # fake tensors are asked for their device
            out = func(*args, **(kwargs or {}))
            if all(result.alias_info is None for result in schema.returns):
                self._alive += tensors_in(out)
                self._own |= {address_of(result.untyped_storage()) for result in tensors_in(out)}
            return out
        name = schema.name.partition("::")[2]
        blank = {address_of(x.untyped_storage()) for x in depending} & self._blank
        if blank and not (blank == written and name in ("bernoulli_", "copy_", "fill_", "zero_")):
            raise _MixesError(f"{schema.name} reads what no operation has written")
        self._blank -= blank
        self.draws |= seeded
        lead, longest = self._lead(depending[0]), max(x.ndim for x in depending)
        others = [x for x in tensors if not self._depends(x)]
        if name in _ALONE or torch.Tag.pointwise in func.tags:
            same = all(x.ndim == longest and self._lead(x) == lead for x in depending)
            # Aligned at the last dimension, where a table of positions would reach those of tokens.
            alone = same and all(math.prod(x.shape[: max(0, x.ndim - longest + lead)]) == 1 for x in others)
        elif name in _ALONG:
            dims = [value for key, value in named.items() if key in ("dim", "dim0", "dim1") and value is not None]
            flat = [dim for value in dims for dim in (value if isinstance(value, (list, tuple)) else [value])]
            last = longest + (name in ("unsqueeze", "stack"))
            alone = bool(flat) and not others and all(dim % last >= lead for dim in flat)
        elif name in _NORMS:
            alone = self._depends(args[0]) and len(depending) == 1 and len(args[1]) <= longest - lead
        elif name in _PRODUCTS:
            alone = self._depends(args[_PRODUCTS[name]]) and len(depending) == 1 and longest > lead
            alone &= name != "addmm" or args[0].ndim == 1
        else:
            alone = name in _FORMS
        if not alone:
            raise _MixesError(schema.name)
        out = func(*args, **(kwargs or {}))
        for result in tensors_in(out):
            self._lead(result)
            if name in _FORMS and name != "expand" and result.numel() != depending[0].numel():
                raise _MixesError(schema.name)
            self._alive.append(result)
            self._known.add(address_of(result.untyped_storage()))
            if name == "empty_like":
                self._blank.add(address_of(result.untyped_storage()))
        return out

    def _depends(self, x: Tensor) -> bool:
        return address_of(x.untyped_storage()) in self._known

    @staticmethod
    def _lead(x: Tensor) -> int:
        if x.shape[:2] == (_SAMPLES, _TOKENS):
            return 2
        if x.shape[:1] == (_SAMPLES * _TOKENS,):
            return 1
        raise _MixesError(f"a result of shape {list(x.shape)}")
