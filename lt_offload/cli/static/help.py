"""The pages of ``--help``: the program, a verb, a recipe with the values of its settings, a group of settings."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_offload.cli import recipes
from lt_offload.cli.static.arguments import usage, value_name
from lt_offload.cli.static.documented import Parameter
from lt_offload.cli.static.settings import GROUPS, RecipeSetting, group, settings, values
from lt_offload.cli.table import VERBS, Verb
from lt_offload.errors import ConfigError
from lt_offload.suggest import did_you_mean

EXIT_CODES = {
    0: "done",
    1: "a defect, or an unforeseen error; --debug shows where",
    2: "something in command, recipe, files or disk that you can mend",
    3: "training has ended, but with a loss that is not finite",
    130: "Ctrl-C; training ends its iteration and writes a checkpoint",
    141: "nobody reads the output any more (lt-finetune ls | head)",
    143: "SIGTERM: as after Ctrl-C; a second one does not wait",
}
_NARROWEST, _WIDEST = 40, 100
_SPECIAL = (
    ("--config FILE", "settings of another YAML file, over those of the recipe"),
    ("--print_config", "print all settings with their values as a recipe"),
    ("--seed_everything N", "seed of everything that is random"),
    ("--quiet", "only results, warnings and errors"),
    ("--debug", "show where an error comes from"),
)


def program() -> str:
    """Return the help of ``lt-finetune``."""
    lines = [
        "usage: lt-finetune RECIPE [--key value ...]   fine-tune",
        "       lt-finetune RUN --resume               go on where this run ended",
        "       lt-finetune VERB ...",
        "",
        "verbs:",
        *_table([(_call(verb), verb.summary) for verb in VERBS.values()]),
        "",
        *_wrapped(
            "RECIPE is a YAML file, the name of a shipped one (lt-finetune ls), or the folder of a run: then it stands "
            "for the settings of that run and, unless it trains, for its newest checkpoint. Every setting is a flag:"
        ),
        "  lt-finetune quickstart --trainer.strategy.memory 600MB --model.lora.r 8",
        "",
        "more help:",
        *_table(
            [
                ("lt-finetune VERB --help", "what a verb does, and its flags"),
                ("lt-finetune RECIPE --help", "every setting, with its value in this recipe"),
                ("lt-finetune RECIPE --data.help", "a group of settings in full, or one setting"),
                ("--quiet, --debug", "only results and errors; where an error comes from"),
                ("lt-finetune --version", ""),
            ]
        ),
        "",
        "exit codes:",
        *_table([(f"{code:>3}", meaning) for code, meaning in EXIT_CODES.items()]),
    ]
    return "\n".join(lines) + "\n"


def of_verb(verb: Verb) -> str:
    """Return the help of one verb."""
    found = verb.read()
    if verb.recipe:
        call = f"lt-finetune {'' if verb.name == 'fit' else verb.name + ' '}RECIPE [--key value ...]"
    else:
        call = usage(found)
    lines = [f"usage: {call}", "", *_wrapped(found.summary), *_paragraphs(found.details)]
    words = [(p.name.upper(), p.about) for p in found.parameters if p.kind != "flag" and p.about]
    if words:
        lines += ["", *_entries(words)]
    own = [parameter for parameter in found.parameters if parameter.kind == "flag"]
    if own:
        lines += ["", "flags:", *_flags(own)]
    if verb.recipe:
        lines += [
            "",
            *_wrapped(
                "RECIPE is a YAML file, the name of a shipped one, or a run folder. Every setting of it is a flag, "
                "too: 'lt-finetune RECIPE --help' lists them."
            ),
        ]
    return "\n".join(lines) + "\n"


def of_recipe(verb: Verb, files: Sequence[Path], args: Sequence[str]) -> str:
    """Return the help of ``verb`` with a recipe: its flags, and every setting with the value that it has."""
    found = verb.read()
    present = values(files, [arg for arg in args if arg not in ("-h", "--help")])
    call = f"lt-finetune {'' if verb.name == 'fit' else verb.name + ' '}{files[-1].stem}"
    lines = [f"usage: {call} [--key value ...]", ""]
    lines += _wrapped(recipes.describe(files[-1]))
    lines += ["", *_wrapped(f"{found.summary} Its flags, and those of every verb:")]
    lines += [*_flags([p for p in found.parameters if p.kind == "flag"]), *_table(_SPECIAL)]
    lines += ["", *_wrapped("Settings, each with its value after =; --data.help, --model.lr.help ... say more.")]
    for name in GROUPS:
        lines += ["", *_wrapped(f"{name}: {group(name).summary}")]
        own = _below(name)
        # A Trainer has dozens of settings, most of which no recipe
        # needs: those that are set, the names of the others.
        chosen = [setting for setting in own if name != "trainer" or setting.key in present]
        for setting in chosen:
            lines += [_with_value(setting, present), *_wrapped(_first_sentence(setting.parameter.about), indent=6)]
        left = [setting.parameter.name for setting in own if setting not in chosen]
        if left:
            lines += ["", *_wrapped(f"Others, explained by --{name}.help: {', '.join(left)}", indent=2)]
    return "\n".join(lines) + "\n"


def of_group(prefix: str, files: Sequence[Path], args: Sequence[str] = ()) -> str:
    """Return the help of the settings at and below ``prefix``, in full.

    Raises:
        ConfigError: if there are none.
    """
    present = values(files, args)
    chosen = [setting for key, setting in settings().items() if key == prefix or key.startswith(f"{prefix}.")]
    if prefix in GROUPS:
        chosen = [setting for setting in chosen if setting.key != prefix]
        if prefix == "trainer":
            chosen = _below(prefix)
    if not chosen:
        raise ConfigError(f"there is no setting {prefix!r} to explain{did_you_mean(prefix, [*GROUPS, *settings()])}")
    lines = []
    if prefix in GROUPS:
        found = group(prefix)
        details = "" if prefix == "trainer" else found.details
        lines += [*_wrapped(found.summary), *_paragraphs(details), ""]
    for setting in chosen:
        default = setting.parameter.default
        about = setting.parameter.about
        # Lightning's docstrings tell some defaults themselves, and in other words.
        if default is not None and not re.search(r"[Dd]efaults?\b", about):
            about = f"{about} Default: {as_yaml(default)}."
        lines += [_with_value(setting, present), *_wrapped(about, indent=6)]
    return "\n".join(lines) + "\n"


def asked_group(args: Sequence[str]) -> str | None:
    """Return the group or setting of which a flag such as ``--model.help`` asks for an explanation."""
    for arg in args:
        if arg.startswith("--") and arg.endswith(".help"):
            return arg[2:].removesuffix(".help")
    return None


# -- lines -----------------------------------------------------------------------------------------------------------


def _below(name: str) -> list[RecipeSetting]:
    """Return the settings of one group; those of the strategy are a group of their own."""
    own = [setting for key, setting in settings().items() if key.startswith(f"{name}.")]
    return own if name != "trainer" else [setting for setting in own if not setting.key.startswith("trainer.strategy.")]


def _call(verb: Verb) -> str:
    found = verb.read()
    if verb.recipe:
        return f"{verb.name} RECIPE"
    words = [p for p in found.parameters if p.kind != "flag"]
    return " ".join([verb.name, *(p.name.upper() if p.kind == "word" else f"{p.name.upper()} ..." for p in words)])


def _flags(parameters: Iterable[Parameter]) -> list[str]:
    entries = []
    for parameter in parameters:
        name = f"--{parameter.name}" + ("" if parameter.is_switch else f" {value_name(parameter)}")
        default = parameter.default
        about = parameter.about
        if default is None:
            about = f"{about} (needed)"
        elif default not in ("None", "False"):
            about = f"{about} Default: {as_yaml(default)}."
        entries.append((name, about))
    return _entries(entries)


def _entries(entries: Iterable[tuple[str, str]]) -> list[str]:
    return [line for name, about in entries for line in (f"  {name}", *_wrapped(about, indent=6))]


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return two columns."""
    width = max(len(left) for left, _ in rows) + 2
    lines: list[str] = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, max(20, _width() - width - 2), break_on_hyphens=False) or [""]
        lines.append(f"  {left:{width}}{wrapped[0]}".rstrip())
        lines += [" " * (width + 2) + more for more in wrapped[1:]]
    return lines


