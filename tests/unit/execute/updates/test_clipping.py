"""The norm of gradients of which some norms are known: torch's, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.utils import get_total_norm

from lt_offload.execute.updates.clipping import norms, total_norm
from tests.support.engines import equal


def test_norms_of_several_dtypes_are_put_together_in_torchs_order() -> None:
    generator = torch.Generator().manual_seed(3)
    dtypes = {"f": torch.float32, "b": torch.bfloat16, "h": torch.float16}
    in_another_order = 0
    for order in ("fb", "bf", "fbh", "hbf", "fbbfhf") * 10:
        grads = [torch.randn(7, generator=generator).to(dtypes[kind]) for kind in order * 20]
        expected = get_total_norm(grads, 2.0)
        for count in (1, len(grads) // 2, len(grads)):
            known = dict(zip(map(id, grads), norms(grads[:count]), strict=False))
            assert equal(total_norm(grads, 2.0, known=known), expected)
        appearing = [grad for dtype in dict.fromkeys(g.dtype for g in grads) for grad in grads if grad.dtype == dtype]
        ordered = torch.stack([norm.float() for norm in norms(appearing)])
        in_another_order += not equal(torch.linalg.vector_norm(ordered), expected)
    assert in_another_order > 0, "the order made no difference"


def test_a_norm_that_is_not_finite_is_torchs_error() -> None:
    grads = [torch.ones(3), torch.full((2,), math.inf)]
    known = dict(zip(map(id, grads), norms(grads), strict=True))
    with pytest.raises(RuntimeError, match="non-finite"):
        total_norm(grads, 2.0, known=known, error_if_nonfinite=True)
    assert total_norm(grads, 2.0, known=known).item() == math.inf
