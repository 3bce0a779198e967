"""Key-value caches of generation, which training has no use for: a block that runs twice would fill them twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """Within the context ``use_cache`` is off in every config of ``model``."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    changed = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True