def _with_value(setting: RecipeSetting, present: Mapping[str, Any]) -> str:
    """Return the line that names ``setting``, its choices and its value."""
    parameter = setting.parameter
    choices = f" {{{','.join(parameter.choices)}}}" if parameter.only_choices else ""
    if setting.key in present:
        value = as_yaml(present[setting.key])
    else:
        value = "(to be set)" if parameter.default is None else as_yaml(parameter.default)
    if any(other.startswith(f"{setting.key}.") for other in present) and value == "null":
        value = "see below"
    line = f"  --{setting.key}{choices} = {value}"
    return line if len(line) <= _width() else f"  --{setting.key} = {textwrap.shorten(value, 60, placeholder=' ...')}"


def as_yaml(value: Any) -> str:
    """Return a value as it is written in a recipe; a string is a default as it is written in Python."""
    if isinstance(value, str):
        text = {"None": "null", "True": "true", "False": "false"}.get(value, value)
        text = f"[{text[1:-1]}]" if text.startswith("(") else text
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return ", ".join(
            as_yaml(one.get("class_path", "...") if isinstance(one, dict) else one).rpartition(".")[2] or as_yaml(one)
            for one in value
        )
    return str(value)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s(?=[A-Z])", text, maxsplit=1)[0]


def _plain(text: str) -> str:
    """Return ``text`` without the marks of docstrings."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?([\w]+)[^`]*`", r"\1", text)
    text = re.sub(r"`+([^`]*)`+_?", r"\1", text)
    return re.sub(r"\bNone\b", "null", text)  # as recipes have it


def _paragraphs(details: str) -> Iterator[str]:
    for paragraph in filter(None, details.split("\n")):
        yield ""
        yield from _wrapped(paragraph)


def _wrapped(text: str, *, indent: int = 0) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        _plain(text), _width(), initial_indent=margin, subsequent_indent=margin, break_long_words=False
    )


def _width() -> int:
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))
