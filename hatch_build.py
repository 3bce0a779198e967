"""The part of a wheel beside files of the source tree: its C++ sources, compiled for all processors of a kind.

Off unless HATCH_BUILD_HOOK_ENABLE_CUSTOM=true (``make wheel``): an installation from source needs no compiler, and
compiles what it needs when it first needs it.
"""

from __future__ import annotations

import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GOMP": (0,)}
"""The newest symbols of system libraries that a library may need: torch's own wheels need them as well."""


class Kernels(BuildHookInterface):
    """Compile every C++ file of the package and name the wheel for the machines that it is for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to a wheel.

        Raises:
            RuntimeError: if one of them needs a system that is newer than :data:`OLDEST`.
        """
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from lt_offload.compiling import build_for_wheel, shipped

        self.folder = tempfile.TemporaryDirectory()
        for source in sorted(Path(self.root, "lt_offload").rglob("*.cpp")):
            home = shipped(source, "").parent.relative_to(self.root)
            for library in build_for_wheel(source, Path(self.folder.name)):
                check(library)
                build_data["force_include"][str(library)] = str(home / library.name)
        build_data["tag"] = f"py3-none-manylinux_{'_'.join(map(str, OLDEST['GLIBC']))}_{platform.machine()}"
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries that lie in the wheel now."""
        if version != "editable":
            self.folder.cleanup()


def check(library: Path) -> None:
    """Refuse a library that needs newer symbols than :data:`OLDEST`; names of versions stand in it as text."""
    for name, number in re.findall(rb"\0([A-Z]+)_([\d.]+)(?=\0)", library.read_bytes()):
        newest = OLDEST.get(name.decode())
        if newest is not None and tuple(map(int, number.split(b"."))) > newest:
            raise RuntimeError(f"{library.name} needs {name.decode()} {number.decode()}, torch's wheels {newest}")
