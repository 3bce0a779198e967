"""``lt-finetune data``: a preview of the training data."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from lt_offload.cli.app import App
from lt_offload.cli.outputs import check_output
from lt_offload.errors import ConfigError
from lt_offload.finetune.data.preview import Preview
from lt_offload.finetune.terminal import clear
from lt_offload.resources import user_path

_ENDINGS = (".html", ".svg", ".txt")


def data(app: App, *, samples: int = 3, save: str | None = None) -> int:
    """Show what is trained on: samples with what is learned in colour, lengths, what is cut. Loads no weights.

    Args:
        app: the settings.
        samples: examples to show, from the beginning to the end of the data.
        save: file to write the same to: .html, .svg or .txt.
    """
    if samples < 0:
        raise ConfigError(f"samples={samples} is too small; it must be at least 0")
    if save is not None:
        check_output(save, "--save")
        if Path(save).suffix.lower() not in _ENDINGS:
            raise ConfigError(f"save={save!r}: end the name with one of {', '.join(_ENDINGS)}")
    preview = Preview(app.datamodule)
    console = Console(highlight=False, markup=False)
    for part in preview.parts(samples=samples, color=console.color_system is not None):
        clear()
        console.print(part)
    if save is None:
        return 0
    target = user_path(save)
    color = target.suffix.lower() != ".txt"
    paper = Console(file=io.StringIO(), record=True, width=100, highlight=False, markup=False, force_terminal=color)
    # Rendered anew: a page has colours, a text has none, whatever the terminal has.
    for part in preview.parts(samples=samples, color=color):
        paper.print(part)
    if target.suffix.lower() == ".svg":
        paper.save_svg(str(target), title="lt-finetune data")
    else:
        (paper.save_html if color else paper.save_text)(str(target))
    print(f"saved: {target}")
    return 0
