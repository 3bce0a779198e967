"""Broken input by the thousand: whatever a user's file or flag says, the answer is success or one clear sentence.

    python -m tests.faults.fuzz                       10,000 inputs and more, a quarter of an hour on two cores
    python -m tests.faults.fuzz --count 300           a sample
    python -m tests.faults.fuzz --only plans:17       one input again, with the traceback of what it led to

Every input is made from the seed, its kind and its number alone, and handed over in this process: to a function, or to
``lt-finetune``. An outcome is *accepted* (success, exit code 0), *refused* (an ``OffloadError`` or exit code 2, with
one sentence) or *failed* (anything else). The exit code is 1 if an input failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lt_offload.errors import OffloadError
from tests.faults.fuzz_kinds import KINDS, Kind, Refused

SEED = 9
LONGEST = 1500
"""Characters that one sentence may have; paths and lists of what works count."""


@dataclass
class Failure:
    """An input that led to neither success nor a sentence."""

    kind: str
    number: int
    error: str
    where: str


@dataclass
class Result:
    """What came of the inputs of each kind."""

    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        """How many there were."""
        return sum(sum(counts.values()) for counts in self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        kinds = {kind: {"inputs": sum(counts.values()), **counts} for kind, counts in self.counts.items()}
        failures = [vars(failure) for failure in self.failures]
        return {"seed": self.seed, "inputs": self.inputs, "kinds": kinds, "failures": failures}


def run(shares: Mapping[str, int], *, seed: int, folder: Path, say: Callable[[str], None] = print) -> Result:
    """Try so many inputs of each kind; files are written into ``folder``."""
    result = Result(seed=seed)
    log = logging.getLogger("lt_offload")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        for name, count in shares.items():
            kind = KINDS[name](folder / name)
            counts = result.counts[name] = Counter({"accepted": 0, "refused": 0, "failed": 0})
            for number in range(count):
                outcome, failure = one(kind, name, number, seed)
                counts[outcome] += 1
                result.failures += [failure] if failure else []
            say(f"{name:14} {count:6} inputs: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    finally:
        log.setLevel(level)
    return result


def one(kind: Kind, name: str, number: int, seed: int) -> tuple[str, Failure | None]:
    """Try input ``number`` of a kind; return the outcome, and the failure if it is one."""
    try:
        kind.attempt(random.Random(f"{seed}:{name}:{number}"))
    except (OffloadError, Refused) as error:
        text = str(error)
        if text.strip() and "\n" not in text and len(text) <= LONGEST:
            return "refused", None
        return "failed", Failure(name, number, f"not one sentence: {text[:300]!r}", "")
    except Exception as error:  # the point of the exercise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return "failed", Failure(name, number, f"{type(error).__name__}: {str(error)[:300]}", where)
    return "accepted", None


def shares_of(count: int) -> dict[str, int]:
    """Return how many inputs of each kind make up ``count``, at least."""
    whole = sum(kind.share for kind in KINDS.values())
    return {name: -(-count * kind.share // whole) for name, kind in KINDS.items()}


def again(text: str, seed: int, folder: Path) -> Iterator[str]:
    """Try one input ``KIND:NUMBER`` without catching anything."""
    name, _, number = text.partition(":")
    try:
        KINDS[name](folder / name).attempt(random.Random(f"{seed}:{name}:{int(number)}"))
        yield "accepted"
    except (OffloadError, Refused) as error:
        yield f"refused: {error}"


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--count", type=int, default=10_000, help="inputs, at least")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path, help="file for counts and failures")
    parser.add_argument("--only", help="one input again: KIND:NUMBER")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if options.only:
            print(*again(options.only, options.seed, Path(folder)))
            return 0
        result = run(shares_of(options.count), seed=options.seed, folder=Path(folder))
    print(f"seed {result.seed}: {result.inputs} inputs, {len(result.failures)} failed")
    for failure in result.failures[:40]:
        print(f"  {failure.kind}:{failure.number}  {failure.error}  ({failure.where})")
    if options.json:
        options.json.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
