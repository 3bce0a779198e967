"""The states of an iteration, and what each thing that comes to the engine does in each: a table for the docs."""

from __future__ import annotations

from lt_offload.execute.iteration import TABLE, Next, Outcome, State


def markdown() -> str:
    """Return the table of transitions, after a list of the states."""
    lines = [f"- **{_name(state)}**: {state.value}." for state in State]
    head = ["", *map(_name, State)]
    rows = [[transition.value, *(_cell(outcomes[state]) for state in State)] for transition, outcomes in TABLE.items()]
    table = [head, ["---"] * len(head), *rows]
    return "\n".join([*lines, "", *("| " + " | ".join(row) + " |" for row in table)])


def _name(state: State | Next) -> str:
    return state.name.capitalize() if isinstance(state, State) else state.value


def _cell(outcome: Outcome) -> str:
    words = [f"`{r.name}`" + (f" {r.when.words}" if r.when is not None else "") for r in outcome.refusals]
    refused = f"refused: {', '.join(words)}" if words else ""
    then = "" if outcome.then is None else _name(outcome.then)
    return "; ".join(filter(None, [refused, f"else {then}" if refused and then else then])) or "-"
