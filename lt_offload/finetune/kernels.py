"""What computes a layer: operation by operation, or code that ``torch.compile`` makes for each layer by itself."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch
from torch import nn

from lt_offload.errors import ConfigError
from lt_offload.model.blocks import find_blocks


def compile_layers(model: nn.Module) -> None:
    """Let every layer of ``model`` be compiled at its first call, in place: names of parameters do not change.

    Raises:
        ConfigError: if what the compiler needs is not installed.
    """
    check_compiler()
    for block in find_blocks(model).blocks:
        if block.kind == "layer":
            block.module.compile()


def check_compiler() -> None:
    """Raise ``ConfigError`` if ``torch.compile`` lacks Triton (with a GPU) or a compiler of C or C++."""
    names: tuple[str, ...]
    if torch.cuda.is_available():
        names, what = (os.environ.get("CC", "gcc"), "clang", "cc"), "a C compiler, as gcc, for Triton's kernels"
        if find_spec("triton") is None:
            raise ConfigError(f"model.compile_blocks=true needs the package triton: pip install triton; {_OFF}")
    else:
        names, what = (os.environ.get("CXX", "g++"),), "a C++ compiler: install g++, or name one with CXX"
    if not any(shutil.which(name) for name in names):
        raise ConfigError(f"model.compile_blocks=true needs {what}; {_OFF}")


_OFF = "or set model.compile_blocks=false"
