"""Every combination that is refused, in one table: what, why, and what works instead.

A setting is refused where the strategy could not honour it exactly. :func:`check` raises from the table before training
starts, :func:`markdown` prints it for the README, and what shows only while training runs raises its row's
:meth:`Limit.error`. Foreign optimizers are tried on a few small tensors.
"""

from lt_offload.limits.before import overrides, unknown_optimizer
from lt_offload.limits.running import (
    BACKWARD_OUTSIDE,
    CALL_ARGUMENTS,
    CHANGED_OPTIONS,
    CHANGED_PARAMETERS,
    CLIPPED,
    CLIPPING,
    DURING_FORWARD,
    EXCHANGED_MEMORY,
    GRADIENTS,
    HALFWAY,
    IN_PLACE_INPUT,
    INNER_TENSOR,
    LOGITS,
    MODULE_HOOKS,
    ONE_BACKWARD,
    OTHER_SECOND_RUN,
    OTHER_THREAD,
    OUTSIDE_USE,
    PARAMETER_HOOKS,
    PARTIAL_BACKWARD,
    SEVERAL_CONSUMERS,
    SHARED_CAST,
    SUBSTITUTED,
    TRANSFORMED,
    WINDOW,
    check_arguments,
)
from lt_offload.limits.table import LIMITS, Limit, Setup, check, markdown

__all__ = [
    "BACKWARD_OUTSIDE",
    "CALL_ARGUMENTS",
    "CHANGED_OPTIONS",
    "CHANGED_PARAMETERS",
    "CLIPPED",
    "CLIPPING",
    "DURING_FORWARD",
    "EXCHANGED_MEMORY",
    "GRADIENTS",
    "HALFWAY",
    "INNER_TENSOR",
    "IN_PLACE_INPUT",
    "LIMITS",
    "LOGITS",
    "MODULE_HOOKS",
    "ONE_BACKWARD",
    "OTHER_SECOND_RUN",
    "OTHER_THREAD",
    "OUTSIDE_USE",
    "PARAMETER_HOOKS",
    "PARTIAL_BACKWARD",
    "SEVERAL_CONSUMERS",
    "SHARED_CAST",
    "SUBSTITUTED",
    "TRANSFORMED",
    "WINDOW",
    "Limit",
    "Setup",
    "check",
    "check_arguments",
    "markdown",
    "overrides",
    "unknown_optimizer",
]
