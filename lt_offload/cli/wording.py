"""Errors of Lightning and jsonargparse in settings, as one line that names the setting."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jsonargparse import Namespace

from lt_offload.cli.static.settings import unknown


def misconfigured(first: str, settings: Namespace) -> str:
    """Return the ``first`` line of Lightning's error about a Trainer's settings as one sentence with the way out."""
    accelerator = settings.get("accelerator")
    if "backend found" in first or "accelerator" in first.lower():
        return (
            f"trainer.accelerator={accelerator!r} with trainer.devices={settings.get('devices')!r} does not work here: "
            f"{first} Use trainer.accelerator=cpu (the emulated device) or auto, and trainer.devices=1"
        )
    return f"trainer: {first}"


def explain(message: str, flags: Sequence[str]) -> str:
    """Return jsonargparse's ``message`` as one line that names the setting; ``flags`` are the known ones."""
    nested = re.search(r"Group '([^']+)' does not accept option '([^']+)'", message)
    if nested:
        return _unknown(f"{nested[1]}.{nested[2]}", flags)
    stray = re.search(r"(?:unrecognized arguments: |Option ')([^\s']+)", message)
    if stray:
        return _unknown(stray[1].lstrip("-").split("=")[0], flags)
    missing = re.search(r'^Key "([^"]+)" not found in namespace', message)
    if missing:
        return f"{missing[1]} is missing; set it, and leave {missing[1].partition('.')[0]} a group of settings"
    key = re.search(r'[Kk]ey "([^"]+)"', message)
    where = f"{key[1]}: " if key else ""
    message = re.sub(r"\n +Subclass types expect one of:(?:\n +- a .*)+", "", message)
    reasons = re.findall(r"^\s*- (.*(?:\n(?!\s*- |\s*Given value).*)*)", message, flags=re.MULTILINE)
    # Of a union's errors, those about the type say only what else it could have been.
    telling = [reason for reason in reasons if not reason.startswith("Expected a")]
    telling = [reason for reason in telling if not reason.startswith("Not a valid subclass")] or telling
    if telling:
        return where + "; ".join(" ".join(reason.split()) for reason in telling)
    union = re.search(r"Subtypes: \[(.*)\]\n(?:.*\n)*\s*Given value: (.*)", message)
    if union:
        types = re.sub(r"<class '([\w.]+)'>", r"\1", union[1]).replace("typing.", "").replace("NoneType", "null")
        return f"{where}expected one of {types}; got {union[2]}"
    line = " ".join(part.strip() for part in message.splitlines())
    line = re.sub(r'^.*?[Kk]ey "[^"]+":\s*', where, line)
    line = re.sub(r"<class '([\w.]+)'>", r"\1", line).replace("typing.", "")
    return re.sub(r"Expected an? (.+?)\. Got value: (.*)", r"expected \1, got \2", line)


def _unknown(key: str, flags: Sequence[str]) -> str:
    known = [flag.lstrip("-") for flag in flags if flag.startswith("--")]
    return unknown(key, [name for name in known if not name.endswith(("help", "+"))])
