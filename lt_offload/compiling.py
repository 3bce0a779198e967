"""C++ sources of the package as libraries: those that a wheel brings along, or compiled here when first needed.

A wheel has a library for each set of instructions in ``WHEEL``; torch's name for the set that it uses itself says
which one this processor takes. A source tree has none: its libraries are compiled for this very processor, once, and
kept in the user's cache, where nobody else may write. No bit of a result depends on which of them runs.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lt_offload.replacing import replacing
from lt_offload.resources import user_cache

_log = logging.getLogger(__name__)

FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-Wno-psabi"),
    # Off: sources say themselves where a product and a sum are one instruction, as in torch's kernels; more of them
    # would give other last bits. The other two let loops be vectorised and change no number.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
HERE = ("-march=native",)
"""Flags for this very processor."""
WHEEL: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": ("-mavx2", "-mfma", "-mf16c", "-mtune=haswell"),
        "avx512": ("-march=x86-64-v4", "-mtune=icelake-server"),
    },
    "aarch64": {"neon": ("-march=armv8-a",)},
}
"""Flags of the libraries in a wheel, by machine and set of instructions.

Tests compare those for x86-64. The one for NEON was compared under QEMU, once; no ARM processor has run it yet.
"""
_BUILD_SECONDS = 120


def shipped(source: Path, capability: str) -> Path:
    """Return where a wheel has the library of ``source`` for this processor; a source tree has none there.

    Args:
        source: a C++ file of this package.
        capability: of the processor, as ``torch.backends.cpu.get_cpu_capability()`` names it.
    """
    # Torch has several names for processors of ARM, all of which have NEON.
    instructions = "neon" if platform.machine() == "aarch64" else capability.lower()
    return source.parent / "built" / f"{source.stem}-{instructions}.so"


def load(library: Path, torch: Path) -> ctypes.CDLL:
    """Return ``library``, loaded; its threads are torch's own if it is of a wheel.

    Args:
        library: of :func:`shipped` or :func:`build`.
        torch: folder of the package torch, which brings an OpenMP library along.

    Raises:
        OSError: if it cannot be loaded on this machine.
    """
    if library.parent.name == "built":
        # It names no OpenMP library itself, as torch's has another name in each release; a second one would have
        # threads of its own beside torch's.
        openmp = [*torch.glob("lib/libgomp*.so*"), *torch.parent.glob("torch.libs/libgomp*.so*"), "libgomp.so.1"]
        ctypes.CDLL(str(openmp[0]), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


def build(source: Path, folder: Path | None = None, flags: Sequence[str] = HERE) -> Path:
    """Compile ``source`` unless its library is in the cache or ``folder``; return the library's file.

    Raises:
        OSError: if there is no compiler.
        subprocess.SubprocessError: if it does not compile.
    """
    compiler = _compiler()
    # The name says what the file was made from and for, so that a file that is there is never out of date.
    name = f"{source.stem}-{_identity(compiler, source, flags)}.so"
    library = _private(folder or user_cache("kernels")) / name
    if library.is_file() and _only_mine(library):
        return library
    began = time.perf_counter()
    # Several processes may compile at once: each puts a whole file in place, and any of them will do.
    with replacing(library) as new:
        _run([*compiler, *FLAGS, *flags, "-shared", *_include(source), "-o", str(new)])
        new.chmod(0o700)
    _log.info("compiled %s in %.1f s: %s", source.name, time.perf_counter() - began, library)
    return library


def build_for_wheel(source: Path, folder: Path) -> list[Path]:
    """Compile ``source`` for all processors of this kind of machine; return the files in ``folder``.

    Raises:
        OSError: if there is no compiler, or there are no libraries for such a machine.
        subprocess.SubprocessError: if it does not compile.
    """
    if platform.machine() not in WHEEL:
        raise OSError(f"wheels with kernels are for {' and '.join(WHEEL)}, not {platform.machine()}")
    compiler, libraries = _compiler(), []
    for instructions, flags in WHEEL[platform.machine()].items():
        libraries.append(folder / f"{source.stem}-{instructions}.so")
        objects = libraries[-1].with_suffix(".o")
        _run([*compiler, *FLAGS, *flags, "-c", *_include(source), "-o", str(objects)])
        # Without -fopenmp, so that it names no OpenMP library: see load().
        _run([*compiler, "-shared", "-Wl,--strip-all", str(objects), "-o", str(libraries[-1])])
        objects.unlink()
    return libraries


def _compiler() -> list[str]:
    command = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if command is None:
        raise FileNotFoundError("there is no C++ compiler here (install g++)")
    return command.split()


def _include(source: Path) -> list[str]:
    return [f"-I{_headers()}", str(source)]


def _headers() -> Path:
    return Path(__file__).parent / "optim"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    return done.stdout


def _private(folder: Path) -> Path:
    """Return ``folder``, closed to others, or one of this process alone if it is not the user's: code is kept there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # It may have been there before, and open to others.
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)
    if _only_mine(folder):
        return folder
    own = Path(tempfile.mkdtemp(prefix="lt_offload-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    _log.warning("others may write to %s, so kernels are compiled anew for this process; remove that folder", folder)
    return own


def _only_mine(path: Path) -> bool:
    """Return whether nobody but the user may have written to ``path``."""
    seen = path.stat()
    return seen.st_uid == os.geteuid() and not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _described(*names: str) -> list[str]:
    """Return the lines with these ``names`` in what the system says about its processors; none if it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(names)]


def processor_name() -> str:
    """Return the name of the processor, or of its kind where the system does not tell more."""
    names = [line.partition(":")[2].strip() for line in _described("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _identity(compiler: list[str], source: Path, flags: Sequence[str]) -> str:
    """Return what distinguishes libraries: a home folder may serve machines with different processors."""
    version = _run([*compiler, "--version"])
    processor = [platform.machine(), platform.processor()]
    processor += sorted({*_described("model name", "flags", "Features", "CPU part")})
    headers = [header.read_bytes() for header in sorted(_headers().glob("*.h"))]
    others = (" ".join((*FLAGS, *flags)), version, "\n".join(processor))
    return hashlib.sha256(b"\0".join([source.read_bytes(), *headers, *map(str.encode, others)])).hexdigest()[:16]
