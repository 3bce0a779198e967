"""The faults that are put into what speaks to CUDA: they can be, and the code is Python afterwards."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from scripts.common import ROOT
from scripts.gpu.mutants import MUTANTS, Mutant, put_in


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_changes_the_code_that_is_there(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.file, copy)
    put_in(mutant, tmp_path)
    before, after = (ast.dump(ast.parse(file.read_text())) for file in (ROOT / mutant.file, copy))
    assert before != after


def test_names_are_told_apart() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
