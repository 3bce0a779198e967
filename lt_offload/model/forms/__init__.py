"""Storage forms of frozen weights: what is kept and what travels are pieces, which the computation opens.

To profile, plan and engine the pieces of a weight are frozen parameters of a block like any other, and opening them is
a part of its computation: measured, planned and counted with it. :func:`store_weights` changes a model so, and the
changed model in plain PyTorch defines the numbers.

Linear layers (``layer.py``) and the experts of transformers (``experts.py``) can have stored weights. Embeddings and
the output projection stay as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.arguments import checked
from lt_offload.compat.peft import has_adapters
from lt_offload.errors import ConfigError
from lt_offload.model.forms.adapters import adapt_stored
from lt_offload.model.forms.base import StorageForm
from lt_offload.model.forms.experts import compute_stored, experts_in, open_experts
from lt_offload.model.forms.fp8 import FP8
from lt_offload.model.forms.int8 import Int8
from lt_offload.model.forms.layer import Stored, StoredLinear, pieces_of, put, stored_of, take
from lt_offload.model.forms.lossless import Lossless
from lt_offload.model.forms.mxfp4 import MXFP4
from lt_offload.model.forms.nf4 import NF4
from lt_offload.units import dtype_name

FORMS: dict[str, StorageForm] = {form.name: form for form in (NF4(), MXFP4(), FP8(), Int8(), Lossless())}


def form_named(name: object, setting: str = "quantize") -> StorageForm:
    """Return the form that is called ``name``; raises ``ConfigError`` if there is none, or its package is missing."""
    if not isinstance(name, str) or name not in FORMS:
        unset = "" if setting == "form" else ", or set it to null"
        raise ConfigError(f"{setting}={name!r} is not known; use {', '.join(FORMS)}{unset}")
    form = FORMS[name]
    if form.needs and find_spec(form.needs) is None:
        raise ConfigError(f"{setting}={name} needs the package {form.needs}: pip install {form.needs}")
    return form


@checked
def store_weights(model: nn.Module, form: str, *, dtype: str | torch.dtype | None = None) -> tuple[str, ...]:
    """Let the weights of linear layers and of experts in ``model`` be stored in ``form``, frozen, from now on.

    Embeddings, the output projection, norms and biases stay as they are, and so do matrices that the form cannot take,
    and those that a model is shipped without (``modules_to_not_convert`` in its configuration).
    A layer computes with the opened numbers, in the dtype of its input. Adapters are added to the changed model, and
    saved with ``save_pretrained`` of theirs. That of the model itself is refused: call :func:`open_weights` before.

    ======== ======================================================================================= ================
    form     definition                                                                              bits per number
    ======== ======================================================================================= ================
    nf4      four bits, a scale per 64 numbers, scales in eight bits, as bitsandbytes (QLoRA)        4.13
    mxfp4    four bits (e2m1), a power of two per 32 numbers of a row, as gpt-oss                    4.25
    fp8      eight bits (e4m3), a scale per square of 128 x 128, as DeepSeek and Qwen                8.00
    int8     eight bits, a scale per row                                                             8 and 32 per row
    lossless bfloat16, bit for bit: seven exponents in three bits, others in a byte                  11.3
    ======== ======================================================================================= ================

    Args:
        model: with its weights anywhere; also without memory for them (``meta``). A GPU does the work if there is one.
        form: name of the form.
        dtype: of the numbers before they are stored and after :func:`open_weights`, as PyTorch has it or by name; None:
            that of each weight.

    Returns:
        The names of the weights that are stored now.

    Raises:
        ConfigError: if there is no such form, its package is not installed, most weights cannot be stored, or the model
            has adapters already.
    """
    chosen, numbers = form_named(form, "form"), getattr(torch, dtype_name(dtype), None)
    if dtype is not None and not (isinstance(numbers, torch.dtype) and numbers.is_floating_point):
        raise ConfigError(f"dtype={dtype!r} is no dtype of weights; use 'float32', 'bfloat16' or 'float16'")
    return tuple(close_weights(model, chosen, check_weights(model, chosen, numbers, "form"), dtype=numbers))


def weights_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the weights of ``model`` that may be stored, by name, each with its module and its name there."""
    kept = {id(parameter) for parameter in _kept(model)}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and id(module.weight) not in kept:
            yield f"{name}.weight", module, "weight"
    for name, module, weights in experts_in(model):
        for weight in weights:
            parameter = getattr(module, weight, None)
            if isinstance(parameter, nn.Parameter) and weight not in stored_of(module):
                yield f"{name}.{weight}", module, weight


@dataclass(frozen=True, slots=True)
class Checked:
    """The weights of a model that may be stored."""

    taken: list[str]
    """Names of those that the form can take."""
    refused: dict[str, str]
    """By name, why it cannot take another."""


