"""Faults of clipping by norm and by value."""

from __future__ import annotations

from scripts.mutants.mutant import mutant

CLIPPING, PASSES = "execute/updates/clipping.py", "execute/training/passes.py"
RESIDENCY, OPS = "execute/memory/residency.py", "plan/assembly/ops.py"
WINDOWS, NORMS = "parity/windows/test_clipping.py", "parity/windows/test_norms.py"

CLIPPED = (
    mutant(
        "clipping divides by the norm alone",
        CLIPPING,
        "max_norm / (norm + 1e-6)",
        "max_norm / norm",
        WINDOWS,
    ),
    mutant(
        "a gradient that was written keeps its norm",
        RESIDENCY,
        "                total.norm = None\n",
        "                pass\n",
        NORMS,
    ),
    mutant(
        "a sum that is not complete has a norm",
        PASSES,
        "self._window.delayed and self._window.last and not waiting and alone",
        "True",
        NORMS,
    ),
    mutant(
        "known norms are those of any type",
        CLIPPING,
        "if total.norm is not None and norm_type == 2.0}",
        "if total.norm is not None}",
        NORMS,
    ),
    mutant(
        "dtypes come in the order of gradients",
        CLIPPING,
        "ordered = [stand_ins[stand_in] for (alike,), _ in of_dtypes for stand_in in alike]",
        "ordered = [g for d in dict.fromkeys(g.dtype for g in grads) for g in grads if g.dtype == d]",
        "unit/execute/updates/test_updates.py",
    ),
    mutant(
        "only large gradients are clamped",
        CLIPPING,
        "grad.clamp_(-value, value)",
        "grad.clamp_(max=value)",
        WINDOWS,
    ),
    mutant(
        "what a settling pass leaves on the device is not copied to the host",
        OPS,
        '            if kind == "offload":\n                parts.append(',
        "            if False:\n                parts.append(",
        "unit/assembly/test_settling.py",
    ),
    mutant(
        "a settling pass leaves things where updates need room",
        OPS,
        "            if not displaced:\n",
        "            if True:\n",
        "unit/assembly/test_settling.py",
    ),
    mutant(
        "weights that the host has updated do not come back in a settling pass",
        OPS,
        'moved = {copy for copy in staying.values() if places[copy.tensor] == "host"}',
        "moved: set[DeviceCopy] = set()",
        "unit/assembly/test_settling.py",
    ),
)
