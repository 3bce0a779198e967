"""What ``lt_offload`` costs a program of Lightning's by being there, and that nothing for Hugging Face's Trainers is.

    python -m scripts.startup.imports [--rounds 5]

Every way is a process of its own, in turn: ``plain`` imports lightning and trains a small module with its Trainer,
``imported`` imports lt_offload as well and trains likewise, ``strategy`` trains with ``strategy="offmate"``, ``hf``
makes the context of ``hf_trainer``, too. Processor time (user and system) and resident memory at the end are of the
whole process; modules are those of ``lt_offload.hf``, trl and transformers' Trainer that are loaded then.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from scripts.common import arguments, in_child, save, serve_child

PROGRAM = "scripts.startup.imports"
WAYS = ("plain", "imported", "strategy", "hf")
NOT_USED = ("lt_offload.hf", "trl", "transformers.trainer")


def fit(way: str) -> dict[str, Any]:
    """Train two steps, and return what the process has taken."""
    import psutil
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor, nn

    strategy: Any = "auto"
    if way != "plain":
        import lt_offload

        if way == "strategy":
            strategy = lt_offload.OffmateStrategy(memory="100MB", solver_time_limit=2.0)
        if way == "hf":
            with lt_offload.hf_trainer(memory="100MB"):
                pass

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

        def training_step(self, batch: Tensor) -> Tensor:
            """Return the loss."""
            loss: Tensor = self.layers(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Return AdamW."""
            return torch.optim.AdamW(self.parameters())

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_steps=2, enable_model_summary=False, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(8, 64), batch_size=4))
    times = os.times()
    loaded = [name for name in sorted(sys.modules) if name.startswith(NOT_USED)]
    return {"processor_s": times.user + times.system, "rss_bytes": psutil.Process().memory_info().rss, "loaded": loaded}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns 1 if something of ``lt_offload.hf`` is loaded where it is not used."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            found[way].append(in_child(PROGRAM, "fit", way=way))
    rows = [
        {
            "way": way,
            "processor_s": statistics.median(each["processor_s"] for each in taken),
            "rss_bytes": int(statistics.median(each["rss_bytes"] for each in taken)),
            "loaded": len(taken[0]["loaded"]),
        }
        for way, taken in found.items()
    ]
    for row in rows:
        row["processor_ratio"] = row["processor_s"] / rows[0]["processor_s"]
        row["rss_ratio"] = row["rss_bytes"] / rows[0]["rss_bytes"]
        print(row)
    save("bench-imports", "bench-imports", {"rounds": options.rounds}, {"ways": rows}, options.results)
    return int(any(row["loaded"] for row in rows if row["way"] != "hf"))


if __name__ == "__main__":
    serve_child(fit)
    sys.exit(main())
