"""Carries out the verbs that need a recipe's settings; what each does is a function of its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lt_offload.cli import recipes
from lt_offload.cli.app import App, quieten, with_values
from lt_offload.cli.table import Verb


def run(verb: Verb, files: Sequence[Path], args: Sequence[str]) -> int:
    """Carry out ``verb`` with the settings of ``files``, later ones first, and of ``args``; return the exit code."""
    quieten()
    on_gpu = torch.cuda.is_available() or any(arg.startswith("--hardware") for arg in args)
    function = verb.load()
    app = App(function, files[-1], [*files, *(recipes.for_gpu(files) if on_gpu else [])], with_values(args))
    return function(app, **app.options)
