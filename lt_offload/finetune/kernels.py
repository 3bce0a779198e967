"""The kernels of a layer: one per operation, code that ``torch.compile`` makes for it, or Liger's.

Liger Kernel (Hsu et al., 2024) has Triton kernels that do with few operations what a layer does with many, forward and
backward, and save less in between: RMSNorm, and the activation of a gated MLP. They take the place of the ``forward``
of single modules here; nothing of transformers is replaced, which other models of the process share, so that rotary
embeddings stay as they are. The head's loss is planned anyway (``chunked_loss``).
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lt_offload.errors import ConfigError
from lt_offload.model.blocks import find_blocks
from lt_offload.model.compiled import KERNELS
from lt_offload.profiling.from_config.compiled import PlannedGated, PlannedNorm

if TYPE_CHECKING:
    from lt_offload.schema.profile import HardwareProfile

Kernels = Literal["auto", "liger"]

LIGER = "those of Liger for norms and gated MLPs"
"""What a plan, a summary and a checkpoint say."""

_GATED = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
"""Liger's activations, by their names in configurations."""


FAMILIES = dict.fromkeys(("gemma", "gemma2", "gemma3_text"), (1.0, "gemma"))
FAMILIES |= dict.fromkeys(("llama", "mistral", "phi3", "qwen2", "qwen3"), (0.0, "llama"))
"""Norms of models, by ``model_type``: a number that is added to the weight, and Liger's word for the part that is in
float32 (all of it, or the root of the mean of squares)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Functions:
    """Functions that replace operations of a layer."""

    norm: Callable[..., Tensor]
    """A function of the input, the weight, epsilon, the offset, the casts and whether to write over the gradient."""
    silu: Callable[[Tensor, Tensor], Tensor]
    """A function of the two halves of a gated MLP; its backward writes their gradients over them."""
    gelu: Callable[[Tensor, Tensor], Tensor]


PLANNED = Functions(norm=PlannedNorm.apply, silu=PlannedGated.apply, gelu=PlannedGated.apply)
"""Stand-ins on meta, so that a model can be planned."""


def check_kernels(kernels: Kernels | None, *, compiled: bool) -> None:
    """Raise ``ConfigError`` for a setting that is not known, or not possible beside compiled layers."""
    if kernels not in (None, "auto", "liger"):
        raise ConfigError(f"model.kernels={kernels!r} is not known; use auto or liger, or set it to null")
    if kernels == "liger" and compiled:
        raise ConfigError(
            "model.kernels=liger is not offered with model.compile_blocks=true, which fuses the same operations; set "
            "one of them back"
        )


def available(config: Any, device: torch.device | None) -> Functions | None:
    """Return Liger's kernels for a model of ``config`` on ``device`` if all that they need is here, else None.

    Where the package is installed beside a GPU and they are not used all the same, a message says why.
    """
    if device is None or device.type != "cuda" or not torch.cuda.is_available() or not _installed():
        return None
    reason = _unserved(device) or _unknown(config)
    if reason is None:
        try:
            return liger_functions(device.type)
        except (ImportError, AttributeError, RuntimeError) as error:  # of another version than its Triton or torch
            reason = f"liger-kernel cannot be imported: {error}"
    rank_zero_info(f"model.kernels=auto: layers compute as in transformers, not with Liger's kernels: {reason}")
    return None


def expected(config: Any, machine: HardwareProfile | None) -> bool:
    """Return whether :func:`available` would have kernels for ``config`` on ``machine``, with the packages of here.

    A machine that is only described has Triton and a compiler, and is served if it computes in bfloat16 (compute
    capability 8.0).
    """
    if machine is None or not machine.context_bytes or not _installed() or _unknown(config) is not None:
        return False
    if torch.cuda.is_available() and machine.name == torch.cuda.get_device_name():
        return _unserved(torch.device("cuda", torch.cuda.current_device())) is None
    return "bfloat16" in machine.flops_per_s


def _installed() -> bool:
    return find_spec("liger_kernel") is not None


def _unserved(device: torch.device) -> str | None:
    """Return what Triton lacks for ``device``, a GPU, in words; None if it is not known to lack anything."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "Triton is made for GPUs of compute capability 8.0 and later, this has {}.{}".format(*capability)
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not any(shutil.which(name) for name in _c_compilers()):
        return "Triton needs a C compiler, as gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python's headers, as of the package python3-dev"
    return None


