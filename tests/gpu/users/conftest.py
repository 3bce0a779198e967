from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lt_offload.schema.profile import Profile
from lt_offload.strategy.first import survey
from tests.gpu.target import Target
from tests.gpu.users.runs import Bench
from tests.support import trainers
from tests.support.trainers import profiled

PROFILES: dict[str, Profile] = {}


def known(measure: partial[Profile], module: Any) -> Profile:
    """Measure, but each run only once."""
    trainer, options = module.trainer, measure.keywords
    (optimizer,) = trainer.optimizers
    tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    groups = [len(group["params"]) for group in optimizer.param_groups], optimizer.defaults
    window = trainer.accumulate_grad_batches, trainer.gradient_clip_val, trainer.precision
    parts = [value for value in measure.args if isinstance(value, int)]
    sums = trainer.strategy.settings.chunked_loss, survey._OF_LOGIT, parts
    key = repr((tensors, module.model.config, type(optimizer), groups, window, module.batch_size, options, sums))
    if key not in PROFILES:
        PROFILES[key] = measure()
    return PROFILES[key]


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure and plan the same run only once: for tests of what comes afterwards."""
    profiled(monkeypatch, known)
    trainers.planned_once(monkeypatch)


@pytest.fixture
def bench(target: Target, monkeypatch: pytest.MonkeyPatch) -> Bench:
    profiles: list[Profile] = []

    def noted(measure: Callable[[], Profile], _: Any) -> Profile:
        profiles.append(measure())
        return profiles[-1]

    profiled(monkeypatch, noted)
    return Bench(target=target, profiles=profiles)
