"""Carries out the verbs that need a recipe's settings; what each does is a function of its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lt_offload.cli import messages, recipes
from lt_offload.cli.app import App
from lt_offload.cli.table import Verb
from lt_offload.finetune import processes


def run(verb: Verb, files: Sequence[Path], args: Sequence[str], *, of_run: bool = False) -> int:
    """Carry out ``verb`` with the settings of ``files`` and flags, and return the exit code.

    Args:
        verb: what to do.
        files: recipe and what it builds on, later ones override.
        args: flags.
        of_run: whether the recipe was given as the folder of a run, whose newest checkpoint is then meant, too.
    """
    messages.install()
    # A plan for a card that is named is one on a GPU, whatever this machine has.
    on_gpu = torch.cuda.is_available() or any(arg.startswith("--hardware") for arg in args)
    function = verb.load()
    app = App(function, files[-1], [*files, *(recipes.for_gpu(files) if on_gpu else [])], args)
    app.choose_weights(of_run=of_run)
    code = 1
    try:
        code = function(app, **app.options)
    finally:
        # Also after an exception: the others would wait for this one with their next exchange.
        if code != 0:
            processes.end_others(app.trainer)
    if code != 0 and not processes.is_first():
        processes.let_the_first_speak()
    return code
