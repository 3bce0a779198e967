"""The number of parts in which batches go through each block, and the order of sums before there is a plan."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TypedDict

from lt_offload.errors import ConfigError, PlanError
from lt_offload.model.parts import check_micro_batches as check_number
from lt_offload.plan import Settings
from lt_offload.schema.files import from_json
from lt_offload.schema.plan import PLAN_SCHEMA, Plan
from lt_offload.strategy.replay import Before

if TYPE_CHECKING:
    from pathlib import Path

    from lt_offload.model.blocks import Structure


def check_micro_batches(value: object, batch_size: object) -> None:
    """Refuse values that are no number of parts, and several parts together with ``batch_size="auto"``.

    Raises:
        ConfigError: naming the value.
    """
    check_number(value, auto=True)
    if value != 1 and batch_size == "auto":
        raise ConfigError(
            f"micro_batches={value!r} cannot be combined with batch_size='auto', which plans for whole batches in each "
            "block; give batch_size as a number, or set micro_batches=1"
        )


class OrderOfSums(TypedDict):
    """The choices that decide about the order of sums in a step without a plan."""

    parts: int
    """Parts of the batch, which go through each block in turn."""
    chunk: int | None
    """Tokens that the output projection and the loss take at a time, 0: as many as suit; None: all."""


def order_of_sums(
    settings: Settings,
    micro_batches: int | Literal["auto"],
    path: str | Path | None,
    before: Before,
    plan: Plan | None,
) -> OrderOfSums:
    """Return the order of sums in a step without a plan: that of the run's plan, as far as it is known.

    Args:
        settings: of plans.
        micro_batches: parts that are wanted; where their number is yet to be chosen, the step has one.
        path: of a saved plan that is to be used.
        before: the run that this one continues.
        plan: of an earlier step of this one.
    """
    if path is not None:
        plan = Plan.load(path)
    elif plan is None and before.plan is not None:
        with suppress(PlanError):  # the run is planned again, and says why
            plan = from_json(Plan, before.plan, source="the checkpoint's plan", schema=PLAN_SCHEMA)
    parts, chunk = plan.parts if plan is not None else before.micro_batches or 1, 0 if settings.chunked_loss else None
    if plan is not None and plan.chunk_tokens:
        chunk = plan.chunk_tokens
    return {"parts": parts if micro_batches == "auto" else micro_batches, "chunk": chunk}


def one_list(structure: Structure) -> bool:
    """Return whether the model has no other candidate for its blocks."""
    return structure.other is None or structure.other() is None
