"""The search for settings and flags that do not exist, seconds before Lightning's command line could report them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from lt_offload.cli.recipes import GROUPS, read
from lt_offload.cli.static import pages
from lt_offload.cli.static.pages import SETTINGS, HelpEntry, entries, groups, page
from lt_offload.cli.table import VERBS, Verb
from lt_offload.errors import ConfigError
from lt_offload.nested import dotted
from lt_offload.resources import is_file
from lt_offload.suggest import did_you_mean, nearest
from lt_offload.yaml_files import read_yaml

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


STRATEGY_NAMES = ("lt_offload.OffmateStrategy", "OffmateStrategy", "offmate")
"""Names in recipes of the class with the settings of ``trainer.strategy``."""
OF_FILES = ("base", "gpu", "seed_everything")
"""Keys of recipes outside the groups."""
LINKED = {"data.model": "model.name", "data.new_tokens": "model.new_tokens", "model.tokenizer": "data.tokenizer"}
"""Settings that follow another one and cannot be set by themselves."""
_MOST_NAMES = 12


def lightning_version() -> str:
    """Return the version of Lightning that is installed; empty if none is."""
    try:
        return version("lightning")
    except PackageNotFoundError:
        return ""


def values(files: Sequence[Path], args: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values that ``files``, later ones first in rank, and the flags ``args`` set, by key."""
    return {key: value for content in (*map(read, files), *_contents(args)) for key, value in dotted(content)}


def _contents(args: Sequence[str]) -> list[dict[str, Any]]:
    """Return flags as files would have them."""
    return [{name.removesuffix("+").replace(".init_args.", "."): _parsed(value)} for name, value in flags_of(args)]


def _parsed(value: str | None) -> Any:
    try:
        return None if value is None else read_yaml(value)
    except ValueError:
        return value


def of_call(verb: Verb) -> list[str]:
    """Return the flags of a verb with a recipe that are no settings."""
    return [*entries(verb.name), *OF_FILES, *entries("every-verb"), "help"]


def check(files: Sequence[Path], args: Sequence[str], verb: Verb) -> None:
    """Raise ``ConfigError`` for the first setting in ``files`` and flags that does not exist; it names near ones."""
    words, _ = split(args)
    if words and verb.name == "export":
        raise ConfigError(f"{words[0]!r} is one word too many; the folder or file to write is --output {words[0]}")
    flags = flags_of(args)
    more = [Path(text) for name, text in flags if name == "config" and text is not None and is_file(text)]
    # The class of the strategy decides whether settings below it can be known, so it is looked for first.
    ours = values([*files, *more], args).get("trainer.strategy") in STRATEGY_NAMES
    for file in (*files, *more):
        for key, value in dotted(read(file)):
            top = key.partition(".")[0]
            _check_key(key if top in GROUPS else top, value, [*OF_FILES, *entries(verb.name)], ours, f" in {file}")
    for name, _ in flags:
        if name not in of_call(verb) and (
            owners := [one.name for one in VERBS.values() if one.recipe and name in entries(one.name)]
        ):
            raise ConfigError(
                f"--{name} is a flag of {' and '.join(owners)}, not of {verb.name}"
                + ("; give the run folder instead of the recipe, or --ckpt_path FILE" if name == "resume" else "")
            )
    whole = [name for name, entry in entries(SETTINGS).items() if {"MAP", "TEXT"} & _kinds(entry)]
    # A text such as 'Question: why?' is a map to YAML.
    whole = [*of_call(verb), *(name for name in whole if "OBJECT" not in _kinds(entries(SETTINGS)[name]))]
    for content in _contents(args):
        for key, value in content.items() if content.keys() <= {*whole} else dotted(content):
            _check_key(key, value, of_call(verb), ours, "")


def _check_key(key: str, value: Any, others: Sequence[str], ours: bool, where: str) -> None:
    known = entries(SETTINGS)
    if key in LINKED and value is not None:  # None is what a recipe may write of a setting that it leaves alone
        raise ConfigError(f"{key}={value!r}{where} cannot be set by itself; set {LINKED[key]}, which it follows")
    if key in known:
        _check_choice(known[key], value, where)
    elif not (key in LINKED or key in groups() or key in others or key.startswith(("print_config", "config."))):
        # Settings of a class that is none of ours, which Lightning's parser will know, and maps in files.
        opaque = [name for name, entry in known.items() if {"OBJECT", *(["MAP"] if where else [])} & _kinds(entry)]
        free = any(key.startswith(f"{name}.") for name in opaque if name != "trainer.strategy" or not ours)
        # Another version of Lightning may know more: its parser is asked, which takes seconds.
        newer = f"Lightning {lightning_version()}." not in groups()["trainer"]
        if not free and not (newer and key.rpartition(".")[0] == "trainer"):
            raise ConfigError(unknown(key, [*known, *others, *GROUPS], where))


