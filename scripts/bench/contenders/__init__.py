"""The contenders of the bench: a table. Each one's code is a module here that only its own process imports.

A module has one function ``training(case)``: a context that yields what trains on a batch (``case.Training``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to train a model."""

    name: str
    title: str
    """As tables call it."""
    module: str
    budgeted: bool = True
    """False: may use the whole device."""


NO_OFFLOAD = Contender(name="no-offload", title="no offload", module="plain", budgeted=False)
OURS = Contender(name="auto", title="lt_offload, auto", module="offload")
FSDP2 = Contender(name="fsdp2", title="FSDP2, CPU offload, checkpointing", module="fsdp2")
TRANSFORMERS = Contender(name="transformers", title="transformers, checkpointing with offload", module="transformers")
CONTENDERS = {contender.name: contender for contender in (NO_OFFLOAD, OURS, FSDP2, TRANSFORMERS)}