def check_weights(
    model: nn.Module, form: StorageForm, dtype: torch.dtype | None = None, setting: str = "model.quantize"
) -> Checked:
    """Return the weights of ``model`` that ``form`` can take; raises ``ConfigError`` if most numbers are in others."""
    if has_adapters(model):
        raise ConfigError(
            f"{setting}={form.name}: {type(model).__name__} has adapters of peft already, which would be stored and "
            "frozen like other layers; store the weights of the model first, and add adapters then"
        )
    checked = Checked([], {})
    outside = {id(parameter) for parameter in _kept(model)}
    as_shipped = left_open(model)
    already = [stored for module in model.modules() for stored in stored_of(module).values()]
    done = sum(math.prod(stored.shape) for stored in already)
    outside |= {id(p) for module in model.modules() if stored_of(module) for p in module.parameters(recurse=False)}
    for name, module, weight in weights_in(model):
        parameter = getattr(module, weight)
        if as_shipped(name):
            outside.add(id(parameter))
            continue
        stored = described(module, parameter, form, dtype)
        why = form.refuses(stored.matrix, stored.dtype)
        if why:
            checked.refused[name] = why
            continue
        checked.taken.append(name)
        outside.add(id(parameter))
        done += parameter.numel()
    others = [(name, p) for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in outside]
    if sum(p.numel() for _, p in others) >= done:
        name, largest = max(others, key=lambda item: item[1].numel(), default=("none", None))
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__ if largest is not None else "nothing"
        why = f", with {checked.refused[name]}" if name in checked.refused else ""
        instead = "leave the model as it is" if setting == "form" else "set it to null"
        if form.name == "lossless" and any("not of bfloat16" in reason for reason in checked.refused.values()):
            instead += ", load it in bfloat16 (dtype=torch.bfloat16), or use int8"
        else:
            instead += ", or use a model whose layers are"
        raise ConfigError(
            f"{setting}={form.name}: most weights of {type(model).__name__} are neither of an nn.Linear nor of experts "
            f"that can be stored so (the largest, {name}, is in a {kind}{why}); {instead}"
        )
    return checked


def close_weights(
    model: nn.Module,
    form: StorageForm,
    checked: Checked,
    *,
    dtype: torch.dtype | None = None,
    release: Callable[[Tensor], None] = lambda weight: None,
) -> Iterator[str]:
    """Store the weights of ``model`` that :func:`check_weights` has returned, and yield the name of each when it is.

    One at a time: ``release`` is told of each weight that is not needed any more.
    """
    worker = torch.device("cuda") if torch.cuda.is_available() else None
    by_weight: dict[int, str] = {}
    first_names = {name: by_weight.setdefault(id(model.get_parameter(name)), name) for name in checked.taken}
    for name in checked.taken:
        module, _, weight = name.rpartition(".")
        owner = model.get_submodule(module)
        if first_names[name] != name:  # tied: the pieces are the same ones, too
            other, _, its_weight = first_names[name].rpartition(".")
            source = model.get_submodule(other)
            put_weight(model, name, stored_of(source)[its_weight], pieces_of(source, its_weight))
            yield name
            continue
        matrices: Tensor = getattr(owner, weight)
        stored = described(owner, matrices, form, dtype)
        with torch.no_grad():
            pieces = stored.close(matrices.detach(), worker or matrices.device)
        put_weight(model, name, stored, pieces)
        release(matrices.detach())
        del matrices
        yield name


def put_weight(model: nn.Module, name: str, stored: Stored, pieces: Sequence[Tensor]) -> None:
    """Let the weight of ``model`` that is called ``name`` be stored, as ``pieces``."""
    module, _, weight = name.rpartition(".")
    owner = model.get_submodule(module).requires_grad_(False)
    adapt_stored()
    put(owner, weight, stored, pieces)
    if isinstance(owner, nn.Linear):
        owner.__class__ = StoredLinear
    else:
        compute_stored(owner)


def open_weights(model: nn.Module) -> nn.Module:
    """Let stored weights of ``model`` be ordinary, frozen ones again, with the numbers that were kept; return it.

    Adapters stay, and can be merged as those of any model.
    """
    opened: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, StoredLinear):
            take(module, "weight", opened)
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif stored_of(module):
            open_experts(module)
    return model


def is_stored(model: nn.Module) -> bool:
    """Return whether a module of ``model`` has stored weights."""
    return any(map(stored_of, model.modules()))


def described(module: nn.Module, weight: Tensor, form: StorageForm, dtype: torch.dtype | None = None) -> Stored:
    """Return how ``weight`` of ``module`` would be stored; ``dtype``: of its numbers, if they are to have another."""
    transposed = weight.dim() == 3 and bool(module.is_transposed)
    return Stored(form, tuple(weight.shape), dtype or weight.dtype, transposed=transposed)


def left_open(model: nn.Module) -> Callable[[str], bool]:
    """Return what says of a name whether a model that is shipped in a storage form has this part as it is."""
    settings: Any = getattr(getattr(model, "config", None), "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    listed = [*(settings.get("modules_to_not_convert") or ()), *(settings.get("llm_int8_skip_modules") or ())]
    patterns = [re.compile(rf"(.*\.)?{pattern}(\..*)?") for pattern in listed]
    return lambda name: any(pattern.fullmatch(name) for pattern in patterns)


def _kept(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of embeddings and of the output projection."""
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        layer = getattr(model, getter, lambda: None)()
        if isinstance(layer, nn.Module):
            yield from layer.parameters()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield from module.parameters()