def _kinds(entry: HelpEntry) -> set[str]:
    return set(entry.takes.split("|"))


def _check_choice(setting: HelpEntry, value: Any, where: str) -> None:
    """Raise ``ConfigError`` if ``value`` is none of those that ``setting`` can have."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if text in setting.choices or value is None:
        return
    name = setting.key.rpartition(".")[2]
    if isinstance(value, str) and not {"TEXT", "OBJECT"} & _kinds(setting):
        others = [key for key, other in entries(SETTINGS).items() if key.endswith(f".{name}") and text in other.choices]
        if others:
            raise ConfigError(f"{setting.key}: {value!r}{where} is a value of another setting; set {others[0]}={value}")
    # Words alone are refused here: the parser knows whether 0 is a way to say false.
    if isinstance(value, str) and setting.only_choices:
        raise ConfigError(f"{setting.key}: there is no {value!r}{where}{_nearest(text, setting)}")


def _nearest(text: str, entry: HelpEntry) -> str:
    return did_you_mean(text, entry.choices) or f"; choose {', '.join(entry.choices)}"


def unknown(key: str, known: Sequence[str], where: str = "") -> str:
    """Return the error about a setting that is none of ``known``, with those that may have been meant."""
    prefix, _, last = key.rpartition(".")
    # For --data.path.x the setting is there, and has no settings below it.
    if prefix in known and not any(name.startswith(f"{prefix}.") for name in known):
        return f"unknown setting {key!r}{where}; {prefix} is given as one value: --{prefix} VALUE"
    ends = {name: name.rpartition(".")[2] for name in known}
    siblings = [name for name in known if name.rpartition(".")[0] == prefix]
    close = [name for name in known if ends[name] == last]
    if not close and len(last) > 2:  # an abbreviation
        close = [name for name in known if ends[name].startswith(last) and name.startswith(prefix)]
    close = close or [f"{prefix}.{end}".lstrip(".") for end in nearest(last, [ends[name] for name in siblings])]
    close = close or nearest(key, known, cutoff=0.75)
    if not close and prefix and 0 < len(siblings) <= _MOST_NAMES:
        return f"unknown setting {key!r}{where}; {prefix} has {', '.join(ends[name] for name in siblings)}"
    if not close and not prefix:  # a name without its group
        close = [name for name in known if ends[name] in nearest(last, ends.values())]
    hint = f"; did you mean {' or '.join(close[:3])}?" if close else ""
    return f"unknown setting {key!r}{where}{hint}"


def parse(verb: Verb, args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the words and the flags of ``args`` as the function of ``verb``, which needs no recipe, takes them.

    Raises ``ConfigError`` if there are too many or too few words, or a flag is unknown, lacks its value or has a wrong
    one.
    """
    known, usage = entries(verb.name), page(verb.name).partition("\n")[0].removeprefix("usage: ")
    words, flags = split(args)
    for name, value in flags:
        if name not in known:
            raise ConfigError(f"{verb.name}: unknown flag --{name}{did_you_mean(name, _flags(known), prefix='--')}")
        if value is None:
            raise ConfigError(f"{verb.name}: --{name} needs a value: {usage}")
    places = [entry for entry in known.values() if not entry.is_flag]
    for entry, value in (*zip(places, words, strict=False), *((known[name], value) for name, value in flags)):
        if entry.only_choices and value not in entry.choices:
            raise ConfigError(f"{verb.name}: {entry.name}={value!r} is none of its values{_nearest(str(value), entry)}")
    if missing := [place.name for place in places[len(words) :]]:
        raise ConfigError(f"{verb.name} needs {' and '.join(missing)}: {usage}")
    if len(words) > len(places) and not any(place.takes == "..." for place in places):
        raise ConfigError(f"{verb.name}: {' '.join(words[len(places) :])} is one word too many: {usage}")
    return words, {name: value == "true" if known[name].is_switch else value for name, value in flags}


def _flags(known: dict[str, HelpEntry]) -> Iterable[str]:
    return (name for name, entry in known.items() if entry.is_flag)
