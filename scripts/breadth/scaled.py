"""Trainings in fp16 with a scaled loss, one function for each library: plain ones, and within a budget.

Every second or third step is left out, beginning with the first. A case is one of ``CASES``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lt_offload
from scripts.attack.compared import Ended
from scripts.hf import cases, runs
from tests.parity.lightning import test_scaling as in_lightning
from tests.parity.windows import test_scaling as in_a_loop
from tests.support import accelerated, models

CASES = ("accumulated", "accumulated, clipped", "resumed")
Settings = dict[str, Any] | None
"""Those of a budget; None: a plain training."""


def _with_steps(ended: Ended, scales: Iterable[float], first: float) -> Ended:
    """Return ``ended``, which has seen how many steps were left out, too: those after which the scale is less."""
    falls = sum(after < before for before, after in itertools.pairwise([first, *scales]))
    ended.seen["skipped"] = [falls]
    return ended


def by_lightning(case: str, folder: Path, ours: Settings) -> Ended:
    """Train as ``Trainer(precision="16-mixed")`` does; a run that was resumed is compared with a whole one."""
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": -1}
    if case != "accumulated":
        settings["gradient_clip_val"] = 0.1
    strategy: Any = "auto" if ours is None else lt_offload.OffmateStrategy(**ours)
    goes_on = case == "resumed" and ours is not None
    save = [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)] * goes_on
    options = {"callbacks": [in_lightning.Scales(), *save], "enable_checkpointing": goes_on}
    run = in_lightning.scaled(strategy, **settings, **options)
    losses, scales = run.module.losses, run.trainer.callbacks[0].seen
    if goes_on:
        half = folder / f"step={in_lightning.UPDATES // 2}.ckpt"
        run = in_lightning.scaled(lt_offload.OffmateStrategy(**ours or {}), ckpt=half, **settings)
        after = run.module.losses, run.trainer.callbacks[0].seen
        losses, scales = (whole[: -len(end)] + end for whole, end in zip((losses, scales), after, strict=True))
    scaler = run.trainer.precision_plugin.scaler
    seen = {"losses": losses, "scales": scales, "scaler": [scaler.state_dict()]}
    ended = Ended.of(run.module, run.optimizer, seen, getattr(run.trainer.strategy, "plan", None))
    return _with_steps(ended, scales, in_lightning.scaler().get_scale())


def in_own_loop(case: str, folder: Path, ours: Settings) -> Ended:
    """Train as the examples of torch.amp; a run that is resumed has another model from its middle on."""
    options: dict[str, Any] = {"accumulate": 2} | ({} if case == "accumulated" else {"clip": 0.1})
    whole, half = range(in_a_loop.STEPS), in_a_loop.STEPS // 2 + 1
    parts: Sequence[range] = [whole[:half], whole[half:]] if case == "resumed" else [whole]
    seen: list[Any] = []
    states: Any = None
    for steps in parts:
        model, scaler, plan = models.build(dropout=0.1), in_a_loop.scaler_of(), None
        optimizer = in_a_loop.foreach(model.parameters())
        if states is not None:
            for each, state in zip((model, optimizer, scaler), states, strict=True):
                each.load_state_dict(state)
        settings = {"accelerator": "cpu", "delayed": True, "run": partial(in_a_loop.loss_of, model), **(ours or {})}
        context: Any = lt_offload.offloaded(model, optimizer, models.batch(model), **settings)
        with nullcontext() if ours is None else context as engine:
            torch.manual_seed(1)
            seen += in_a_loop.loop(model, optimizer, engine, scaler=scaler, steps=steps, **options)
            plan = getattr(engine, "plan", None)
        states = copy.deepcopy([each.state_dict() for each in (model, optimizer, scaler)])
    ended = Ended.of(model, optimizer, {"losses, norms and scales": seen, "scaler": [states[-1]]}, plan)
    ended.seen["skipped"] = [sum(step % 3 == 0 for step in whole)]  # as the loop itself makes sure
    return ended


def by_trainer(case: str, folder: Path, ours: Settings) -> Ended:
    """Train as the Trainer of transformers does with ``fp16=True``; a resumed run is compared with a whole one."""
    rows = [{name: ids[:6] for name, ids in row.items()} for row in cases.rows(16)]
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 4, "_train_dataset": rows}
    settings |= {"max_grad_norm": 0.0} if case == "accumulated" else {}
    settings |= {"save_strategy": "steps", "save_steps": 1} if case == "resumed" else {}
    make = cases.plain(kind=cases.Scaled, fp16=True, **settings)
    context = None if ours is None else lt_offload.hf_trainer(**ours)
    trainer = runs.train(make, folder, context)
    if case == "resumed" and ours is not None:
        checkpoint = str(folder / "out" / "checkpoint-2")
        trainer = runs.train(make, folder, lt_offload.hf_trainer(**ours), resume_from_checkpoint=checkpoint)
    ended = runs.ended(trainer)
    scaler = trainer.accelerator.scaler
    ended.seen["scaler"] = [scaler.state_dict()]
    logged = [record["scale"] for record in trainer.state.log_history if "scale" in record]
    return _with_steps(ended, [*logged, scaler.get_scale()], 2.0**30)


def by_accelerate(case: str, folder: Path, ours: Settings) -> Ended:
    """Train as accelerate's examples do with ``mixed_precision="fp16"``; plain runs are resumed, too."""
    names = dict(zip(CASES, ("fp16, not clipped", "fp16, clipped", "fp16, resumed"), strict=True))
    ended = accelerated.train(names[case], folder, accelerated.LARGE, ours)
    return _with_steps(ended, (each for each in ended.seen["seen"] if isinstance(each, float)), 2.0**30)
