"""Several micro-batches per update through the engine: the numbers of plain PyTorch, which adds to ``p.grad``."""

from __future__ import annotations

import re

import pytest
import torch

import lt_offload
from lt_offload.errors import OverBudget
from lt_offload.plan import solve
from tests import sampling
from tests.parity.windows.training import Training, budgets, require_equal
from tests.support import models
from tests.support.engines import Result, differences
from tests.support.user_nets import Net, adamw, measured, ordinary, plain, planned, rows, seed

UNEQUAL = [[(2, 12)], [(2, 12), (1, 9)], [(2, 12), (2, 7), (1, 12)], [(2, 12), (2, 12)], [(1, 5)]]
"""Windows of one to three micro-batches with unequal token counts, and a last short group."""


def make(**options: object) -> Training:
    settings = {name: options.pop(name) for name in ("optimizer",) if name in options}
    start = models.build(**{"family": "llama", **options})  # type: ignore[arg-type]
    return Training(start=start, windows=UNEQUAL, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("planner", ["auto", *sampling.some(["offmate", "l2l", "memferry", "greedy"], 2)])
def test_windows_equal_plain_training(planner: str) -> None:
    training = make()
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, accumulate=3, planner=planner):
        require_equal(training, solve(profile, memory=memory, planner=planner, accumulate=3), expected)


def test_sums_on_the_device_equal_plain_training() -> None:
    training = Training(start=models.build("llama"), windows=UNEQUAL)
    plan = solve(training.profile(), memory="1GB", accumulate=2, host_update=False)
    assert {op.lane for op in plan.ops if op.uses_gradients} == {"compute"}
    require_equal(training, plan, training.plainly())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "settings"),
    sampling.some(
        [
            ({"family": "llama-tied", "dropout": 0.1}, {}),
            ({"family": "bloom", "dropout": 0.1}, {"host_update": False}),
            ({"lora": True}, {}),
            ({"dtype": torch.bfloat16}, {}),
            ({"optimizer": "sgd-plain"}, {"host_update": False}),
            ({"optimizer": "adafactor"}, {"recompute": False}),
        ],
        3,
    ),
    ids=str,
)
def test_models_and_optimizers(options: dict[str, object], settings: dict[str, object]) -> None:
    training = make(**options)
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, accumulate=2, **settings):
        require_equal(training, solve(profile, memory=memory, accumulate=2, **settings), expected)  # type: ignore[arg-type]


@pytest.mark.slow
def test_equal_batches_stay_in_the_ram_that_was_planned() -> None:
    training = Training(start=models.build("llama"), windows=[[(2, 12)] * 3] * 3)
    profile, expected = training.profile(), training.plainly()
    for memory in budgets(profile, accumulate=3):
        require_equal(training, solve(profile, memory=memory, accumulate=3), expected)


# -- batches that are larger than the one that was planned for ---------------------------------------------------------


def longer(steps: int = 2) -> list[dict[str, torch.Tensor]]:
    return [*rows(steps), *({name: ids.repeat(1, 4) for name, ids in batch.items()} for batch in rows(steps))]


def trained(budget: str) -> Result:
    model = Net()
    optimizer = adamw(model)
    with lt_offload.offloaded(model, optimizer, rows()[0], plan=planned(Net, budget), accelerator="cpu"):
        seed()
        losses = ordinary(model, optimizer, longer())
    return Result(losses, model, optimizer)


def test_what_does_not_fit_says_what_was_planned_for() -> None:
    assert measured(Net).sequence_length == 6
    with pytest.raises(OverBudget) as caught:
        trained("tight")
    assert re.fullmatch(
        r"a batch of 2 x 24 came, and the plan is for 2 x 6, as in sample_batch: memory=\S+ kB is too small for it as "
        "planned; give as sample_batch the largest batch that will come: the longest rows, filled up to one length",
        str(caught.value),
    )


def test_what_fits_trains() -> None:
    assert differences(plain(Net, lambda *given: ordinary(*given[:2], longer())), trained("resident")) == []
