"""Words and flags as they are typed: names and values, and the flags that need none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from lt_offload.cli.static import pages
from lt_offload.cli.table import VERBS
from lt_offload.errors import ConfigError

WANDB_PROJECT = "lt-offload"
"""The value of ``--wandb`` alone."""
_END = "--"
Flags = list[tuple[str, str | None]]
"""Names, without dashes, and values; None: the flag stands alone."""


@cache
def standing_alone() -> dict[str, str | None]:
    """Return the flags that need no value, with their value alone; None: they never have one."""
    switches = [entry.key for verb in VERBS for entry in pages.entries(verb).values() if entry.is_switch]
    of_every_verb = [entry.key for entry in pages.entries("every-verb").values() if entry.is_switch]
    return {**dict.fromkeys(switches, "true"), "wandb": WANDB_PROJECT, **dict.fromkeys([*of_every_verb, "help"])}


def split(args: Sequence[str]) -> tuple[list[str], Flags]:
    """Return the words of ``args`` that belong to no flag, and the flags."""
    words, flags = list[str](), Flags()
    taken = False
    for arg, following in pairwise([*args, _END]):
        if taken or not arg.startswith("--"):
            words += [] if taken else [arg]
            taken = False
            continue
        name, equals, value = arg[2:].partition("=")
        alone = standing_alone().get(name, "")
        # A switch may be followed by a word, which is no value of it unless it says true or false.
        takes = following in ("true", "false") if alone == "true" else alone is not None and following[:2] != "--"
        taken = takes and not equals
        flags.append((name, value if equals else following if taken else alone or None))
    return words, flags


def flags_of(args: Sequence[str]) -> Flags:
    """Return the flags of a verb with a recipe; raises ``ConfigError`` if there is a word that belongs to no flag."""
    words, flags = split(args)
    if words:
        raise ConfigError(f"unknown setting {words[0]!r}: settings are flags, such as --model.lr 1e-5")
    return flags


def joined(args: Sequence[str]) -> list[str]:
    """Return ``args`` as the parser wants them: each value with an equals sign, or ``-3GB`` would be another flag."""
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in flags_of(args)]
