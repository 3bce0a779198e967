"""Blocks whose weights stay where they are: autograd may hold them itself, and gives the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

from lt_offload.execute.blocks.runs import BlockRuns
from lt_offload.execute.memory import activations
from lt_offload.model.blocks import find_blocks
from tests.support import plans
from tests.support.engines import BUDGET, Case, build, differences, make_optimizer, plain, trained_on
from tests.support.hostile.device import HostileDevice

OPTIONS = ("keep", "recompute", "offload", "mixed", "reload")


def resident(case: Case, **changes: Any) -> Any:
    layout = {"options": case.options, "places": case.places} | changes
    return plans.streamed(find_blocks(build(case)), make_optimizer(build(case), case.optimizer), **layout)


def trained(case: Case, plan: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[set[int]], list[Any]]:
    """Return the result, which blocks were steady, and the weights that were saved as aliases."""
    steady, aliases = [], []
    make, alias = BlockRuns.make, activations._alias

    def noted(self: BlockRuns, index: int, *args: Any) -> Any:
        steady.append({block.index for block in self._blocks if block.steady})
        return make(self, index, *args)

    def counted(tensor: Any, ranges: Any) -> Any:
        aliases.append(tensor)
        return alias(tensor, ranges)

    monkeypatch.setattr(BlockRuns, "make", noted)
    monkeypatch.setattr(activations, "_alias", counted)
    device = HostileDevice(BUDGET, "lazy", check=True, poison=True)
    return trained_on(device, case, plan)[0], steady, aliases


@pytest.mark.own_plan("which weights a graph holds depends on the option")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family", ["llama-tied", "bloom"])
def test_weights_that_stay_need_no_alias(family: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(family=family, options=(option,), dropout=0.1)
    result, steady, aliases = trained(case, resident(case, resident=True), monkeypatch)
    assert steady[0] == set(range(len(find_blocks(build(case)).blocks)))
    assert bool(aliases) == (option == "offload")  # its hooks see every saved tensor
    assert differences(plain(case), result) == []


@pytest.mark.own_plan("a graph holds no weights from one run of a block to the next")
def test_weights_that_travel_do(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(options=("keep",), places=("host",))
    result, steady, aliases = trained(case, resident(case), monkeypatch)
    assert steady[0] == set()
    assert aliases
    assert differences(plain(case), result) == []
