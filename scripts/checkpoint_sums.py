"""What comparing a checkpoint with its sums costs, as a share of loading it into RAM.

    python -m scripts.checkpoint_sums [--gigabytes 1] [--rounds 5] [--folder .]

Both read the file from the system's cache, the fastest that there is: from a disk the share is smaller, where the cache
keeps what was read first. Prints the medians of rounds in which both are done in turn.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lt_offload.strategy.checkpoint import files, sums

_BLOCKS = 32


def measure(gigabytes: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Return seconds of loading and of comparing, and what part of the first the second is."""
    size = int(gigabytes * 1e9) // (4 * 3 * _BLOCKS)
    weights = {f"layers.{block}": torch.randn(size) for block in range(_BLOCKS)}
    states = {block: {"exp_avg": torch.randn(size), "exp_avg_sq": torch.randn(size)} for block in range(_BLOCKS)}
    loads, checks = [], []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "a.ckpt"
        files.save({"state_dict": weights, "optimizer_states": [{"state": states}]}, path)
        targets = [*weights.values(), *(tensor for state in states.values() for tensor in state.values())]
        for _ in range(rounds):
            began = time.perf_counter()
            loaded = files.load(path)
            [optimizer] = loaded["optimizer_states"]
            read = [*loaded["state_dict"].values(), *(t for s in optimizer["state"].values() for t in s.values())]
            for target, source in zip(targets, read, strict=True):
                target.copy_(source)
            loads.append(time.perf_counter() - began)
            began = time.perf_counter()
            sums.check(path, loaded)
            checks.append(time.perf_counter() - began)
        nbytes = path.stat().st_size
    load_s, check_s = median(loads), median(checks)
    return {"bytes": nbytes, "load_s": load_s, "check_s": check_s, "share": check_s / load_s}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    found = measure(**vars(parser.parse_args()))
    rate = found["bytes"] / found["check_s"] / 1e9
    print(
        f"{found['bytes'] / 1e9:.2f} GB: loaded in {found['load_s']:.2f} s, compared with its sums in "
        f"{found['check_s']:.2f} s ({rate:.1f} GB/s), {found['share']:.0%} of loading"
    )


if __name__ == "__main__":
    main()
