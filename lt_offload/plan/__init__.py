"""What to do in one training iteration: plans are made, checked, simulated and explained here. Imports no torch."""

from lt_offload.plan.batch import BatchChoice, choose_batch
from lt_offload.plan.check import check
from lt_offload.plan.explain import explain
from lt_offload.plan.schedule import Op, Plan
from lt_offload.plan.select import solve
from lt_offload.plan.simulate import simulate
from lt_offload.plan.trace import Trace

__all__ = ["BatchChoice", "Op", "Plan", "Trace", "check", "choose_batch", "explain", "simulate", "solve"]
