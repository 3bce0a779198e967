"""Conversion of plan files of earlier releases."""

from __future__ import annotations

from typing import Any


def from_schema_2(document: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON document of a plan of schema 2 as one of schema 3.

    There, ops named the passes that carry them out (``only``), steps had an index that was always 0, and what a
    settling pass has was left to the reader: all that moves groups which are on the device at its start, which it
    updates there, or which travel together with those.

    Raises:
        LookupError, TypeError, AttributeError: if it is not a plan of schema 2.
    """
    ops = [{key: value for key, value in op.items() if key != "only"} for op in document["ops"]]
    only = [op["only"] for op in document["ops"]]
    delayed = document.get("delayed", False)
    adds_up = delayed or document.get("window", 1) > 1
    programs: dict[str, list[int]] = {}
    if adds_up:
        programs["accumulating"] = [at for at, which in enumerate(only) if which in (None, "accumulating")]
    last = [at for at, which in enumerate(only) if which in (None, "updating")]
    if delayed:
        moving = _settling_groups(document)
        last = [at for at in last if _settles(ops[at], moving)]
    programs["settling" if delayed else "updating"] = last
    steps = [{key: value for key, value in step.items() if key != "micro_batch"} for step in document["timeline"]]
    return {**document, "timeline": steps, "ops": ops, "programs": programs, "schema": 3}


def _settling_groups(document: dict[str, Any]) -> set[int]:
    """Return the groups that move in a settling pass."""
    # As schema 2 had it, and not by asking today's planner: what old files mean may not change with it.
    ops, groups = document["ops"], document["groups"]
    moving = {copy["group"] for copy in document["initial"]}
    moving |= {g for op in ops if op["kind"] == "update" and op["lane"] != "host" for g in op["groups"]}
    moving |= {g for g, group in enumerate(groups) if group["payload"] in ("state", "sum")}
    together = [set(op["groups"]) for op in ops if op["payload"] == "weight"]
    while True:
        more = moving.union(*(some for some in together if not moving.isdisjoint(some)))
        if more == moving:
            return moving
        moving = more


def _settles(op: dict[str, Any], moving: set[int]) -> bool:
    if op["payload"] in ("weight", "state", "sum"):
        return not moving.isdisjoint(op["groups"])
    return bool(op["kind"] == "update")
