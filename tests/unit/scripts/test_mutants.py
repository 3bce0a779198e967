"""The faults that are put in to try the tests: they can be, and the code is Python afterwards."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from scripts.common import ROOT
from scripts.gpu import mutants as cuda
from scripts.mutants import faults

FAULTS = [*cuda.MUTANTS, *(mutant.fault for mutant in faults.MUTANTS)]


@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.name)
def test_it_changes_the_code_that_is_there(mutant: cuda.Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.file, copy)
    cuda.put_in(mutant, tmp_path)
    before, after = (ast.dump(ast.parse(file.read_text())) for file in (ROOT / mutant.file, copy))
    assert before != after


def test_names_are_told_apart_and_tests_are_there() -> None:
    assert len({mutant.name for mutant in FAULTS}) == len(FAULTS)
    assert len(cuda.MUTANTS) >= 20
    assert len(faults.MUTANTS) >= 40
    assert all((ROOT / "tests" / test).exists() for mutant in faults.MUTANTS for test in mutant.tests)
