"""The states of an iteration, and what each thing that comes to the engine does there: lists for the docs."""

from __future__ import annotations

import inspect

from lt_offload.execute.iteration import Iteration, State


def markdown() -> str:
    """Return a list of the states, and one of what changes them or is refused."""
    states = [f"- **{state.name.capitalize()}**: {state.value}." for state in State]
    methods = {name: method for name, method in vars(Iteration).items() if inspect.isfunction(method)}
    first = {name: str(inspect.getdoc(method)).splitlines()[0] for name, method in methods.items()}
    calls = [f"- `{name}`: {line}" for name, line in first.items() if not (name[0] == "_" or line.startswith("Return"))]
    return "\n".join([*states, "", *calls]).replace("``", "`")
