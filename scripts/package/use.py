"""Uses the package that is installed, from anywhere but the clone, and fails unless all of it is as a wheel promises.

    python -I use.py             the kernel is one that the wheel brought along
    python -I use.py --compiled  the kernel was compiled here, as after an installation from source

With the wheel also ``lt-finetune verify``: a few steps of a small model by plain training and by lt_offload, compared.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import lt_offload
from lt_offload.optim import native


def main() -> int:
    """Look at the package and run its command line; return the exit code."""
    began, place = time.perf_counter(), Path(lt_offload.__file__).parent
    assert place.parent.name == "site-packages", f"{place} is not installed"
    kernel = native.kernel()
    assert kernel is not None, "there is no kernel; the log says why"
    assert (kernel.library.parent == place / "optim" / "built") == ("--compiled" not in sys.argv), kernel.library
    print(f"kernel {kernel.library}, loaded in {time.perf_counter() - began:.1f} s", flush=True)
    command = str(Path(sys.executable).with_name("lt-finetune"))
    recipes = subprocess.run([command, "ls"], check=True, capture_output=True, text=True).stdout
    assert "quickstart" in recipes
    if "--compiled" in sys.argv:
        return 0
    return subprocess.run([command, "verify", "--steps", "4", "--quiet"], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
