"""Words and flags of verbs that need no recipe, from the signature of their function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lt_offload.cli.static.documented import Documented, Parameter
from lt_offload.errors import ConfigError
from lt_offload.suggest import did_you_mean


def parse(verb: Documented, args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the words and the flags of ``args`` as the function of ``verb`` takes them.

    Raises:
        ConfigError: if there are too many or too few words, or a flag is unknown, lacks its value or has a wrong one.
    """
    flags = {parameter.name: parameter for parameter in verb.parameters if parameter.kind == "flag"}
    words: list[str] = []
    given: dict[str, Any] = {}
    waiting = list(args)
    while waiting:
        arg = waiting.pop(0)
        if not arg.startswith("--"):
            words.append(arg)
            continue
        name, equals, value = arg[2:].partition("=")
        flag = flags.get(name.replace("-", "_"))
        if flag is None:
            raise ConfigError(f"{verb.name}: unknown flag --{name}{did_you_mean(name, flags, prefix='--')}")
        # A switch may be followed by a word of the verb, which is no value of it unless it says true or false.
        if flag.is_switch and not equals:
            value = waiting.pop(0) if waiting and waiting[0] in ("true", "false") else "true"
        elif not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ConfigError(f"{verb.name}: --{name} needs a value: {usage(verb)}")
            value = waiting.pop(0)
        converted = _converted(verb.name, flag, value)
        given[flag.name] = [*given.get(flag.name, []), *converted] if isinstance(converted, list) else converted
    missing = [f"--{flag.name}" for flag in flags.values() if flag.required and flag.name not in given]
    places = [parameter for parameter in verb.parameters if parameter.kind == "word"]
    missing += [place.name.upper() for place in places[len(words) :] if place.required]
    any_number = next((parameter for parameter in verb.parameters if parameter.kind == "words"), None)
    if missing:
        raise ConfigError(f"{verb.name} needs {' and '.join(missing)}: {usage(verb)}")
    if len(words) > len(places) and any_number is None:
        extra = " ".join(words[len(places) :])
        raise ConfigError(f"{verb.name}: {extra} is one word too many: {usage(verb)}")
    return words, given


def usage(verb: Documented) -> str:
    """Return how ``verb`` is called, in one line."""
    parts = []
    for parameter in verb.parameters:
        name = parameter.name.upper()
        if parameter.kind == "words":
            parts.append(f"{name.removesuffix('S')} ...")
        elif parameter.kind == "word":
            parts.append(name if parameter.required else f"[{name}]")
        else:
            flag = f"--{parameter.name}" if parameter.is_switch else f"--{parameter.name} {value_name(parameter)}"
            parts.append(flag if parameter.required else f"[{flag}]")
    return " ".join(["lt-finetune", verb.name, *parts])


def value_name(flag: Parameter) -> str:
    """Return what stands for the value of ``flag`` in a usage line."""
    if flag.choices:
        return "|".join(flag.choices)
    kind = flag.annotation.split("|")[0].strip()
    return {"int": "N", "float": "X", "bool": "true|false"}.get(kind, flag.name.upper())


def _converted(verb: str, flag: Parameter, value: str) -> Any:
    """Return ``value`` as the type of ``flag``."""
    kinds = [kind.strip() for kind in flag.annotation.split("|")]
    if flag.choices and value not in flag.choices:
        hint = did_you_mean(value, flag.choices) or f"; choose {', '.join(flag.choices)}"
        raise ConfigError(f"{verb}: --{flag.name}={value!r} is none of its values{hint}")
    if "list[str]" in kinds:
        return [value]
    for kind, make in (("bool", _truth), ("int", int), ("float", float)):
        if kind in kinds:
            try:
                return make(value)
            except (ValueError, KeyError):
                # A type of both takes the text as it is, e.g. a number or "auto".
                if "str" not in kinds:
                    raise ConfigError(f"{verb}: --{flag.name}={value!r} is not of type {kind}") from None
    return value


def _truth(value: str) -> bool:
    return {"true": True, "false": False}[value]
