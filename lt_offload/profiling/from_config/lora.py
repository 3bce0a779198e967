"""The layers of LoRA as peft makes them, on the meta device: planning alone needs no peft.

Names, shapes, dtypes and operations are peft's; a test compares whole profiles. What is rare (DoRA, modules that are
trained beside the adapters, arguments that no recipe has) is left to peft itself.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.compat.torch import children_of
from lt_offload.errors import ConfigError
from lt_offload.model.quantized import is_packed

_KNOWN = {"r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias", "task_type"}
_ALL = "all-linear"


class _Lora(nn.Module):
    """A linear layer beside which a product of two small ones is added to what it returns."""

    def __init__(self, base: Any, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base
        rows, columns = _shape(base) or (0, 0)
        dtype = base.weight.dtype if base.weight.dtype == torch.float64 else torch.float32
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout) if dropout else nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, rank, bias=False, dtype=dtype)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, rows, bias=False, dtype=dtype)})
        self.scaling = scaling
        self.packed = is_packed(base.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of peft's layer, by the same operations; nothing lives longer than there."""
        result: Tensor = self.base_layer(x)
        dtype = result.dtype
        if self.packed:
            # As peft does, which is wary of backwards through a view that is written to.
            result = result.clone()
        down: Any = self.lora_A["default"]
        up, dropout = self.lora_B["default"], self.lora_dropout["default"]
        if not self.packed:
            x = x.to(down.weight.dtype)
            result = result + up(down(dropout(x))) * self.scaling
            return result.to(dtype)
        casts = not torch.is_autocast_enabled()
        if casts:
            x = x.to(down.weight.dtype)
        output: Tensor = up(down(dropout(x))) * self.scaling
        if casts:
            output = output.to(dtype)
        return result + output


class _Tuner(nn.Module):
    """Stands between a model and its adapters' owner, so that names are peft's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)


class AdaptedModel(nn.Module):
    """A model with adapters; whatever else it is asked for is its model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = _Tuner(model)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # By the dictionary: asked as an attribute while it is missing (in copies), it would come here again,
            # without end.
            return getattr(children_of(self)["base_model"].model, name)

    def get_base_model(self) -> nn.Module:
        """Return the model that has the adapters in it."""
        base: nn.Module = self.base_model.get_submodule("model")
        return base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.base_model(*args, **kwargs)


def with_planned_lora(model: nn.Module, arguments: Mapping[str, Any]) -> nn.Module:
    """Return ``model``, which is on meta, with adapters to plan with, everything else frozen.

    Args:
        model: a Hugging Face model.
        arguments: of ``peft.LoraConfig``.

    Raises:
        ConfigError: if no layer is meant, or the arguments are some that only peft understands, and it is not there.
    """
    # None and False are what an argument that is left out means.
    settings = {key: value for key, value in arguments.items() if value not in (None, False)}
    rank, names = settings.get("r", 8), settings.get("target_modules")
    if names is None or not set(settings) <= _KNOWN:
        return _by_peft(model, arguments)
    targets = list(_targets(model, names))
    if not targets:
        raise ConfigError(
            f"target_modules={names!r} are no layers of {type(model).__name__}; all-linear takes them all"
        )
    if not all(_shape(layer) for _, layer in targets):
        return _by_peft(model, arguments)
    scaling = settings.get("lora_alpha", 8) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    bias = settings.get("bias", "none")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bias == "all" and name.rpartition(".")[2] == "bias")
    with torch.device("meta"):
        for name, layer in targets:
            new = _Lora(layer, rank, scaling, settings.get("lora_dropout", 0.0)).train(layer.training)
            if bias == "lora_only" and new.base_layer.bias is not None:
                new.base_layer.bias.requires_grad_()
            model.set_submodule(name, new)
    return AdaptedModel(model)


def _targets(model: nn.Module, names: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers that ``names`` name by peft's rules."""
    everything = isinstance(names, str) and names.lower() == _ALL
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        if everything:
            wanted = bool(_shape(module)) and module is not output
        elif isinstance(names, str):
            wanted = re.fullmatch(names, name) is not None
        else:
            wanted = any(name == one or name.endswith(f".{one}") for one in names or ())
        if wanted:
            yield name, module


def _shape(layer: Any) -> tuple[int, int] | None:
    """Return the output and input width of a linear layer; None if it is none."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    if type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils":
        columns, rows = layer.weight.shape
        return rows, columns
    return None


def _by_peft(model: nn.Module, arguments: Mapping[str, Any]) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError(
            f"lora={dict(arguments)!r} is planned with the package peft, which is not installed: pip install peft; "
            "target_modules that are linear layers, without DoRA and modules_to_save, need none"
        ) from None
    with warnings.catch_warnings():  # peft asks transformers with a name that is going away
        warnings.simplefilter("ignore", FutureWarning)
        adapted: nn.Module = get_peft_model(model, LoraConfig(**arguments), low_cpu_mem_usage=True)
    return adapted
