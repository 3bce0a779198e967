"""Builds the device's library, once per version of torch and of its sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SONAME = "libcudart.so.13"
"""That of the CUDA runtime: who asks the loader for it finds the calls that the fake has."""

FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w")


class BuildError(RuntimeError):
    """The library cannot be built here."""


@cache
def library() -> Path:
    """Return the library, built if it is not there yet (half a minute).

    Raises:
        BuildError: without a compiler, or if torch's headers are others than expected.
    """
    torch = _torch()
    target = Path(sys.prefix) / "fake_cuda" / _key(torch) / SONAME
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / SONAME
            _compile(torch, built)
            os.replace(built, target)  # several processes may be at it
    return target


def _torch() -> Path:
    """Return torch's folder, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("the fake CUDA device needs torch, which is not installed")
    return Path(found.origin).parent


def _sources() -> list[Path]:
    return sorted([*HERE.glob("*.hpp"), *HERE.glob("*.cpp")])


def _key(torch: Path) -> str:
    parts = [importlib.metadata.version("torch"), str(torch), *FLAGS, *(file.read_text() for file in _sources())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(torch: Path, target: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("the fake CUDA device needs a C++ compiler: install g++")
    folders = [torch / "include", torch / "include/torch/csrc/api/include"]
    command = [compiler, *FLAGS, *(f"-I{folder}" for folder in folders), str(HERE / "fake.cpp"), "-o", str(target)]
    command += [f"-Wl,-soname,{SONAME}", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
        version = importlib.metadata.version("torch")
        raise BuildError(f"the fake CUDA device does not build with torch {version}: {first.strip()}")
