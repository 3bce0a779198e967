"""Facts that all processes of a run must have alike, compared before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lt_offload.errors import ConfigError

Facts = Mapping[str, object]
"""Values that have to be alike in all processes, as one has them, by the names that users know them by."""


def compare(all_facts: Sequence[Facts]) -> None:
    """Check that all processes, in the order of ranks, have said the same.

    Raises:
        ConfigError: naming what differs, the values and the processes.
    """
    first = all_facts[0]
    for name in {name: None for facts in all_facts for name in facts}:
        value = first.get(name)
        for rank, facts in enumerate(all_facts):
            other = facts.get(name)
            if other != value:
                raise ConfigError(
                    f"{name} differs between the processes of this run: process 0 has {_told(value, other)}, process "
                    f"{rank} {_told(other, value)}; give all of them the same code, settings and data"
                )


def _told(value: object, other: object) -> str:
    """Return ``value`` for people; of long lists what ``other`` has not."""
    if isinstance(value, tuple) and isinstance(other, tuple) and len(value) + len(other) > 6:
        own = [one for one in value if one not in other]
        return f"{len(value)}, among them {', '.join(map(str, own[:3]))}" if own else f"{len(value)}"
    return repr(value)
