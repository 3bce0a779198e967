"""Roles of a data set's columns in each format, and the choice of the format by the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.rows import Row, RowFault, check_text
from lt_offload.suggest import did_you_mean, nearest

Format = Literal["text", "alpaca", "chat", "completion", "preference"]
FormatChoice = Literal["auto", "text", "alpaca", "chat", "completion", "preference"]

NEEDED: dict[Format, tuple[str, ...]] = {
    "chat": ("messages",),
    "alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
}
"""Roles that rows of a format must have, in the order in which formats are tried."""
_ALL: dict[Format, tuple[str, ...]] = {
    "chat": ("messages", "tools", "system"),
    "alpaca": ("instruction", "output", "input", "system", "history"),
    "completion": ("prompt", "completion", "tools"),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected", "tools"),
}
_OF_MESSAGES = ("role", "content")
"""Roles of the keys of a message, not of columns."""
_PAIR = ("question", "query", "problem", "input", "instruction", "prompt"), ("answer", "response", "reply", "solution")
"""Usual names of columns that are no format's, of questions and of their answers, for a hint."""
_NEAR = 0.4
"""Least likeness of a column's name that is shown for a missing role: ``chosen_response`` is one of ``chosen``."""
_OF_COLUMNS = tuple(dict.fromkeys(role for roles in _ALL.values() for role in roles))
ROLES = (*_OF_COLUMNS, *_OF_MESSAGES)


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a row, by their roles.

    Args:
        format: of the rows.
        columns: columns by their roles; only those that the data have.
        keys: keys of messages by their roles, as far as they were named.
        of_messages: whether prompts and completions, or the answers of pairs, are lists of messages.
    """

    format: Format
    columns: Mapping[str, str]
    keys: Mapping[str, str]
    of_messages: bool = False

    @property
    def of_texts(self) -> bool:
        """True for texts that no chat template writes: plain ones, or prompts and completions."""
        return self.format == "text" or (self.format in ("completion", "preference") and not self.of_messages)

    def side(self, role: str) -> Columns:
        """Return the columns of prompts with one of the two answers of a pair, ``chosen`` or ``rejected``."""
        columns = {"prompt": self.columns.get("prompt", "prompt"), "completion": self.columns[role]}
        columns |= {name: self.columns[name] for name in ("tools",) if name in self.columns}
        return Columns("completion", columns, self.keys, self.of_messages)

    @property
    def said(self) -> str:
        """Format and columns in a few words."""
        return f"{self.format} (column{'s' if len(self.columns) > 1 else ''} {', '.join(self.columns.values())})"

    def value(self, row: Row, role: str) -> Any:
        """Return the content of a column; None if it is missing and need not be there, else that is a ``RowFault``."""
        column = self.columns.get(role)
        if column is not None and column not in row and role in NEEDED[self.format]:
            raise RowFault(f"{column} is missing")
        return None if column is None else row.get(column)

    def text(self, row: Row, role: str) -> str:
        """Return the text in a column, an empty one where it need not be there; ``RowFault`` if it is no text."""
        value = self.value(row, role)
        return "" if value is None and role not in NEEDED[self.format] else check_text(value, self.columns[role])


def check_columns(mapping: Mapping[str, str]) -> None:
    """Check ``data.columns`` by itself; raises ``ConfigError`` if a role is unknown, or two have one column."""
    for role in mapping:
        if role not in ROLES:
            hint = did_you_mean(role, ROLES, most=1) or f"; roles are {', '.join(ROLES)}"
            raise ConfigError(f"data.columns: unknown role {role!r}{hint} (roles stand left: role: column)")
    for group in (_OF_MESSAGES, _OF_COLUMNS):
        used: dict[str, str] = {}
        for role in group:
            column = mapping.get(role)
            if column is not None and used.setdefault(column, role) != role:
                raise ConfigError(
                    f"data.columns gives column {column!r} two roles, {used[column]} and {role}; give it one"
                )


def find_columns(
    choice: FormatChoice, mapping: Mapping[str, str], names: Sequence[str], first: Row, where: str
) -> Columns:
    """Return the roles of the columns ``names``, and the format of the rows, of which ``first`` is one.

    ``choice`` is ``data.format``, ``mapping`` is ``data.columns``, and errors name the source ``where``. Raises
    ``ConfigError`` if columns are missing, speak for no format, or are those of preference pairs.
    """
    keys = {role: mapping[role] for role in _OF_MESSAGES if role in mapping}
    by_role = {role: column for role, column in mapping.items() if role not in keys}
    # A format is taken only if it uses all columns that the user has named: else a name would be ignored silently.
    wanted = [*by_role, *(["messages"] if keys else [])]
    has = ", ".join(map(repr, names)) or "none"
    for column in by_role.values():
        if column not in names:
            near = nearest(column, names, most=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"data.columns: {where} has no column {column!r}, it has {has}{hint}")
    free = [name for name in names if name not in by_role.values()]
    for role, name in [*zip(_OF_COLUMNS, _OF_COLUMNS, strict=True), ("messages", "conversations")]:
        if name in free:
            by_role.setdefault(role, name)
    if choice == "auto":
        _refuse_preferences(where, by_role, names, first)
    for format in NEEDED if choice == "auto" else [choice]:
        stray = sorted(set(wanted) - set(_ALL[format]))
        if all(role in by_role for role in NEEDED[format]) and not (stray and choice == "auto"):
            if stray:
                raise ConfigError(
                    f"data.columns: data.format={format} has no role {stray[0]!r}, it has {', '.join(_ALL[format])}"
                )
            columns = {role: by_role[role] for role in _ALL[format] if role in by_role}
            answer = first.get(columns.get("chosen", columns.get("prompt", "")))
            return Columns(format, columns, keys, not isinstance(answer, str | None))
    if choice != "preference":
        _refuse_preferences(where, by_role, names, first)
    example = names[0] if names else "..."
    if choice == "auto":
        needs = "; ".join(f"{format}: {', '.join(NEEDED[format])}" for format in NEEDED if format != "preference")
        question, answer = (next((name for name in names if name.lower() in usual), None) for usual in _PAIR)
        pair = f"instruction: {question}, output: {answer}" if question and answer else f"text: {example}"
        raise ConfigError(
            f"{where} has no columns of a known format, it has {has}; formats need {needs}. Say which column is which, "
            f"for example --data.columns '{{{pair}}}'"
        )
    lacking = [role for role in NEEDED[choice] if role not in by_role]
    if lacking[0] in names:  # it has another role
        raise ConfigError(
            f"data.columns: {lacking[0]} has no column, as {lacking[0]!r} is named for another role; name one"
        )
    left = [name for name in names if name not in by_role.values()] or [example]
    nearest_ones = {role: (nearest(role, left, cutoff=_NEAR, most=1) or left)[0] for role in lacking}
    raise ConfigError(
        f"{where} has no column {' and no column '.join(map(repr, lacking))}, it has {has}; "
        f"{'' if choice == 'preference' else 'choose data.format=auto, or '}name the column"
        f"{'s' if len(lacking) > 1 else ''} with --data.columns "
        f"'{{{', '.join(f'{role}: {name}' for role, name in nearest_ones.items())}}}'"
    )


def _refuse_preferences(where: str, by_role: Mapping[str, str], names: Sequence[str], first: Row) -> None:
    pairs = "chosen" in by_role and "rejected" in by_role
    # KTO's rows look like completions but for a label, which says that some of them are not to be imitated.
    if pairs or ("completion" in names and isinstance(first.get("label"), bool)):
        format, role = ("chat", "messages") if isinstance(first.get("chosen"), list) else ("completion", "completion")
        flags = f"--data.format {format} --data.columns '{{{role}: chosen}}'"
        columns = f"{by_role['chosen']} and {by_role['rejected']}" if pairs else "label"
        hint = "this fine-tuning learns from answers, or from pairs of a chosen and a rejected one"
        if pairs:
            hint = f"to learn to prefer (DPO), --data.format preference; to train on the better answers alone, {flags}"
        raise ConfigError(f"{where} holds preferences (columns {columns}); {hint}")
