"""Storage forms of frozen weights: what is kept and what travels are pieces, which the computation opens.

To profile, plan and engine the pieces of a weight are frozen parameters of a block like any other, and opening them is
a part of its computation: measured, planned and counted with it. :func:`store_weights` changes a model so, and the
changed model in plain PyTorch defines the numbers.

Linear layers (``layer.py``) and the experts of transformers (``experts.py``) can have stored weights. Embeddings and
the output projection stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from lt_offload.errors import ConfigError
from lt_offload.model.forms.adapters import adapt_stored_experts
from lt_offload.model.forms.base import Form
from lt_offload.model.forms.experts import compute_stored, experts_in, open_experts
from lt_offload.model.forms.fp8 import FP8
from lt_offload.model.forms.int8 import Int8
from lt_offload.model.forms.layer import Stored, StoredLinear, put, stored_of
from lt_offload.model.forms.mxfp4 import MXFP4
from lt_offload.model.forms.nf4 import NF4

FORMS: dict[str, Form] = {form.name: form for form in (NF4(), Int8(), FP8(), MXFP4())}


def form_named(name: object, setting: str = "quantize") -> Form:
    """Return the form that is called ``name``; raises ``ConfigError`` if there is none, or its package is missing."""
    if not isinstance(name, str) or name not in FORMS:
        raise ConfigError(f"{setting}={name!r} is not known; use {', '.join(FORMS)}, or set it to null")
    form = FORMS[name]
    if form.needs and find_spec(form.needs) is None:
        raise ConfigError(f"{setting}={name} needs the package {form.needs}: pip install {form.needs}")
    return form


def store_weights(model: nn.Module, form: str, *, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Let the weights of linear layers and of experts in ``model`` be stored in ``form``, frozen, from now on.

    Embeddings, the output projection, norms and biases stay as they are, and so do matrices that the form cannot take.
    A layer computes with the opened numbers, in the dtype of its input. Adapters are added to the changed model.

    ======== ======================================================================================= ================
    form     definition                                                                              bits per number
    ======== ======================================================================================= ================
    nf4      four bits, a scale per 64 numbers, scales in eight bits, as bitsandbytes (QLoRA)        4.13
    mxfp4    four bits (e2m1), a power of two per 32 numbers of a row, as gpt-oss                    4.25
    fp8      eight bits (e4m3), a scale per square of 128 x 128, as DeepSeek and Qwen                8.00
    int8     eight bits, a scale per row                                                             8 and 32 per row
    ======== ======================================================================================= ================

    Args:
        model: with its weights anywhere; also without memory for them (``meta``). A GPU does the work if there is one.
        form: name of the form.
        dtype: of the numbers before they are stored and after :func:`open_weights`; None: that of each weight.

    Returns:
        The names of the weights that are stored now.

    Raises:
        ConfigError: if there is no such form, its package is not installed, or most weights cannot be stored.
    """
    chosen = form_named(form, "form")
    stored = tuple(name for name, _ in close_weights(model, chosen, check_weights(model, chosen), dtype=dtype))
    for name in stored:
        module, _, weight = name.rpartition(".")
        assert weight in stored_of(model.get_submodule(module))
    return stored


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


def check_weights(model: nn.Module, form: Form) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the weights that ``form`` can take, and those that it refuses, by name with the reason.

    Raises:
        ConfigError: if it cannot take most numbers of ``model``.
    """
    taken: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    outside = {id(parameter) for parameter in _kept(model)}
    done = sum(number(stored) for module in model.modules() for stored in stored_of(module).values())
    outside |= {id(p) for module in model.modules() if stored_of(module) for p in module.parameters(recurse=False)}
    for name, module, weight in weights_in(model):
        parameter: Tensor = getattr(module, weight)
        why = form.refuses(_described(module, parameter, form, None).matrix)
        (refused if why else taken).append((name, why))
        if not why:
            outside.add(id(parameter))
            done += parameter.numel()
    others = [(name, p) for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in outside]
    if sum(p.numel() for _, p in others) >= done:
        name, largest = max(others, key=lambda item: item[1].numel(), default=("none", None))
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__ if largest is not None else "nothing"
        why = dict(refused).get(name)
        raise ConfigError(
            f"quantize={form.name!r}: most weights of {type(model).__name__} are neither of an nn.Linear nor of experts "
            f"that can be stored so (the largest, {name}, is in a {kind}{f', with {why}' if why else ''}); set it to "
            "null, or use a model whose layers are"
        )
    return taken, refused


def number(stored: Stored) -> int:
    """Return how many numbers a stored weight has."""
    return torch.Size(stored.shape).numel()


def close_weights(
    model: nn.Module,
    form: Form,
    checked: tuple[list[tuple[str, str]], list[tuple[str, str]]],
    *,
    dtype: torch.dtype | None = None,
    release: Callable[[Tensor], None] = lambda weight: None,
) -> Iterator[tuple[str, Stored]]:
    """Store the weights of ``model`` that :func:`check_weights` has returned, and yield each when it is.

    One at a time: ``release`` is told of each weight that is not needed any more.
    """
    worker = torch.device("cuda") if torch.cuda.is_available() else None
    for name, _ in checked[0]:
        module, _, weight = name.rpartition(".")
        owner = model.get_submodule(module)
        parameter = getattr(owner, weight)
        stored = _described(owner, parameter, form, dtype)
        with torch.no_grad():
            pieces = stored.close(parameter.detach(), worker or parameter.device)
        if isinstance(owner, nn.Linear):
            owner.bias = None if owner.bias is None else owner.bias.requires_grad_(False)
            model.set_submodule(module, StoredLinear(owner, stored, pieces))
        else:
            delattr(owner, weight)
            put(owner, weight, stored, pieces)
            compute_stored(owner)
            for other in owner.parameters():
                other.requires_grad_(False)
            adapt_stored_experts()
        release(parameter.detach())
        del parameter
        yield name, stored


def open_weights(model: nn.Module) -> nn.Module:
    """Let stored weights of ``model`` be ordinary, frozen ones again, with the numbers that were kept; return it.

    Adapters stay, and can be merged as those of any model.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, StoredLinear):
            model.set_submodule(name, module.opened())
        elif stored_of(module):
            open_experts(module)
    return model


def is_stored(model: nn.Module) -> bool:
    """Return whether a module of ``model`` has stored weights."""
    return any(map(stored_of, model.modules()))


def _described(module: nn.Module, weight: Tensor, form: Form, dtype: torch.dtype | None) -> Stored:
    transposed = weight.dim() == 3 and bool(module.is_transposed)
    return Stored(form, tuple(weight.shape), dtype or weight.dtype, transposed=transposed)


def _kept(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of embeddings and of the output projection."""
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        layer = getattr(model, getter, lambda: None)()
        if isinstance(layer, nn.Module):
            yield from layer.parameters()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield from module.parameters()
