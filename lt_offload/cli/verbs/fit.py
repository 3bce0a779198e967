"""``lt-finetune RECIPE``, training with a summary at its end, and ``lt-finetune validate``."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path

from lt_offload.cli.app import App
from lt_offload.cli.outputs import claimed, make_folder
from lt_offload.errors import ConfigError
from lt_offload.finetune import processes
from lt_offload.finetune.preferences import METRICS
from lt_offload.finetune.run import summary
from lt_offload.finetune.terminal import clear, status, wrapped
from lt_offload.replacing import save_text
from lt_offload.strategy.checkpoint import files as checkpoint
from lt_offload.strategy.checkpoint.resume import EXIT_CODES

_FOLDER = "trainer.default_root_dir"


def fit(
    app: App,
    *,
    ckpt_path: str | None = None,
    resume: bool = False,
    explain: bool = False,
    wandb: str | None = None,
) -> int:
    """Fine-tune.

    Ctrl-C and SIGTERM end the iteration, write a checkpoint and leave with 130 and 143; the second one does not wait.
    A loss that is not finite at the end makes it 3.

    Args:
        app: the settings.
        ckpt_path: checkpoint to continue from, bit for bit as if there had been no interruption.
        resume: continue, in its folder, the last run of this recipe (or that of trainer.default_root_dir) from its
            newest complete checkpoint.
        explain: say what the plan does with every block, not just a paragraph about it.
        wandb: log to Weights & Biases, too, as a run of this project (lt-offload if none is named).
    """
    if explain and not hasattr(app.trainer.strategy, "explain"):
        raise ConfigError(
            f"--explain: trainer.strategy={type(app.trainer.strategy).__name__} makes no plan; leave the flag out, or "
            "use offmate"
        )
    if hasattr(app.trainer.strategy, "explain"):
        app.trainer.strategy.explain = explain
    if not processes.is_first():
        return _train(app, ckpt_path, None)
    with claimed(make_folder(app.run_dir, _FOLDER), _FOLDER):
        # A new run only: one that goes on finds its own files there.
        if not resume and ((app.run_dir / "metrics.csv").exists() or any(app.run_dir.glob("checkpoints/*"))):
            raise ConfigError(
                f"{_FOLDER}={str(app.run_dir)!r} has a run already, which would be overwritten; go on "
                f"with it by 'lt-finetune {app.run_dir} --resume', choose another folder, or remove it"
            )
        return _train(app, ckpt_path, app.keep_metrics())


def _train(app: App, ckpt_path: str | None, metrics: Path | None) -> int:
    """Train; ``metrics`` is the curve of an earlier part of the run. Return the exit code."""
    trainer, first = app.trainer, processes.is_first()
    status("reading data, loading the model")
    config = app.run_dir / "config.yaml"
    # Lightning writes the settings before it loads the checkpoint, which
    # may refuse them: then the old ones are the run's.
    before = config.read_text(encoding="utf-8") if first and ckpt_path is not None and config.is_file() else None
    try:
        trainer.fit(app.model, datamodule=app.datamodule, ckpt_path=ckpt_path, weights_only=True)
    except BaseException as error:
        processes.end_others(trainer)
        clear()
        # A run that could not be continued with the present settings keeps its own, and its curve.
        if app.summary.first_step is None:
            if before is not None:
                save_text(config, before)
            if metrics is not None:
                metrics.replace(app.run_dir / "metrics.csv")
        report = app.summary.end(trainer, error)
        left = error if isinstance(error, SystemExit) else None
        terminated = EXIT_CODES[signal.SIGTERM]
        # Lightning makes an exit of Ctrl-C as well, with the code of any failure: what was raised first tells it.
        if left is not None and (left.code == terminated or isinstance(left.__context__, KeyboardInterrupt)):
            if first:
                newest = checkpoint.newest(app.run_dir / "checkpoints")
                way = f"{newest} is complete, continue with\nlt-finetune {app.run_dir} --resume"
                hint = way if newest else "there is no checkpoint yet"
                print(wrapped(f"interrupted after step {trainer.global_step}; {hint}"), file=sys.stderr)
            return terminated if left.code == terminated else EXIT_CODES[signal.SIGINT]
        if report and left is None:
            print(wrapped(f"how far the run came: {report}"), file=sys.stderr)
        raise
    clear()
    if not first:
        return 0
    if app.summary.first_step is None:
        nothing = (
            f"warning: there was nothing left to train at step {trainer.global_step}, in epoch "
            f"{trainer.current_epoch}, with trainer.max_steps={trainer.max_steps} and "
            f"trainer.max_epochs={trainer.max_epochs}; raise what is reached"
        )
        print(wrapped(nothing), file=sys.stderr)
    report = None
    try:
        report = app.summary.end(trainer)
        if gains := summary.run_gains(app.summary, trainer):
            summary.write_report(app.run_dir, gains)
    finally:  # the last thing to be read, also if that failed or was cut short
        clear()
        summary.print_summary(app.summary, trainer, report)
    return 0 if app.summary.broken is None else 3


def validate(app: App, *, ckpt_path: str | None = None) -> int:
    """Compute the loss on held-out data, streaming the weights.

    Args:
        app: the settings.
        ckpt_path: checkpoint to evaluate; if not given, the newest one of a run folder, else the pretrained model.
    """
    status("reading data, loading the model")
    # Lightning returns no list of results at all where there is nothing to validate on.
    [metrics] = app.trainer.validate(
        app.model, datamodule=app.datamodule, ckpt_path=ckpt_path, weights_only=True, verbose=False
    ) or [{}]
    clear()
    if "val_loss" not in metrics:
        raise ConfigError("there is nothing to validate on; set data.validation_path, or data.validation_share above 0")
    if processes.is_first():
        loss = metrics["val_loss"]
        of_pairs = [f"{name} {metrics[f'val_{name}']:.4g}" for name in METRICS if f"val_{name}" in metrics]
        print(f"val_loss {loss:.6f}  ({', '.join(of_pairs) or f'perplexity {math.exp(min(loss, 700.0)):.4g}'})")
    return 0
