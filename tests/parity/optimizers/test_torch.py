"""Every optimizer of torch that updates tensor by tensor, with the flags it has: the numbers of plain PyTorch."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest
import torch
from torch import optim

from lt_offload import limits
from lt_offload.errors import UnsupportedError
from tests import sampling
from tests.support.engines import Case, Factory, changed, differences, offloaded, plain

RATE = 1e-2
SHAPES = ((2, 12), (1, 9))
OPTIONS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.AdamW: [{"foreach": True, "amsgrad": True}, {"lr": torch.tensor(RATE)}, {"maximize": True, "fused": True}],
    optim.Adam: [{"fused": True, "amsgrad": True}, {"decoupled_weight_decay": True}],
    optim.SGD: [
        {"momentum": 0.9, "nesterov": True, "fused": True},
        {"momentum": 0.9, "dampening": 0.1, "foreach": True, "maximize": True},
    ],
    optim.RMSprop: [{"momentum": 0.1, "centered": True}, {"foreach": True}],
    optim.Adagrad: [{"lr_decay": 0.1}, {"fused": True}, {"foreach": True, "initial_accumulator_value": 0.1}],
    optim.Adadelta: [{"foreach": False}, {"foreach": True}],
    optim.Adamax: [{"foreach": False}, {"foreach": True, "maximize": True}],
    optim.NAdam: [{"decoupled_weight_decay": True}, {"foreach": True}],
    optim.RAdam: [{"decoupled_weight_decay": True}, {"foreach": True}],
    optim.ASGD: [{"lambd": 0.1, "t0": 1}, {"foreach": True}],
    optim.Rprop: [{"foreach": False}, {"foreach": True}],
    optim.Adafactor: [{"foreach": False, "maximize": True}, {"foreach": True}],
}
"""By optimizer: flags, a row each. Muon takes matrices only: see test_matrices_alone."""
REFUSED = {optim.LBFGS, optim.SparseAdam}
ROWS = [
    (cls, options, ("float32", "bfloat16")[number % 2])
    for cls, rows in OPTIONS.items()
    for number, options in enumerate(rows)
]


def factory(cls: type[optim.Optimizer], options: dict[str, Any]) -> Factory:
    def make(groups: list[dict[str, Any]]) -> optim.Optimizer:
        if cls is optim.Rprop:  # knows no weight decay
            groups = [{"params": group["params"]} for group in groups]
        # a scheduler writes to a rate that is a tensor
        return cls(groups, **{"lr": RATE} | copy.deepcopy(options))  # type: ignore[call-arg]

    return make


def test_none_is_forgotten() -> None:
    found = {cls for _, cls in inspect.getmembers(optim, inspect.isclass) if issubclass(cls, optim.Optimizer)}
    assert found == OPTIONS.keys() | REFUSED | {optim.Muon, optim.Optimizer}


@pytest.mark.parametrize(("cls", "options", "dtype"), sampling.some(ROWS, 16), ids=str)
def test_each_of_torch(cls: type[optim.Optimizer], options: dict[str, Any], dtype: str) -> None:
    """With everything on the device, with all of it travelling, and with updates in every place."""
    case = Case(optimizer=factory(cls, options), dtype=dtype, options=("keep", "recompute"), shapes=SHAPES)
    expected = plain(case)
    for places in (("device",), ("host",), ("paged", "host", "device")):
        actual = offloaded(Case(**vars(case) | {"places": places}))
        assert differences(expected, actual) == []
        assert changed(case, actual)


def test_matrices_alone() -> None:
    """Muon takes matrices: those of LoRA are."""
    case = Case(optimizer=factory(optim.Muon, {"nesterov": False}), lora=True, places=("paged", "host", "device"))
    actual = offloaded(case)
    assert differences(plain(case), actual) == []
    assert changed(case, actual)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda params: optim.LBFGS(params), "optimizer LBFGS: "),
        (lambda params: optim.SparseAdam(params), "optimizer SparseAdam: gradients travel as dense tensors"),
        (lambda params: optim.AdamW(params, capturable=True), "AdamW(capturable=True): "),
        (lambda params: optim.Adamax(params, differentiable=True), "Adamax(differentiable=True): "),
    ],
)
def test_those_that_cannot_be_are_refused(make: Factory, found: str) -> None:
    model = torch.nn.Linear(3, 3)
    with pytest.raises(UnsupportedError, match=re.escape(found)):
        limits.check("optimizer", limits.Setup(model=model, optimizers=[make(model.parameters())]))
