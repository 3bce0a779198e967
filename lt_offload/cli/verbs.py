"""What ``lt-finetune`` does once settings are known. A verb's keyword parameters are flags, its docstring is help."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lt_offload.cli import recipes
from lt_offload.cli.app import App, quieten, with_values
from lt_offload.cli.early import check_early
from lt_offload.cli.outputs import make_folder
from lt_offload.cli.planning import plan
from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.module import check_data
from lt_offload.strategy.checkpoint import files as checkpoint
from lt_offload.strategy.checkpoint.foreign import check_weights
from lt_offload.strategy.checkpoint.resume import EXIT_CODES

__all__ = ["check", "export", "fit", "generate", "plan", "run", "validate"]


def run(verb: str, files: Sequence[Path], args: Sequence[str]) -> int:
    """Carry out ``verb`` with the settings of ``files``, later ones first, and of ``args``; return the exit code."""
    quieten()
    on_gpu = torch.cuda.is_available() or any(arg.startswith("--hardware") for arg in args)
    verbs: dict[str, Callable[..., int]] = {
        "fit": fit,
        "plan": plan,
        "validate": validate,
        "generate": generate,
        "export": export,
        "check": check,
    }
    app = App(verbs[verb], files[-1], [*files, *(recipes.for_gpu(files) if on_gpu else [])], with_values(args))
    result: int = app.verb(app, **app.options)
    return result


def fit(app: App, *, ckpt_path: str | None = None, resume: bool = False, explain: bool = False) -> int:
    """Fine-tune.

    Ctrl-C and SIGTERM end the iteration, write a checkpoint and leave with 130 and 143; the second one does not wait.

    Args:
        app: the settings.
        ckpt_path: checkpoint to continue from, bit for bit as if there had been no interruption.
        resume: continue, in its folder, the last run of this recipe (or that of trainer.default_root_dir) from its
            newest complete checkpoint.
        explain: say what the plan does with every block, not just a paragraph about it.
    """
    from lt_offload.finetune.summary import print_summary, run_gains, write_run_report

    path = str(app.resumed) if app.resumed is not None else ckpt_path
    check_early(app, path, resume=True)
    make_folder(app.run_dir, "trainer.default_root_dir")
    trainer = app.trainer
    if hasattr(trainer.strategy, "explain"):
        trainer.strategy.explain = explain
    try:
        trainer.fit(app.model, datamodule=app.datamodule, ckpt_path=path, weights_only=True)
    except SystemExit as left:
        if not trainer.interrupted:
            raise
        newest = checkpoint.newest(app.run_dir / "checkpoints")
        hint = f"{newest} is complete, continue with --resume" if newest else "there is no checkpoint yet"
        print(f"interrupted after step {trainer.global_step}; {hint}", file=sys.stderr)
        terminated = EXIT_CODES[signal.SIGTERM]
        return terminated if left.code == terminated else EXIT_CODES[signal.SIGINT]
    report = write_run_report(app.summary, trainer, app.run_dir)
    print_summary(app.summary, trainer, app.run_dir, report)
    if gains := run_gains(app.summary, trainer):
        write_run_report(app.summary, trainer, app.run_dir, gains)
    return 0


def validate(app: App, *, ckpt_path: str | None = None) -> int:
    """Compute the loss on held-out data, streaming the weights.

    Args:
        app: the settings.
        ckpt_path: checkpoint to evaluate; the pretrained model if not given.
    """
    check_early(app, ckpt_path)
    app.trainer.validate(app.model, datamodule=app.datamodule, ckpt_path=ckpt_path, weights_only=True)
    return 0


def generate(app: App, *, prompt: str | None = None, max_new_tokens: int = 64, ckpt_path: str | None = None) -> int:
    """Let the model continue a prompt, streaming the weights.

    Args:
        app: the settings.
        prompt: text, or an instruction if the recipe trains on instructions; default: the recipe's sample_prompt.
        max_new_tokens: where to stop if the model does not.
        ckpt_path: checkpoint to use; the pretrained model if not given.
    """
    text = prompt if prompt is not None else app.datamodule.sample_prompt
    if text is None:
        raise ConfigError("generate needs --prompt: the recipe has no data.sample_prompt")
    if not text.strip():
        raise ConfigError(f"the prompt is empty: {text!r}; give some text with --prompt")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} is too small; it must be at least 1")
    check_early(app, ckpt_path)
    request: Any = [app.datamodule.prompt(text, max_new_tokens=max_new_tokens)]
    loader: DataLoader[Any] = DataLoader(request, batch_size=None)
    results: Any = app.trainer.predict(app.model, loader, ckpt_path=ckpt_path, weights_only=True)
    print(app.datamodule.tokenizer.decode(results[0], skip_special_tokens=True))
    return 0


def export(app: App, *, output: str, ckpt_path: str | None = None, merge: bool = True) -> int:
    """Write a model folder that Hugging Face's from_pretrained reads.

    Args:
        app: the settings.
        output: the folder; must not exist or be empty.
        ckpt_path: checkpoint to export; the pretrained model if not given.
        merge: merge adapters into the weights; otherwise the adapters alone are written.
    """
    from lt_offload.finetune.export import check_target
    from lt_offload.finetune.export import export as write

    target = check_target(output)
    check_early(app, ckpt_path)
    module = app.model
    module.configure_model()
    if ckpt_path is not None:
        state = checkpoint.load(ckpt_path, weights_only=True)["state_dict"]
        check_weights(state, module.state_dict())
        module.load_state_dict(state)
    print(write(module.model, app.datamodule.tokenizer, target, merge=merge))
    return 0


def check(app: App) -> int:
    """Check every setting, without data, weights or a GPU.

    Args:
        app: the settings.
    """
    check_early(app)
    if app.model.architecture is not None:
        config = load.load_config(app.model.name, app.model.architecture)
        check_data(config, max_length=app.datamodule.max_length)
    print(f"{app.recipe}: every setting is known and of the right type")
    return 0
