"""The flags of a recipe's verb as they are typed: names and values, and which of them stand alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from lt_offload.cli.table import VERBS
from lt_offload.errors import ConfigError

OF_EVERY_VERB = ("print_config", "help", "quiet", "debug")
"""Flags that never have a value."""
WANDB_PROJECT = "lt-offload"
"""What ``--wandb`` alone stands for."""
_END = "--"


@cache
def standing_alone() -> dict[str, str | None]:
    """Return the flags that need no value, with what they stand for alone; None: they never have one."""
    own = [parameter for verb in VERBS.values() if verb.recipe for parameter in verb.read().parameters]
    return {
        **dict.fromkeys(OF_EVERY_VERB),
        **{parameter.name: "true" for parameter in own if parameter.is_switch},
        "wandb": WANDB_PROJECT,
    }


def flags(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the value of every flag in ``args``; None is the value of one that stands alone.

    Raises:
        ConfigError: if there is a word that belongs to no flag.
    """
    taken = False
    for arg, following in pairwise([*args, _END]):
        if taken:
            taken = False
            continue
        if not arg.startswith("--"):
            raise ConfigError(f"unknown setting {arg!r}: settings are flags, such as --model.lr 1e-5")
        name, equals, value = arg[2:].partition("=")
        taken = not equals and _takes(name, following)
        # A plus appends to a list: it is an operator of the parser and no part of the name.
        yield name.removesuffix("+"), value if equals else following if taken else None


def with_values(args: Sequence[str]) -> list[str]:
    """Return ``args`` as the parser wants them.

    Flags that stand alone get the value that they stand for, and those whose value begins with a dash an equals sign:
    else the parser takes ``-3GB`` for another flag.
    """
    found: list[str] = []
    joined = False
    for word, following in pairwise([*args, _END]):
        if joined:
            joined = False
            continue
        name = word.removeprefix("--")
        takes = word.startswith("--") and "=" not in word and _takes(name, following)
        alone = standing_alone().get(name) if word.startswith("--") and not takes else None
        joined = takes and following.startswith("-")
        found.append(f"{word}={following}" if joined else word if alone is None else f"{word}={alone}")
    return found


def _takes(name: str, following: str) -> bool:
    """Return whether the word ``following`` is the value of the flag ``name``."""
    alone = standing_alone().get(name, "")
    if alone == "true":
        return following in ("true", "false")
    return alone is not None and not following.startswith("--")
