"""What others see after an exception, before the strategy is taken down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lt_offload import lifecycle
from lt_offload.execute.emulated import EmulatedDevice
from tests.parity.lightning_harness import Forced, fit, seeded_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


class Uploader(CSVLogger):
    """Takes the weights along at the end of a run, like loggers that upload them."""

    module: Any
    weights: dict[str, torch.Tensor]

    def finalize(self, status: str) -> None:
        assert status == "failed"
        self.weights = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}


class Fails(Callback):
    """Raises before the third step, when updates of the second are in flight and weights on the device."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise RuntimeError("in a hook")


def test_weights_are_complete_when_an_exception_reaches_the_loggers(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "open_device", lambda budget, *_, **__: EmulatedDevice(budget, "lazy", check=True))
    logger, module = Uploader(tmp_path), seeded_module()
    logger.module = module
    with pytest.raises(RuntimeError, match="in a hook"):
        fit(Forced(), module, callbacks=[Fails()], logger=logger)
    expected = fit("auto", max_steps=2).module.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in logger.weights.items())
