"""Kills real training with SIGKILL at seeded moments, resumes it, and compares with a run that nobody killed.

``python -m tests.faults.kill_training --kills 100 --seed 0 [--asynchronous]``

Every second kill is inside a save: at a byte of the file, before or after an fsync, around the renaming. The others
come at a random time, in whatever the training then does. After each, every checkpoint of the folder must be complete,
and the run resumed from the newest one must end with the weights, optimizer states and losses of the whole run, bit for
bit; where no checkpoint was written yet, the run starts again. Runs are forked from one process that has imported
everything and has run nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lt_offload import OffmateStrategy
from lt_offload.profiling.step.first import FirstStep
from lt_offload.schema.profile import Profile
from lt_offload.strategy.checkpoint import archive
from lt_offload.strategy.checkpoint import files as checkpoint
from lt_offload.strategy.first import sample as prepare
from tests.parity.several.training import begin_forked

EPOCHS, ROWS, BATCH = 2, 8, 2
OPERATIONS = ("file synced", "file about to be synced", "renamed", "about to be renamed", "folder synced")
FAILED = 1


class Model(LightningModule):
    """A tiny Llama with dropout, whose losses are kept by step."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 97}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=0.1, use_cache=False)).train()
        self.losses: dict[int, str] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses[self.global_step] = loss.item().hex()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> Any:
        """Return AdamW and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return shuffled rows."""
        return DataLoader(_rows(0), batch_size=BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return other rows."""
        return DataLoader(_rows(1)[:2], batch_size=BATCH)


def _rows(seed: int) -> Any:
    return torch.randint(97, (ROWS, 16), generator=torch.Generator().manual_seed(seed))


class Begun(Callback):
    """Says on a pipe that training begins, and how many seconds it has taken."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.seconds = 0.0
        self._start = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it."""
        self._start = time.perf_counter()
        os.write(self.pipe, b"x")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self._start


def train(folder: Path, shared: Path, asynchronous: bool, pipe: int) -> None:
    """Train, from the newest checkpoint in ``folder`` if there is one; leave the result there."""

    def known(first: FirstStep, *_shown: Any) -> Profile:
        first.reached()
        return Profile.load(shared / "profile.json")

    if (shared / "plan.json").exists():
        prepare.measure = lambda *args, **kwargs: Profile.load(shared / "profile.json")
        FirstStep.profile = known  # type: ignore[method-assign]
        strategy = OffmateStrategy(plan=shared / "plan.json", async_checkpoint=asynchronous)
    else:
        strategy = OffmateStrategy(memory="190KB", report_dir=shared)
    kept = folder / "checkpoints"
    newest = checkpoint.newest(kept) if kept.exists() else None
    seed_everything(7 if newest is None else 99, verbose=False)
    module = Model()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    begun = Begun(pipe)
    saver = ModelCheckpoint(kept, every_n_train_steps=1, filename="{step}")
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        callbacks=[saver, begun],
        **quiet,
    )
    trainer.fit(module, ckpt_path=newest)
    assert not list(kept.glob(".*")), "something is left of a checkpoint that was not completed"
    state = trainer.optimizers[0].state_dict()
    result = {"weights": module.state_dict(), "state": state, "losses": module.losses, "seconds": begun.seconds}
    torch.save(result, folder / "result.pt")


# -- kills ------------------------------------------------------------------------------------------------------------


def die() -> None:
    """End this process as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(save: int, what: str, byte: int) -> None:
    """Let this process die in its ``save``-th save, at ``byte`` of the file or at one of ``OPERATIONS``."""
    state = {"saves": 0, "left": byte}
    fill, write, flush, replace = archive.fill, archive._write, archive.flush, Path.replace

    def filled(*args: Any) -> dict[int, int]:
        state["saves"] += 1
        return fill(*args)

    def written(descriptor: int, content: bytes | memoryview, at: int) -> int:
        if state["saves"] == save and what == "byte":
            if len(content) >= state["left"]:
                os.pwrite(descriptor, content[: state["left"]], at)
                die()
            state["left"] -= len(content)
        return write(descriptor, content, at)

    def around(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def operation(path: Path, *args: Any) -> Any:
            kind = "folder" if path.is_dir() else name
            if state["saves"] == save and what.startswith(kind) and "about" in what:
                die()
            result = run(path, *args)
            if state["saves"] == save and what.startswith(kind):
                die()
            return result

        return operation

    archive.fill, archive._write = filled, written
    archive.flush = around("file", flush)
    Path.replace = around("renamed" if what == "renamed" else "about to be renamed", replace)  # type: ignore[method-assign]


def forked(run: Callable[[int], None], kill_after: float | None = None) -> int:
    """Run in a child, killed some seconds after its training begins if asked to; return its exit code, or -signal."""
    heard, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = FAILED
        try:
            os.close(heard)
            begin_forked()
            run(say)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(say)
    if kill_after is not None:
        os.read(heard, 1)  # or its end
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(heard)
    return code


def differences(folder: Path, whole: dict[str, Any]) -> list[str]:
    """Name what is not bit for bit the end of the ``whole`` run."""
    found = torch.load(folder / "result.pt")
    wrong = [name for name, value in whole["weights"].items() if not torch.equal(value, found["weights"][name])]
    for index, state in whole["state"]["state"].items():
        other = found["state"]["state"][index]
        wrong += [f"{key} of {index}" for key, value in state.items() if not torch.equal(value, other[key])]
    losses = found["losses"]
    expected = {step: whole["losses"][step] for step in losses}
    return wrong + ([] if losses == expected else [f"losses {losses} instead of {expected}"])


def case(number: int, seed: int, root: Path, whole: dict[str, Any], asynchronous: bool) -> tuple[str, list[str]]:
    """Kill one run and resume it; return the kind of kill and what went wrong."""
    draw = random.Random(f"{seed}/{number}")
    folder = root / str(number)
    folder.mkdir()
    steps = EPOCHS * ROWS // BATCH
    shared = root / "shared"
    if number % 2 == 0:
        what = draw.choice(("byte", "byte", "byte", *OPERATIONS))
        size = shared.joinpath("size").stat().st_size
        plan = draw.randrange(1, steps + 1), what, draw.randrange(1, size)

        def doomed(pipe: int) -> None:
            arm(*plan)
            train(folder, shared, asynchronous, pipe)

        code, kind = forked(doomed), f"in a save: {what}"
    else:
        delay = draw.uniform(0, whole["seconds"])
        code, kind = forked(partial(train, folder, shared, asynchronous), delay), "at a random time"
    if code == 0:
        return f"{kind}, after its end", differences(folder, whole)
    if code != -signal.SIGKILL:
        return kind, [f"left with {code} instead of being killed"]
    kept = folder / "checkpoints"
    torn = [path.name for path in kept.glob("*.ckpt") if not checkpoint.is_complete(path)]
    before = checkpoint.newest(kept) if kept.exists() else None
    resumed = forked(partial(train, folder, shared, asynchronous))
    if resumed != 0:
        return kind, [f"the resumed run left with {resumed}"]
    wrong = [f"{name} is torn" for name in torn] + differences(folder, whole)
    shutil.rmtree(folder)
    return f"{kind}, {'resumed' if before else 'nothing saved yet'}", wrong


def main() -> int:
    """Kill, resume, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true", help="checkpoints are written while training goes on")
    parser.add_argument("--output", type=Path, help="JSON file for the counts")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    torch.set_num_threads(1)  # a forked process has no other threads
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shared = root / "shared"
        for part in (shared, root / "first", root / "whole"):
            part.mkdir()
        assert forked(partial(train, root / "first", shared, False)) == 0, "the run that makes the plan failed"
        assert forked(partial(train, root / "whole", shared, False)) == 0, "the run that nobody kills failed"
        whole = torch.load(root / "whole" / "result.pt")
        [last] = (root / "whole" / "checkpoints").glob("*.ckpt")
        shutil.copyfile(last, shared / "size")
        counts: Counter[str] = Counter()
        failures = []
        for number in range(args.kills):
            kind, wrong = case(number, args.seed, root, whole, args.asynchronous)
            counts[kind] += 1
            failures += [f"kill {number} ({kind}): {problem}" for problem in wrong]
            print(f"{number + 1}/{args.kills} {kind}: {'; '.join(wrong) or 'equal'}", flush=True)
    report = {"kills": args.kills, "seed": args.seed, "failures": failures, "kinds": dict(sorted(counts.items()))}
    print(json.dumps(report, indent=2))
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    return FAILED if failures else 0


if __name__ == "__main__":
    sys.exit(main())
