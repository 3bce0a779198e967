"""Device memory of a Trainer's evaluation, whose batches may be larger than those of the training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lt_offload.compat.torch import tree_leaves
from lt_offload.errors import OverBudget
from lt_offload.hf import batches
from lt_offload.hf.step import kept
from lt_offload.model.batch import Size
from lt_offload.model.snapshot import untouched
from lt_offload.profiling.hardware import free_memory

if TYPE_CHECKING:
    from lt_offload.hf.run import Run


def device_bytes(run: Run) -> int:
    """Return the bytes that evaluations while training take beside weights: the peak of a step, and collected outputs.

    One step is run for every dataset, with the largest batch that it can give. 0 if nothing is evaluated.
    """
    args = run.trainer.args
    wanted = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no" or args.eval_on_start
    if not wanted or run.trainer.eval_dataset is None:
        return 0
    most = 0
    with kept(run.trainer):
        for loader in _loaders(run.trainer):
            candidates = batches.of_rows(loader, args.eval_batch_size) or batches.first(loader)
            if candidates:
                most = max(most, _measured(run, loader, max(candidates, key=Size.of)))
    return most


def _loaders(trainer: Any) -> Iterator[Any]:
    data = trainer.eval_dataset
    for name in data if isinstance(data, dict) else [None]:
        yield trainer.get_eval_dataloader(name)


def _measured(run: Run, loader: Any, batch: Any) -> int:
    """Return the bytes of an evaluation with steps like that of ``batch``, measured within the budget if it fits."""
    try:
        return _measured_within(run, loader, batch, None)
    except OverBudget:  # this step only measures: the error would end the run before it says how much is needed
        return _measured_within(run, loader, batch, free_memory(run.device))


def _measured_within(run: Run, loader: Any, batch: Any, budget: int | None) -> int:
    trainer, args = run.trainer, run.trainer.args
    only_loss = trainer.compute_metrics is None or args.prediction_loss_only
    with untouched(model=trainer.model), run.streamed(budget) as engine:  # which also puts the mode back
        trainer.model.eval()
        device = engine.device
        device.reset_peak()
        before = device.memory()
        with engine.inference():
            loss, logits, labels = trainer.prediction_step(trainer.model_wrapped, batch, only_loss)
            if logits is not None and trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
            step = int(device.peak_memory() - before)
    collected = sum(leaf.nbytes for leaf in tree_leaves((logits, labels)) if isinstance(leaf, Tensor))
    # The Trainer's loop repeats the loss for every sample before it collects it.
    collected += loss.nbytes * args.eval_batch_size if loss is not None else 0
    steps = len(loader) if hasattr(loader, "__len__") else 1
    if args.batch_eval_metrics:
        steps = 1
    return step + 2 * collected * min(steps, args.eval_accumulation_steps or steps)  # copied when more comes