def liger_functions(device: str | None) -> Functions:
    """Return Liger's kernels for layers that run on a ``device`` of that type, if that is known.

    Raises ``ConfigError`` without a GPU or the package.
    """
    if device not in (None, "cuda") or not torch.cuda.is_available():
        raise ConfigError("model.kernels=liger needs a GPU, for which Triton compiles them; set model.kernels=null")
    if not _installed():
        raise ConfigError(
            "model.kernels=liger needs the package liger-kernel: pip install lt-offload[liger], or set "
            "model.kernels=null"
        )
    ops: Any = import_module("liger_kernel.ops")
    return Functions(
        norm=ops.LigerRMSNormFunction.apply,
        silu=ops.LigerSiLUMulFunction.apply,
        gelu=ops.LigerGELUMulFunction.apply,
    )


def _unknown(config: Any) -> str | None:
    """Return what of a model of ``config`` has no kernels, in words, with what has some; None if it has them."""
    config = config.get_text_config()
    if config.model_type not in FAMILIES:
        return f"nothing for models of type {config.model_type!r}, but for {', '.join(FAMILIES)}"
    name = _activation(config)
    return None if name in _GATED else f"no gated {name}, but {', '.join(_GATED)}"


def _activation(config: Any) -> str:
    name: str = getattr(config, "hidden_activation", None) or config.hidden_act
    return name


def use_functions(model: Any, functions: Functions) -> None:
    """Let the norms and gated MLPs of ``model``, a Hugging Face model, compute with ``functions``.

    Raises ``ConfigError`` if there are none for this model.
    """
    if (lacking := _unknown(model.config)) is not None:
        raise ConfigError(f"model.kernels=liger has {lacking}; set model.kernels=null, or model.compile_blocks=true")
    config = model.config.get_text_config()
    family = FAMILIES[config.model_type]
    gated = functions.silu if _GATED[_activation(config)] == "silu" else functions.gelu

    def norm(self: Any, hidden_states: Tensor) -> Tensor:
        epsilon = getattr(self, "variance_epsilon", None) or self.eps
        # Never over the incoming gradient: another branch of the graph may read the same tensor.
        return functions.norm(hidden_states, self.weight, epsilon, *family, False)

    def mlp(self: Any, x: Tensor) -> Tensor:
        joint = hasattr(self, "gate_up_proj")
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if joint else (self.gate_proj(x), self.up_proj(x))
        result: Tensor = self.down_proj(gated(gate, up))
        return result

    for forward in (norm, mlp):
        setattr(forward, KERNELS, LIGER)
    for module in model.modules():
        for kind, forward in (("RMSNorm", norm), ("MLP", mlp)):
            if type(module).__name__.endswith(kind):  # a method of its own, which copies of the module get, too
                vars(module)["forward"] = MethodType(forward, module)


def _c_compilers() -> tuple[str, ...]:
    return os.environ.get("CC", "gcc"), "clang", "cc"


def compile_layers(model: nn.Module) -> None:
    """Let every layer of ``model`` be compiled at its first call, in place: names of parameters do not change.

    Raises ``ConfigError`` if ``torch.compile`` lacks Triton (with a GPU) or a compiler of C or C++.
    """
    names: tuple[str, ...]
    off = "or set model.compile_blocks=false"
    if torch.cuda.is_available():
        names, what = _c_compilers(), "a C compiler, as gcc, for Triton's kernels"
        if find_spec("triton") is None:
            raise ConfigError(f"model.compile_blocks=true needs the package triton: pip install triton; {off}")
    else:
        names, what = (os.environ.get("CXX", "g++"),), "a C++ compiler: install g++, or name one with CXX"
    if not any(shutil.which(name) for name in names):
        raise ConfigError(f"model.compile_blocks=true needs {what}; {off}")
    for block in find_blocks(model).blocks:
        if block.kind == "layer":
            block.module.compile()
