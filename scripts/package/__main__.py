"""Installs what ``make wheel`` has built in an empty environment outside of the clone, and uses it there.

    python -m scripts.package [--folder FOLDER]

The wheel is installed and used with a PATH that has no compiler, then the sdist with the usual one. PyTorch is
installed first, of the version in constraints.txt; the seconds of the rest are printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USE = Path(__file__).with_name("use.py")
GOAL_S = 60
"""Seconds that an installation of the wheel beside PyTorch should take at most."""


def main() -> int:
    """Install and use both; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to install; by default a temporary folder")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where wheel and sdist are")
    options = parser.parse_args()
    [wheel], [sdist] = options.dist.glob("*.whl"), options.dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="lt-offload-") as place:
        folder = options.folder or Path(place)
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
        shutil.copy(USE, folder)
        torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
        (folder / "torch.txt").write_text(f"{torch}\n")
        print(f"{torch}: {install(folder, [torch]):.0f} s", flush=True)
        seconds = install(folder, [str(wheel)])
        print(f"{wheel.name} and what it needs beside PyTorch: {seconds:.0f} s (goal: {GOAL_S} s)", flush=True)
        code = use(folder, path=str(folder / "env" / "bin"))
        print(f"{sdist.name}: {install(folder, [str(sdist), '--no-deps', '--force-reinstall']):.0f} s", flush=True)
        return code or use(folder, "--compiled", path=f"{folder / 'env' / 'bin'}:{os.environ['PATH']}")


def install(folder: Path, what: Sequence[str]) -> float:
    """Install ``what``, with no other PyTorch and no compiler, and return the seconds."""
    python, began = folder / "env" / "bin" / "python", time.perf_counter()
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--constraint"]
    environment = os.environ | {"PATH": str(python.parent)}
    subprocess.run([*command, folder / "torch.txt", *what], check=True, cwd=folder, env=environment)
    return time.perf_counter() - began


def use(folder: Path, *arguments: str, path: str) -> int:
    """Use what is installed, with nothing of this environment but ``path``; return the exit code."""
    environment = {"HOME": str(folder), "PATH": path, "OMP_NUM_THREADS": "1"}
    command = [folder / "env" / "bin" / "python", "-I", folder / USE.name, *arguments]
    return subprocess.run(command, check=False, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
