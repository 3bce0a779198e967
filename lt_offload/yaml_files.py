"""Settings in YAML, as recipes and descriptions of hardware hold them: read in little time, or refused in one line."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """A YAML loader without aliases, with which a few lines can stand for billions of values or contain themselves."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node below ``parent``."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            what = f"alias *{event.anchor} is not taken; write what it stands for once more"
            raise yaml.YAMLError(f"{what}{event.start_mark}")
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of ``node``; a value that is not of its kind, such as ``!!timestamp x``, is an error."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            why = f" ({error})" if isinstance(error, ValueError) else ""  # others speak of Python
            what = f"{str(node.value)[:40]!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.YAMLError(f"{what}{why}{node.start_mark}") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of ``node``, unless a key stands twice in it, of which YAML would take the last one."""
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        names = [key.value for key in keys if isinstance(key, yaml.ScalarNode)]
        if doubled := [name for name in names if names.count(name) > 1]:
            raise yaml.YAMLError(f"{doubled[0]!r} stands twice in one group{node.start_mark}")
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Return the value of the YAML document ``text``.

    Raises:
        ValueError: if it is no YAML, or has what is not taken here; the reason is one line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
