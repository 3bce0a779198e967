from __future__ import annotations

import torch

from lt_offload.model.caches import caches_off
from tests.support import models


def test_caches_are_off_inside_and_as_before_outside() -> None:
    on, off = models.build(use_cache=True), models.build()
    with caches_off(torch.nn.ModuleList([on, off])):
        assert not on.config.use_cache
        assert not off.config.use_cache
    assert on.config.use_cache
    assert not off.config.use_cache
