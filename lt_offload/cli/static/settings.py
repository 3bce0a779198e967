"""All settings of recipes with their meaning and their values in a recipe, and errors about those that do not exist.

They are the parameters of the constructors that Lightning's command line calls later, seconds after this has answered.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lt_offload.cli.recipes import read
from lt_offload.cli.static.definitions import definition
from lt_offload.cli.static.documented import Documented, Parameter
from lt_offload.cli.static.flags import OF_EVERY_VERB, flags
from lt_offload.cli.table import VERBS
from lt_offload.errors import ConfigError
from lt_offload.nested import dotted
from lt_offload.resources import is_file
from lt_offload.suggest import nearest
from lt_offload.yaml_files import read_yaml

GROUPS = {
    "model": ("lt_offload.finetune.module", "FineTune"),
    "data": ("lt_offload.finetune.data.module", "FineTuneData"),
    "trainer.strategy": ("lt_offload.strategy.offmate", "OffmateStrategy"),
    "trainer": ("lightning.pytorch.trainer.trainer", "Trainer"),
}
"""Where the settings below each key are defined."""
STRATEGY_NAMES = ("lt_offload.OffmateStrategy", "OffmateStrategy", "offmate")
"""What recipes call the class whose settings are those of ``trainer.strategy``."""
OF_FILES = ("base", "gpu", "seed_everything")
"""Keys of recipes outside the groups."""
OF_CALLS = (*OF_FILES, "config", *OF_EVERY_VERB)
"""And flags outside the groups, besides those of the verb."""
_TOP = ("model", "data", "trainer")
_LINKED = {"data.model": "model.name", "data.new_tokens": "model.new_tokens", "model.tokenizer": "data.tokenizer"}
"""Settings that follow another one and cannot be set by themselves."""
_MOST_NAMES = 12


@dataclass(frozen=True, slots=True)
class RecipeSetting:
    """One setting of a recipe."""

    key: str
    """As a flag has it: ``trainer.strategy.memory``."""
    parameter: Parameter


def group(name: str) -> Documented:
    """Return what defines the settings below ``name``, one of ``GROUPS``."""
    return definition(*GROUPS[name])


@cache
def settings() -> dict[str, RecipeSetting]:
    """Return every setting by its key, in the order of the groups."""
    found = [setting for name in GROUPS for setting in _below(name, group(name))]
    return {setting.key: setting for setting in found if setting.key not in _LINKED}


def _below(prefix: str, documented: Documented) -> Iterator[RecipeSetting]:
    for parameter in documented.parameters:
        key = f"{prefix}.{parameter.name}"
        yield RecipeSetting(key, parameter)
        if parameter.group is not None:
            yield from _below(key, parameter.group)


# -- values ----------------------------------------------------------------------------------------------------------


def values(files: Sequence[Path], args: Sequence[str] = ()) -> dict[str, Any]:
    """Return what ``files``, later ones first in rank, and the flags ``args`` set, by key."""
    given = [{flag: _parsed(value)} for flag, value in flags(args) if value is not None]
    return {key: value for content in (*map(read, files), *given) for key, value in dotted(content)}


def _parsed(value: str) -> Any:
    try:
        return read_yaml(value)
    except ValueError:
        return value


# -- errors ----------------------------------------------------------------------------------------------------------


def check(files: Sequence[Path], args: Sequence[str], verb: Documented) -> None:
    """Look for settings that do not exist, in ``files`` and in the flags ``args``.

    Args:
        files: recipe and what it builds on.
        args: flags.
        verb: whose own flags are settings, too.

    Raises:
        ConfigError: names the first one, and those that may have been meant.
    """
    own = _own(verb)
    more = [Path(text) for name, text in flags(args) if name == "config" and text is not None and is_file(text)]
    # The class of the strategy decides whether settings below it can be known, so it is looked for first.
    strategy = values([*files, *more]).get("trainer.strategy")
    for file in (*files, *more):
        for key, value in read(file).items():
            _check_key(key, value, [*OF_FILES, *own], strategy, f" in {file}")
    for name, text in flags(args):
        value = None if text is None else _parsed(text)
        if name == "trainer.strategy" and isinstance(value, str | dict):
            strategy = value.get("class_path", strategy) if isinstance(value, dict) else value
        if name not in own and (owners := [v for v in VERBS.values() if v.recipe and name in _own(v.read())]):
            raise ConfigError(
                f"--{name} is a flag of {' and '.join(owner.name for owner in owners)}, not of {verb.name}"
                + ("; give the run folder instead of the recipe, or --ckpt_path FILE" if name == "resume" else "")
            )
        _check_key(name.replace(".init_args.", "."), value, [*OF_CALLS, *own], strategy, "")


def _own(verb: Documented) -> list[str]:
    """Return the flags of a verb that are no settings."""
    return [parameter.name for parameter in verb.parameters]


def _check_key(key: str, value: Any, others: Sequence[str], strategy: Any, where: str) -> None:
    """Check ``key``, and what is below it where ``value`` is a group of settings."""
    if key in others or key.partition(".")[0] in ("print_config", "config"):
        return
    known = settings()
    if key in _LINKED:
        if value is None:
            return  # as a recipe may write what it does not set
        raise ConfigError(f"{key}={value!r}{where} cannot be set by itself; set {_LINKED[key]}, which it follows")
    if key not in known and key not in GROUPS:
        # Settings of a class that is none of ours; Lightning's parser will know them.
        if key.startswith(_opaque(strategy)):
            return
        raise ConfigError(unknown(key, [*known, *others, *_TOP], where))
    if isinstance(value, dict):
        # An object as jsonargparse writes it. Only the strategy's own settings are in the tables.
        if {"class_path", "init_args"} & value.keys():
            strategy = value.get("class_path", strategy)
            if key != "trainer.strategy" or strategy not in STRATEGY_NAMES:
                return
            value = value.get("init_args") or {}
        if key in GROUPS or known[key].parameter.group is not None:
            for name, inner in value.items() if isinstance(value, dict) else ():
                _check_key(f"{key}.{name}", inner, (), strategy, where)
    elif key in known:
        _check_choice(known[key], value, where)


def _opaque(strategy: Any) -> tuple[str, ...]:
    """Return the beginnings of keys of which nothing is known here: those of classes that a recipe names."""
    free = [f"{key}." for key in _objects()]
    return tuple(key for key in free if key != "trainer.strategy." or strategy not in STRATEGY_NAMES)


@cache
def _objects() -> list[str]:
    """Return the settings whose values can be objects with settings of their own."""
    plain = {"str", "int", "float", "bool", "Union", "Optional", "None", "list", "tuple", "dict", "Literal"}

    def is_object(annotation: str) -> bool:
        # A name in a type that is none of Python's plain ones may be a class that a recipe names.
        names = {node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)}
        return bool(names - plain)

    return [
        key
        for key, setting in settings().items()
        if setting.parameter.group is None and (key == "trainer.strategy" or is_object(setting.parameter.annotation))
    ]


def _check_choice(setting: RecipeSetting, value: Any, where: str) -> None:
    """Raise ``ConfigError`` if ``value`` is none of those that ``setting`` can have."""
    parameter = setting.parameter
    name = setting.key.rpartition(".")[2]
    if isinstance(value, str) and "str" not in parameter.annotation and value not in parameter.choices:
        others = [
            key for key, other in settings().items() if key.endswith(f".{name}") and value in other.parameter.choices
        ]
        if others:
            raise ConfigError(f"{setting.key}: {value!r}{where} is a value of another setting; set {others[0]}={value}")
    if not parameter.only_choices or value is None or str(value) in parameter.choices:
        return
    close = nearest(str(value), parameter.choices)
    hint = f"did you mean {' or '.join(close)}?" if close else f"choose {', '.join(parameter.choices)}"
    raise ConfigError(f"{setting.key}: there is no {value!r}{where}; {hint}")


def unknown(key: str, known: Sequence[str], where: str = "") -> str:
    """Return the error about a setting that is none of ``known``, with those that may have been meant."""
    prefix, _, last = key.rpartition(".")
    # For --data.path.x the setting is there, and has no settings below it.
    if prefix in known and not any(name.startswith(f"{prefix}.") for name in known):
        return f"unknown setting {key!r}{where}; {prefix} is given as one value: --{prefix} VALUE"
    close = [name for name in known if name.rpartition(".")[2] == last]
    if not close and len(last) > 2:  # an abbreviation
        close = [n for n in known if n.rpartition(".")[2].startswith(last) and n.startswith(prefix)]
    if not close:
        siblings = [name for name in known if name.rpartition(".")[0] == prefix]
        ends = nearest(last, [name.rpartition(".")[2] for name in siblings])
        close = [f"{prefix}.{end}".lstrip(".") for end in ends] or nearest(key, known, cutoff=0.75)
        if not close and prefix and 0 < len(siblings) <= _MOST_NAMES:
            return f"unknown setting {key!r}{where}; {prefix} has {', '.join(n.rpartition('.')[2] for n in siblings)}"
        if not close and not prefix:  # a name without its group
            close = [n for n in known if n.rpartition(".")[2] in nearest(last, [n.rpartition(".")[2] for n in known])]
    hint = f"; did you mean {' or '.join(close[:3])}?" if close else ""
    return f"unknown setting {key!r}{where}{hint}"
