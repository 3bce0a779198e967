"""Validation, tests, predictions and generated text, before, within and after training, in one process."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lt_offload import OffmateStrategy
from lt_offload.machine.driver import context_bytes
from tests.gpu.users.runs import USERS, Bench, in_both_ways, module
from tests.support.trainers import Run, differences

pytestmark = [*USERS, pytest.mark.usefixtures("planned_once")]


def evaluated(made: Any) -> Any:
    """Give ``made`` what ``test()`` asks for."""
    made.test_step, made.test_dataloader = made.validation_step, made.val_dataloader
    return made


@in_both_ways
def test_everything_in_a_row(way: str, bench: Bench) -> None:
    """A notebook: what one call leaves on the device must not be missing for the next."""

    def scene(strategy: Any) -> tuple[list[Any], Run]:
        made = evaluated(module())
        trainer = bench.trainer(strategy, max_epochs=1)
        answers: list[Any] = []

        def look() -> None:
            answers.append(trainer.validate(made, verbose=False))
            answers.append(trainer.test(made, verbose=False))
            answers.extend(logits.cpu() for logits in trainer.predict(made))

        look()
        run = bench.fit(None, made, made=trainer)
        look()
        trainer.fit_loop.max_epochs = 2
        bench.fit(None, made, made=trainer)
        look()
        return answers, run

    def probe(strategy: Any) -> Run:
        return bench.fit(strategy, evaluated(module()), max_epochs=1)

    # Small tensors of the user's, such as predictions, hold 2 MiB each of a GPU: much of a smaller budget.
    (expected, stock), (found, ours) = bench.compare(way, scene, probe, share=0.8)
    assert len(expected) == len(found) == 9
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert differences(stock, ours) == []


def test_without_training_within_little_memory(bench: Bench) -> None:
    """The model streams through a device in which it does not fit."""
    large = {"layers": 12, "hidden_size": 512, "intermediate_size": 1536}
    weights = sum(p.nbytes for p in module(**large).parameters())
    context = 0 if bench.device.type == "cpu" else context_bytes(bench.device)
    answers = []
    for strategy in ("auto", OffmateStrategy(memory=context + weights // 2)):
        made = evaluated(module(**large))
        trainer = bench.trainer(strategy)
        validated, tested = trainer.validate(made, verbose=False), trainer.test(made, verbose=False)
        answers.append((validated, tested, *(logits.cpu() for logits in trainer.predict(made))))
        gc.collect()
    assert answers[0][:2] == answers[1][:2]
    assert torch.equal(answers[0][2], answers[1][2])


class Asks(Callback):
    """Asks the module and the model where they are, as code does that makes tensors by hand, and uses the answer."""

    def __init__(self) -> None:
        self.places: list[Any] = []
        self.losses: list[Tensor] = []

    def ask(self, trainer: Any, module: Any, *_: Any) -> None:
        self.places += [module.device, module.model.device]
        ids = torch.arange(3, 11)[None]
        for device in (module.device, module.model.device):
            with torch.no_grad():
                self.losses.append(module.model(input_ids=ids.to(device), labels=ids.to(device)).loss.cpu())

    on_train_batch_start = on_train_batch_end = on_validation_batch_end = on_train_epoch_end = ask


@in_both_ways
def test_who_asks_for_the_device(way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> tuple[Run, Asks]:
        asks = Asks()
        return bench.fit(strategy, callbacks=[asks], max_epochs=1), asks

    (stock, expected), (ours, found) = bench.compare(way, scene)
    assert expected.places == found.places
    assert set(found.places) == {bench.device}
    assert all(map(torch.equal, expected.losses, found.losses))
    assert differences(stock, ours) == []


def test_inputs_on_the_device_that_parameters_say_within_a_step(bench: Bench) -> None:
    """``next(model.parameters()).device`` in a step, for a position or a mask that the step makes."""

    def scene(strategy: Any) -> Run:
        made = module()
        seen: list[torch.device] = []

        def training_step(batch: Any, batch_idx: int) -> Any:
            seen.append(next(made.model.parameters()).device)
            positions = torch.arange(batch["input_ids"].shape[1]).to(made.device)[None]
            loss = made.model(**batch, position_ids=positions).loss
            made.losses.append(loss.detach().clone())
            return loss

        made.training_step = training_step
        run = bench.fit(strategy, made, max_epochs=1)
        assert len(seen) >= len(made.losses)
        return run

    assert differences(*bench.compare("tight", scene)) == []
