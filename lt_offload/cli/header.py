"""The comment at the top of a recipe: what it trains, how it is run and planned, and what its plan says."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from lt_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lt_offload.schema.plan import Plan

_RAM = re.compile(r" \(\d+ GB of RAM\)$")
_HARDWARE = re.compile(r"^#   lt-finetune plan \S+ --hardware (\S+)", re.MULTILINE)


def header(title: str, recipe: str, hardware: str | None, plan: Plan) -> list[str]:
    """Return the lines of the comment.

    Args:
        title: the model, and what of it is trained how.
        recipe: its name, or its file.
        hardware: the machine of ``plan`` as ``--hardware`` takes it; None: this one.
        plan: of the recipe.
    """
    machine = f" --hardware {hardware}" if hardware else ""
    return [
        f"# {_RAM.sub('', title)} ({math.ceil(plan.predicted.host_peak_bytes / 1e9)} GB of RAM)",
        f"#   lt-finetune {recipe} --data.path my.json",
        f"#   lt-finetune plan {recipe}{machine}",
        f"# {figures(plan)}",
    ]


def figures(plan: Plan) -> str:
    """Return what ``plan`` says about its step: seconds, tokens, memory."""
    found = plan.predicted
    size = f"{plan.batch_size * plan.micro_batches} x {plan.sequence_length} tokens"
    return (
        f"Simulated there: {format_seconds(found.iteration_s)} per step of {size} ({format_seconds(found.no_offload_s)} "
        f"with enough memory), {format_bytes(found.device_peak_bytes)} on the GPU, "
        f"{format_bytes(found.host_peak_bytes)} of RAM"
    )


def lines_of(text: str) -> list[str]:
    """Return the comment at the top of a recipe with this ``text``."""
    lines = text.splitlines()
    return lines[: next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))]


def hardware_of(text: str) -> str | None:
    """Return the machine that the comment at the top of a recipe names, None if it names none."""
    found = _HARDWARE.search(text)
    return found[1] if found else None


def with_header(text: str, lines: Sequence[str]) -> str:
    """Return a recipe's ``text`` with other ``lines`` at its top."""
    return "\n".join([*lines, *text.splitlines()[len(lines_of(text)) :]]) + "\n"
