"""Loads the device with torch: the library before it, since torch asks for CUDA's hooks once, and what is Python after.

Processes that never import torch never load it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Around(Loader):
    """A module's own loader, with something before it and something after."""

    def __init__(self, own: Loader, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._own, self._before, self._after = own, before, after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._before()
        self._own.exec_module(module)
        self._after()


def _load() -> None:
    from tests.fake_cuda.build import library

    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)


def _provide() -> None:
    from tests.fake_cuda import runtime

    runtime.provide()


def _finish() -> None:
    from tests.fake_cuda import runtime

    runtime.finish()


def _nothing() -> None:
    pass


class _Nothing(Loader):
    """Executes no module."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        pass


# bitsandbytes has kernels for CUDA in a library that wants NVIDIA's: without both its kernels for the CPU open weights,
# by the way that all kernels take (fake.cpp).
_LEFT_OUT = ("bitsandbytes.backends.cuda.ops",)


def _no_cuda_library() -> None:
    sys.modules["bitsandbytes.cuda_specs"].get_cuda_specs = lambda: None


def _as_it_is(function: Callable[..., object], **settings: object) -> Callable[..., object]:
    return function


def _without_compiler() -> None:
    """Let functions that a module has compiled be what they are: without Triton each call would try it again."""
    torch = sys.modules["torch"]
    torch.compile, torch.compile_of_torch = _as_it_is, torch.compile


def _with_compiler() -> None:
    torch = sys.modules["torch"]
    torch.compile = torch.compile_of_torch
    del torch.compile_of_torch


_AROUND: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "torch": (_load, _finish),
    "torch.cuda": (_provide, _nothing),
    "bitsandbytes.cuda_specs": (_nothing, _no_cuda_library),
    "bitsandbytes.backends.default.ops": (_without_compiler, _with_compiler),
}


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _LEFT_OUT:
            return ModuleSpec(name, _Nothing())
        if name not in _AROUND:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Around(spec.loader, *_AROUND[name])
        return spec


def install() -> None:
    """Load the device as soon as torch is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def loaded() -> bool:
    """Whether it is there."""
    return "tests.fake_cuda.runtime" in sys.modules
