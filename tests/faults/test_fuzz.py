"""A seeded sample of ``tests/faults/fuzz.py``: every broken input is answered by success or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from lt_offload.errors import ConfigError
from tests.faults import fuzz, fuzz_mutations

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice about settings nobody would choose
]


@pytest.mark.slow
def test_a_sample_of_every_kind(tmp_path: Path) -> None:
    shares = fuzz.shares_of(150)
    said: list[str] = []
    result = fuzz.run(shares, seed=fuzz.SEED, folder=tmp_path, say=said.append)
    assert [f"{failure.kind}:{failure.number} {failure.error}" for failure in result.failures] == []
    assert result.inputs == sum(shares.values()) >= 150
    assert len(said) == len(shares) == len(fuzz.KINDS)
    for kind, counts in result.counts.items():
        assert counts["refused"], f"nothing of {kind} was broken"
    assert sum(counts["accepted"] for counts in result.counts.values()) > 15, "everything was broken"
    json.dumps(result.to_json(), allow_nan=False)


def test_what_is_no_sentence_is_a_failure() -> None:
    class Kind:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def attempt(self, random: Random) -> None:
            if self.error is not None:
                raise self.error

    outcomes = {
        "accepted": [None],
        "refused": [ConfigError("setting=3 is wrong; use 4")],
        "failed": [ConfigError(""), ConfigError("two\nlines"), ConfigError("x" * 2000), KeyError("x"), IndexError()],
    }
    for outcome, errors in outcomes.items():
        for error in errors:
            assert fuzz.one(Kind(error), "sizes", 1, 2)[0] == outcome, error


def test_an_input_depends_on_its_number_alone() -> None:
    whole = {"a": [1, 2, {"b": 3.5}], "c": "text"}
    one = [fuzz_mutations.data(Random(f"1:plans:{number}"), whole) for number in range(50)]
    assert repr(one) == repr([fuzz_mutations.data(Random(f"1:plans:{number}"), whole) for number in range(50)])
    assert whole == {"a": [1, 2, {"b": 3.5}], "c": "text"}
    assert len({repr(value) for value in one}) > 40
