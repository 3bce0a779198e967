"""Roles of a data set's columns in each format, and the choice of the format by the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.rows import Row, RowFault, check_text
from lt_offload.suggest import nearest

Format = Literal["text", "alpaca", "chat", "completion"]
FormatChoice = Literal["auto", "text", "alpaca", "chat", "completion"]

NEEDED: dict[Format, tuple[str, ...]] = {
    "chat": ("messages",),
    "alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
"""Roles that rows of a format must have, in the order in which formats are tried."""
_OPTIONAL: dict[Format, tuple[str, ...]] = {
    "chat": ("tools", "system"),
    "alpaca": ("input", "system", "history"),
    "completion": ("tools",),
    "text": (),
}
_OF_MESSAGES = ("role", "content")
"""Roles of the keys of a message, not of columns."""
_OTHER_NAMES = {"messages": ("messages", "conversations")}
ROLES = tuple(dict.fromkeys([*(r for f in NEEDED for r in (*NEEDED[f], *_OPTIONAL[f])), *_OF_MESSAGES]))


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a row, by their roles.

    Args:
        format: of the rows.
        columns: columns by their roles; only those that the data have.
        keys: keys of messages by their roles, as far as they were named.
        of_messages: whether prompts and completions are lists of messages.
    """

    format: Format
    columns: Mapping[str, str]
    keys: Mapping[str, str]
    of_messages: bool = False

    @property
    def of_texts(self) -> bool:
        """True for texts that no chat template writes: plain ones, or prompts and completions."""
        return self.format == "text" or (self.format == "completion" and not self.of_messages)

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
            near = nearest(role, ROLES, most=1)
            hint = f"did you mean {near[0]}?" if near else f"roles are {', '.join(ROLES)}"
            raise ConfigError(f"data.columns: unknown role {role!r}; {hint} (roles stand left: role: column)")
    for group in (_OF_MESSAGES, tuple(role for role in ROLES if role not in _OF_MESSAGES)):
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
    chosen = {role: column for role, column in mapping.items() if role not in keys}
    absent = [column for column in chosen.values() if column not in names]
    if absent:
        near = nearest(absent[0], names, most=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"data.columns: {where} has no column {absent[0]!r}, it has {_quoted(names)}{hint}")
    if choice == "auto":
        _refuse_preferences(where, names, first)
    by_role = {role: column for role in ROLES if (column := _column(role, chosen, names)) is not None}
    formats: list[Format] = list(NEEDED) if choice == "auto" else [choice]
    # A format is taken only if it uses all columns that the user has named: else a name would be ignored silently.
    wanted = set(chosen) | ({"messages"} if keys else set())
    for format in formats:
        roles = (*NEEDED[format], *_OPTIONAL[format])
        if all(role in by_role for role in NEEDED[format]) and (choice != "auto" or wanted <= set(roles)):
            stray = sorted(wanted - set(roles))
            if stray:
                raise ConfigError(
                    f"data.columns: data.format={format} has no role {stray[0]!r}, it has {', '.join(roles)}"
                )
            columns = {role: by_role[role] for role in roles if role in by_role}
            return Columns(format, columns, keys, not isinstance(first.get(columns.get("prompt", "")), str | None))
    _refuse_preferences(where, names, first)
    if choice == "auto":
        needs = "; ".join(f"{format}: {', '.join(roles)}" for format, roles in NEEDED.items())
        raise ConfigError(
            f"{where} has no columns of a known format, it has {_quoted(names)}; formats need {needs}. Say which "
            f"column is which, for example --data.columns '{{text: {_some_name(names)}}}'"
        )
    missing = next(role for role in NEEDED[choice] if role not in by_role)
    raise ConfigError(
        f"{where} has no column {missing!r}, it has {_quoted(names)}; choose data.format=auto, or name the column with "
        f"--data.columns '{{{missing}: {_some_name(names)}}}'"
    )


def _column(role: str, chosen: Mapping[str, str], names: Sequence[str]) -> str | None:
    if role in chosen:
        return chosen[role]
    taken = set(chosen.values())
    return next((name for name in _OTHER_NAMES.get(role, (role,)) if name in names and name not in taken), None)


def _refuse_preferences(where: str, names: Sequence[str], first: Row) -> None:
    pairs = "chosen" in names and "rejected" in names
    # KTO's rows look like completions but for a label, which says that some of them are not to be imitated.
    if pairs or ("completion" in names and isinstance(first.get("label"), bool)):
        what = "chosen and rejected" if pairs else "label"
        hint = (
            " To train on the better answers alone, --data.format chat --data.columns '{messages: chosen}'"
            if (isinstance(first.get("chosen"), list))
            else " To train on the better answers alone, --data.format completion --data.columns '{completion: chosen}'"
        )
        raise ConfigError(
            f"{where} holds preferences (columns {what}), which this fine-tuning does not learn from: it learns to "
            f"write answers, not to prefer one.{hint if pairs else ''}"
        )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _some_name(names: Sequence[str]) -> str:
    return names[0] if names else "..."
