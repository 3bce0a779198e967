"""Muon (torch.optim.Muon) under offload, compared bit for bit with plain training: losses, weights, momentum.

    python -m scripts.breadth.muon      a minute of processor time; docs/limits.md shows a table of results/muon.json

A small model whose weights are all matrices, in three budgets: one batch per update, four, weights of bfloat16, updates
that wait for the norm of all gradients; and two processes beside Lightning's own ddp.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lt_offload
from scripts.attack.compared import Ended, attacked
from scripts.common import ROOT, arguments, save

NAME = "muon"
CASES: dict[str, dict[str, Any]] = {
    "one batch per update": {},
    "four batches per update": {"accumulate": 4},
    "bfloat16 weights": {"dtype": torch.bfloat16},
    "clipped by the norm": {"clip": 0.5},
}
BUDGETS = ("smallest", "middle", "resident")
STEPS, WIDTH, WORDS = 6, 48, 97


class Layer(nn.Module):
    """A residual layer without vectors: Muon takes matrices only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` of any shape that ends in the width, with the layer's output added."""
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Embedding, layers and projection; returns the loss of the tokens ``(samples, length)``."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList(Layer().to(dtype) for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS, bias=False, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every case."""
    return torch.optim.Muon(model.parameters(), lr=2e-2, weight_decay=0.1, momentum=0.95)


def batch(seed: int) -> Tensor:
    """Return tokens of shape (4, 9)."""
    return torch.randint(0, WORDS, (4, 9), generator=torch.Generator().manual_seed(seed))


def trained(case: dict[str, Any], ours: dict[str, Any] | None) -> Ended:
    """Train in a loop; with the engine if there are ``ours``, its settings."""
    accumulate, clip = case.get("accumulate", 1), case.get("clip")
    model, losses = Net(case.get("dtype", torch.float32)), []
    optimizer = muon(model)
    context: Any = contextlib.nullcontext()
    if ours is not None:
        settings = {"accumulate": accumulate, "delayed": clip is not None, "solver_time_limit": 1.0} | ours
        context = lt_offload.offloaded(model, optimizer, batch(0), accelerator="cpu", **settings)
    with context as engine:
        for step in range(STEPS):
            for part in range(accumulate):
                loss = model(batch(10 * step + part)) / accumulate
                loss.backward()
                losses.append(loss.detach())
            if clip is not None:
                clipped = (
                    partial(nn.utils.clip_grad_norm_, model.parameters()) if ours is None else engine.clip_grad_norm_
                )
                losses.append(clipped(clip))
            optimizer.step()
            optimizer.zero_grad()
    return Ended.of(model, optimizer, {"losses": losses}, getattr(engine, "plan", None))


# -- two processes -----------------------------------------------------------------------------------------------------


def train_by_two(file: Path, memory: str) -> None:
    """Train by two processes of a Trainer, ``memory="ddp"`` by Lightning's strategy, and save what the first has."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = Net(), list[Tensor]()

        def training_step(self, ids: Tensor, _index: int) -> Tensor:
            loss: Tensor = self.net(ids)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return muon(self.net)

    rows: Any = torch.cat([batch(seed) for seed in range(2 * STEPS)])
    strategy: Any = "ddp" if memory == "ddp" else lt_offload.OffmateStrategy(memory=memory, solver_time_limit=1.0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    if trainer.global_rank == 0:
        plan = getattr(trainer.strategy, "plan", None)
        travels = plan is not None and any(op.lane in ("h2d", "d2h") for op in plan.ops)
        states = [dict(state) for state in trainer.optimizers[0].state.values()]
        torch.save((module.losses, dict(module.net.state_dict()), states, travels), file)


def by_two() -> list[dict[str, Any]]:
    """Return what became of two processes in each budget, as rows of a case."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for memory in ("ddp", "300KB", "600KB", "1GB"):
            file = Path(folder) / f"{memory}.pt"
            command = [sys.executable, "-m", "scripts.breadth.muon", "--two", str(file), memory]
            ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
            if ran.returncode:
                raise SystemExit(f"{memory}: {ran.stderr[-2000:]}")
            made[memory] = torch.load(file, weights_only=False)
        *plain, _ = made.pop("ddp")
        for memory, (*mine, travels) in made.items():
            same = all(map(_same, plain, mine))
            rows.append({"budget": memory, "outcome": "equal" if same else "wrong", "travels": travels})
    return rows


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def main() -> int:
    """Compare and save; return 1 unless all are equal."""
    parser = arguments(__doc__)
    parser.add_argument("--two", nargs=2, metavar=("FILE", "MEMORY"), help="train by two processes; for this program")
    options = parser.parse_args()
    if options.two:
        train_by_two(Path(options.two[0]), options.two[1])
        return 0
    rows: list[dict[str, Any]] = [
        {
            "case": name,
            "runs": [
                {"budget": one.budget, "outcome": one.outcome, "travels": one.travels, "says": one.says}
                for one in attacked(partial(trained, case), BUDGETS)
            ],
        }
        for name, case in CASES.items()
    ]
    rows.append({"case": "two processes, beside ddp", "runs": by_two()})
    for row in rows:
        print(row, file=sys.stderr)
    save(NAME, NAME, {"steps": STEPS}, {"rows": rows}, options.results)
    return int(any(run["outcome"] != "equal" for row in rows for run in row["runs"]))


if __name__ == "__main__":
    raise SystemExit(main())
