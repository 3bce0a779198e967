"""``lt-finetune completion``: scripts for shells to complete verbs, recipes, flags and their values.

The scripts ask ``lt-finetune`` itself, which answers from static tables in about a tenth of a second; so they know the
user's own recipes and the values that settings can have, and never grow old.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lt_offload.cli import recipes
from lt_offload.cli.static.flags import standing_alone
from lt_offload.cli.static.pages import SETTINGS, entries, groups
from lt_offload.cli.static.settings import of_call
from lt_offload.cli.table import VERBS, Verb
from lt_offload.resources import shipped_files

Shell = Literal["bash", "zsh", "fish"]
ASK = "--complete"
"""The first argument of a question; the line so far follows, and its last word is the one to complete."""
FILES = ":files"
"""An answer: complete names of files, too."""
OPTIONS = ("--help", "--version", "--quiet", "--debug")
"""Flags of the program, without a verb."""

_BASH = """\
# lt-finetune completion for bash: put  eval "$(lt-finetune completion bash)"  into ~/.bashrc
_lt_finetune() {
    local IFS=$'\\n' line=("${COMP_WORDS[@]:1:COMP_CWORD}") word files=
    # bash breaks words at = and :, settings contain them
    if [[ ${line[-1]} == "=" ]]; then line=("${line[@]:0:${#line[@]}-2}" "${line[-2]}="); fi
    if (( ${#line[@]} > 2 )) && [[ ${line[-2]} == "=" ]]; then
        line=("${line[@]:0:${#line[@]}-3}" "${line[-3]}=${line[-1]}")
    fi
    local last=${line[-1]}
    COMPREPLY=()
    for word in $("${COMP_WORDS[0]}" --complete "${line[@]}" 2>/dev/null); do
        if [[ $word == ":files" ]]; then files=1; elif [[ $last == *=* ]]; then COMPREPLY+=("${word#*=}")
        else COMPREPLY+=("$word"); fi
    done
    if [[ $files ]]; then
        compopt -o filenames 2>/dev/null
        COMPREPLY+=($(compgen -f -- "${last##*=}"))
    elif [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[.=] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _lt_finetune lt-finetune
"""
_ZSH = """\
#compdef lt-finetune
# lt-finetune completion for zsh: put  eval "$(lt-finetune completion zsh)"  into ~/.zshrc, after compinit
_lt_finetune() {
    local -a found
    found=("${(@f)$($words[1] --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if (( ${found[(Ie):files]} )); then
        found=(${found:#:files})
        _files
    fi
    compadd -- $found
}
compdef _lt_finetune lt-finetune
"""
_FISH = """\
# lt-finetune completion for fish: lt-finetune completion fish > ~/.config/fish/completions/lt-finetune.fish
function __lt_finetune
    set -l line (commandline -opc)
    for word in (lt-finetune --complete $line[2..-1] (commandline -ct) 2>/dev/null)
        if test "$word" = ":files"
            __fish_complete_path (commandline -ct)
        else
            echo $word
        end
    end
end
complete -c lt-finetune -f -a "(__lt_finetune)"
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(shell: Shell) -> int:
    """Print what makes a shell complete verbs, recipes, settings and files.

    bash: eval "$(lt-finetune completion bash)" in ~/.bashrc. zsh: the same with zsh in ~/.zshrc. fish: lt-finetune
    completion fish > ~/.config/fish/completions/lt-finetune.fish.

    Args:
        shell: bash, zsh or fish.
    """
    print(_SCRIPTS[shell], end="")
    return 0


def answers(words: Sequence[str]) -> list[str]:
    """Return the completions of the last of ``words``, which is empty if nothing is typed yet; ``FILES`` for files."""
    *before, last = words or [""]
    candidates = [*_candidates(before, last)]
    return [word for word in candidates if word == FILES or word.startswith(last)]


def _candidates(before: Sequence[str], last: str) -> Sequence[str]:
    if list(before) == ["help"]:
        return list(VERBS)
    if not before:
        return OPTIONS if last.startswith("-") else [*VERBS, *recipes.shipped(), FILES]
    verb = VERBS.get(before[0])
    words = list(before if verb is None else before[1:])
    if verb is None:
        verb = VERBS["fit"]
    name, equals, _ = last.partition("=")
    if equals:
        return [f"{name}={value}" for value in _values(verb, name)] + ([FILES] if not _values(verb, name) else [])
    if last.startswith("-"):
        return _flags(verb)
    if words and words[-1].startswith("--") and words[-1][2:] not in standing_alone():
        return _values(verb, words[-1]) or [FILES]
    places = [entry for entry in entries(verb.name).values() if not entry.is_flag]
    if (verb.recipe and words) or not (verb.recipe or places):
        return _flags(verb)
    place = places[min(len(words), len(places) - 1)] if places else None
    if place is None or place.name == "RECIPE":
        return [*recipes.shipped(), FILES]
    return place.choices or [FILES]


def _flags(verb: Verb) -> list[str]:
    if verb.recipe:
        names = [*of_call(verb), *entries(SETTINGS), *(f"{name}.help" for name in groups())]
    else:
        names = [*(entry.key for entry in entries(verb.name).values() if entry.is_flag), "help"]
    return [f"--{name}" for name in names]


def _values(verb: Verb, flag: str) -> list[str]:
    """Return the values that ``flag`` can have, nothing if they cannot be listed."""
    name = flag.removeprefix("--")
    if name == "hardware":
        return list(shipped_files("configs/hardware", ".yaml"))
    known = entries(SETTINGS) | entries(verb.name) if verb.recipe else entries(verb.name)
    return known[name].choices if name in known else []
