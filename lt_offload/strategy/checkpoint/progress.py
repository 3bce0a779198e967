"""The moment of an epoch at which a checkpoint is made, and the state from which Lightning's loops go on.

Lightning keeps counts of batches and epochs and guesses the moment from them. It guesses wrong in some cases: a
validation that is due after the batch is left out, a validation that is running goes on with batches its loader does
not have, and after the last batch of an epoch, in a run with ``max_steps``, batches of the next epoch are trained as
those of the last. So the moment is kept beside the counts, which stay what every Trainer reads.
"""

from __future__ import annotations

from typing import Any, Literal

from lt_offload.compat.lightning import BATCHES_THAT_STEPPED, goes_on, has_validated, is_last_batch, is_validation_due

Moment = Literal["batch", "broken off", "last batch", "validation due", "validation running", "validated", "epoch end"]


def moment(trainer: Any) -> Moment:
    """Return the moment of the epoch at which ``trainer`` is, which differs between the hooks that make checkpoints."""
    fit_loop = trainer.fit_loop
    loop, batches, epochs = fit_loop.epoch_loop, fit_loop.epoch_loop.batch_progress, fit_loop.epoch_progress.current
    if trainer.state.fn == "fit" and trainer.validating:
        seen = loop.val_loop.batch_progress
        over = seen.is_last_batch and seen.current.completed == seen.current.processed
        return "validated" if over else "validation running"
    if batches.current.processed < batches.current.ready:  # an exception within the step
        return "broken off"
    if batches.current.completed < batches.current.processed:  # on_train_batch_end
        if is_validation_due(fit_loop):
            return "validation due"
        return "last batch" if is_last_batch(loop) else "batch"
    return "epoch end" if epochs.processed == epochs.started and is_last_batch(loop) else "batch"


def rewrite(counts: dict[str, Any], moment: Moment) -> None:
    """Change the saved ``counts`` of a fit loop, before it loads them, so that Lightning goes on at ``moment``."""
    training, validation = counts["epoch_loop.batch_progress"], counts["epoch_loop.val_loop.batch_progress"]
    if moment in ("validation due", "validation running"):
        _complete(training)
        # Lightning finishes a validation that had begun: here one that is at its first batch.
        seen = validation["current"]["completed"] if moment == "validation running" else 0
        before = validation["total"]["completed"] - seen
        validation["total"] = {"ready": before + 1, "started": before + 1, "processed": before, "completed": before}
        validation["current"] = dict.fromkeys(validation["current"], 0)
        validation["is_last_batch"] = False
    elif moment == "broken off":
        # The batch comes again. Else Lightning counts the update before it twice, and takes an epoch for over whose
        # last batch it was.
        for name in ("total", "current"):
            training[name] = dict.fromkeys(training[name], training[name]["completed"])
        training["is_last_batch"] = False
    elif moment == "last batch":
        _complete(training)
        # Lightning counts this batch after the hooks in which checkpoints are made.
        counts["epoch_loop.state_dict"][BATCHES_THAT_STEPPED] += 1
    elif moment == "epoch end":
        _complete(counts["epoch_progress"])


def move(trainer: Any, batches: int) -> None:
    """Count ``batches`` more, or fewer, of the epoch as seen: with another number of processes each has other ones."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in vars(current):
        setattr(current, name, getattr(current, name) + batches)


def is_midway(trainer: Any) -> bool:
    """Return whether the loops, which have been loaded, have batches of their epoch before them."""
    fit_loop = trainer.fit_loop
    seen = fit_loop.epoch_loop.batch_progress
    return bool(fit_loop.restarted_mid_epoch and not seen.is_last_batch and seen.current.ready < fit_loop.max_batches)


def has_begun(trainer: Any) -> bool:
    """Return whether ``trainer``, or the run that it goes on with, has come to its first batch."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def go_on(trainer: Any, moment: Moment) -> None:
    """Set the loops, which have been loaded and begin now, to go on from ``moment``."""
    fit_loop = trainer.fit_loop
    loop = fit_loop.epoch_loop
    total = loop.val_loop.batch_progress.total
    total.ready = total.started = total.processed = total.completed  # it was only for the guess
    if moment == "epoch end" or not has_begun(trainer):
        _forget(fit_loop, loop, loop.val_loop)  # the next epoch is like any other
    elif moment == "last batch":
        has_validated(loop)  # nothing is left of this epoch but its end
    elif moment == "broken off" and is_validation_due(fit_loop):
        # Lightning passes over that validation, which has been, and counts the update before it once more.
        vars(loop)[BATCHES_THAT_STEPPED] -= 1
    elif moment not in ("batch", "broken off"):
        goes_on(fit_loop)  # the epoch has its validation's metrics, so its schedulers take their steps


def end_epoch(trainer: Any) -> None:
    """Let the loops of batches forget that they have been loaded; after an epoch without a batch they would not."""
    loop = trainer.fit_loop.epoch_loop
    _forget(loop, loop.val_loop)


def _forget(*loops: Any) -> None:
    for loop in loops:
        loop.on_iteration_done()


def _complete(progress: dict[str, Any]) -> None:
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]
