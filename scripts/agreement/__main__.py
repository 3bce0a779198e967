"""Compares tokens, labels and packing with TRL, token for token.

    python -m scripts.agreement [FILE ...] [--tokenizer smollm2-135m-instruct mistral:FOLDER ...]

``NAME:FOLDER`` is a tokenizer with one of our chat templates. TRL reads the rows itself and prepares them by its own
code; as it has no form for instructions, it gets our messages. Rows that differ for a documented reason are counted by
it. Exits with 1 if a row differs for none.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from datasets import disable_progress_bars

from lt_offload.finetune.weights.gguf import SMOLLM2
from scripts.agreement import trl
from scripts.agreement.rows import Comparison, Rows, short

TRL = "TRL"
PACKING = f"TRL, packed by bfd into {trl.LENGTH}"
EDGES = sorted(str(path) for path in Path(__file__).parent.glob("edges-*.jsonl"))
"""Rows of which the borders between messages are hard to keep; always compared."""


def main() -> int:
    """Compare and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--tokenizer", nargs="+", default=[SMOLLM2])
    parser.add_argument("--rows", type=int, default=1000, help="of each file, at most")
    options = parser.parse_args()
    if find_spec("trl") is None:
        parser.error("TRL is not installed (pip install trl, or its folder in PYTHONPATH)")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    disable_progress_bars()
    results = []
    for name in options.tokenizer:
        for file in [*EDGES, *options.files]:
            for result in compare(file, name, options.rows):
                results.append(result)
                print("\n".join(described(result)), flush=True)
    print("Where TRL differs:")
    for what, why in trl.DOCUMENTED.items():
        print(f"  {what}: {why}")
    return int(any(each.undocumented for each in results))


def compare(file: str, name: str, count: int) -> Iterator[Comparison]:
    """Yield the comparisons of one file and one tokenizer."""
    template, _, tokenizer = name.rpartition(":")
    rows = Rows.read(file, tokenizer, template or None, count)
    shown = f"{template}:{short(tokenizer)}" if template else short(tokenizer)
    yield trl.compare(rows, Comparison(file=Path(file).name, tokenizer=shown, against=TRL))
    yield trl.pack(rows, Comparison(file=Path(file).name, tokenizer=shown, against=PACKING))


def described(result: Comparison) -> Iterator[str]:
    """Yield the lines that show a comparison."""
    where = f"{result.file:30} {result.tokenizer:24} {result.against:28}"
    yield f"{where} {result.same:>5} of {result.rows:>5}"
    for reason, count in (result.documented | {"undocumented": result.undocumented}).items():
        if count:
            yield f"    {count} rows: {reason} ({result.examples.get(reason, 'sequences differ')})"


if __name__ == "__main__":
    sys.exit(main())
