"""Plans of one training iteration: made, checked, simulated and explained here. Imports no torch."""

from lt_offload.plan.batch.choose import choose_batch
from lt_offload.plan.batch.splits import Choices
from lt_offload.plan.settings import Settings
from lt_offload.plan.solve import make_plan, solve
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.explain import explain
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.trace import Trace

__all__ = [
    "Choices",
    "Op",
    "Plan",
    "Settings",
    "Trace",
    "check",
    "choose_batch",
    "explain",
    "make_plan",
    "simulate",
    "solve",
]
