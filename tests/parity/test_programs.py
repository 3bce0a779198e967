"""A few programs that a seed draws, at every budget; ``python -m scripts.attack`` runs many more."""

from __future__ import annotations

from functools import partial

import pytest

from scripts.attack.compared import BUDGETS, attacked
from scripts.attack.programs import Program
from scripts.attack.runs import trained

SEEDS = (0, 5, 10, 11, 12, 15, 18, 19, 25, 95)


@pytest.mark.parametrize("seed", SEEDS)
def test_programs_of_users_give_the_same_numbers(seed: int) -> None:
    ended = {run.budget: run for run in attacked(partial(trained, Program.of(seed)))}
    assert set(ended) == set(BUDGETS)
    assert {run.outcome for run in ended.values()} == {"equal"}, ended


def test_a_block_that_skips_its_weights_at_random_is_measured() -> None:
    """What it needs is as random, so that the least memory is not known."""
    ended = list(attacked(partial(trained, Program.of(220)), ("resident", "middle")))
    assert [run.outcome for run in ended] == ["equal", "equal"], ended


def test_every_feature_is_drawn_and_can_be_left_out() -> None:
    programs = [Program.of(seed) for seed in range(150)]
    assert len(set(programs)) == len(programs)
    assert {name for program in programs for name in program.features()} == set(Program.__dataclass_fields__)
    for program in programs:
        assert program not in program.simpler()
