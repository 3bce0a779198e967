"""Loading a model in bfloat16 against reading its files one after the other; goal: at least 80 % of that speed.

    python -m scripts.startup.load [--size 3GB] [--shard 500MB] [--rounds 3] [--folder FOLDER] [--tiny]

The files are made for it: shards of random bytes with the names and shapes of Llama-2-7B's weights, of as few layers as
fit into ``--size``. In every round they are read in one pass with one buffer, then loaded by a process of its own, as
``model.name`` is; before either the system is asked to forget them (``posix_fadvise``), so that both read the disk.
``--warm`` leaves them in its cache: both read memory then.

A third process reads the files into new memory of their size, in one pass, too: what a load cannot do without on a
machine where memory is slow to come by (a virtual one gets it from its host page by page).

Memory is what the loading process has taken for itself at most, mapped files not counted, beyond what it had before;
beside it the size of the files, which is that of the weights: one copy would be 1.0.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lt_offload.units import parse_bytes
from scripts.common import arguments, in_child, save, serve_child

PROGRAM = "scripts.startup.load"
GOAL = 0.8
_BUFFER = 16 << 20
_EVERY_S = 0.002
LLAMA2_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 256}


def make(folder: Path, shape: dict[str, int], size: int, shard: int) -> list[Path]:
    """Write a model of about ``size`` bytes, in files of about ``shard`` bytes, and return them."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    def skeleton(layers: int) -> tuple[Any, dict[str, torch.Size]]:
        config = LlamaConfig(**shape, num_hidden_layers=layers, tie_word_embeddings=False, dtype="bfloat16")
        with torch.device("meta"):
            return config, {name: t.shape for name, t in LlamaForCausalLM(config).state_dict().items()}

    least, one_more = (sum(s.numel() for s in skeleton(layers)[1].values()) * 2 for layers in (1, 2))
    config, shapes = skeleton(max(1, (size - least) // (one_more - least) + 1))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    parts: list[dict[str, torch.Size]] = [{}]
    for name, dims in shapes.items():
        if sum(s.numel() * 2 for s in parts[-1].values()) + dims.numel() * 2 > shard and parts[-1]:
            parts.append({})
        parts[-1][name] = dims
    generator = torch.Generator().manual_seed(0)
    weight_map, files = {}, []
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors = {
            name: torch.randint(0, 2**15, dims, generator=generator, dtype=torch.int16).view(torch.bfloat16)
            for name, dims in part.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        files.append(folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for path in files:
        with path.open("rb") as file_object:
            os.fsync(file_object.fileno())
    return files


def forget(files: Sequence[Path]) -> None:
    """Ask the system to drop ``files`` from its cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: Sequence[Path]) -> float:
    """Read ``files`` one after the other and return the seconds that took."""
    buffer = bytearray(_BUFFER)
    begun = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun


def keep(folder: str, warm: bool) -> dict[str, Any]:
    """Read all files in ``folder`` into new memory and return the seconds that took."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not warm:
        forget(files)
    kept = []
    begun = time.perf_counter()
    for path in files:
        kept.append(mmap.mmap(-1, path.stat().st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        view = memoryview(kept[-1])
        with path.open("rb", buffering=0) as file:
            while done := file.readinto(view[:_BUFFER]):
                view = view[done:]
    return {"seconds": time.perf_counter() - begun}


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Yield a list whose element is, at the end, the most bytes of its own that this process had meanwhile."""
    peak, done = [own_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(_EVERY_S):
            peak[0] = max(peak[0], own_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak[0] = max(peak[0], own_bytes())


def own_bytes() -> int:
    """Return the memory that this process has for itself: anonymous pages, and shared ones that are no file's."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def load(folder: str, warm: bool) -> dict[str, Any]:
    """Load the model in ``folder`` and return seconds, and bytes before and at the peak."""
    from transformers import LlamaForCausalLM  # noqa: F401  # imports are not loading

    from lt_offload.finetune.load import load_model

    if not warm:
        forget(sorted(Path(folder).glob("*.safetensors")))
    before = own_bytes()
    begun = time.perf_counter()
    with watched_memory() as peak:
        model = load_model(folder, dtype="bfloat16")
        seconds = time.perf_counter() - begun
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {"seconds": seconds, "weights_bytes": weights, "taken_bytes": peak[0] - before}


def measure(folder: Path, files: Sequence[Path], rounds: int, warm: bool) -> dict[str, Any]:
    """Return the figures of ``rounds`` in which files are read, then loaded."""
    size = sum(path.stat().st_size for path in files)
    reads, keeps, loads = [], [], []
    for number in range(rounds):
        if not warm:
            forget(files)
        reads.append(read(files))
        keeps.append(in_child(PROGRAM, "keep", folder=str(folder), warm=warm)["seconds"])
        loads.append(in_child(PROGRAM, "load", folder=str(folder), warm=warm))
        kept = f"into new memory in {keeps[-1]:.2f} s"
        print(
            f"round {number + 1}: read in {reads[-1]:.2f} s, {kept}, loaded in {loads[-1]['seconds']:.2f} s", flush=True
        )
    times = [loaded["seconds"] for loaded in loads]
    ratios = [seconds / loaded for seconds, loaded in zip(reads, times, strict=True)]
    of_keeping = [seconds / loaded for seconds, loaded in zip(keeps, times, strict=True)]
    return {
        "file_bytes": size,
        "read_s": reads,
        "keep_s": keeps,
        "load_s": times,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "ratio_of_keeping": statistics.median(of_keeping),
        "copies": max(loaded["taken_bytes"] / loaded["weights_bytes"] for loaded in loads),
        "goal": GOAL,
    }


def main() -> None:
    """Make the files, measure, and remove them."""
    serve_child(load, keep)
    parser = arguments(__doc__)
    parser.add_argument("--size", default="3GB", help="of the model")
    parser.add_argument("--shard", default="500MB", help="of one file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured; default: that of /tmp")
    parser.add_argument("--warm", action="store_true", help="read the system's cache, not the disk")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args()
    size, shard = (100_000, 40_000) if options.tiny else (parse_bytes(options.size), parse_bytes(options.shard))
    folder = Path(tempfile.mkdtemp(prefix="lt-offload-load-", dir=options.folder))
    try:
        files = make(folder, TINY if options.tiny else LLAMA2_7B, size, shard)
        figures = measure(folder, files, options.rounds, options.warm)
    finally:
        shutil.rmtree(folder)
    speeds = (
        f"{figures['ratio']:.0%} of the speed of reading, {figures['ratio_of_keeping']:.0%} of reading into new memory"
    )
    print(f"load: {speeds}; {figures['copies']:.2f} copies in memory")
    settings = {"size": size, "shard": shard, "files": len(files), "rounds": options.rounds, "warm": options.warm}
    print(save("bench-load", "bench-load", settings, figures, options.results))


if __name__ == "__main__":
    main()
