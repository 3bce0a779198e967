"""Compares tokens, labels and packing with other packages, token for token, where they are installed.

    python -m scripts.agreement [FILE ...] [--tokenizer smollm2-135m-instruct mistral:FOLDER ...] [--save]

``NAME:FOLDER`` is a tokenizer with one of our chat templates; ``python -m scripts.agreement.tokenizers`` makes folders
of the tokenizers of Llama and Mistral. TRL and LLaMA-Factory read the rows themselves and prepare them by their own
code; TRL, which has no form for instructions, gets our messages. What the makers' own encoders (mistral-common,
llama-models) write is compared, too. Rows that differ for a documented reason are counted by it.
Exits with 1 if a row differs for none. ``--save`` writes ``results/agreement.json``.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from datasets import disable_progress_bars

from lt_offload.finetune.weights.gguf import SMOLLM2
from scripts.agreement import factory, makers, trl
from scripts.agreement.rows import Comparison, Rows, short
from scripts.common import arguments, save

TRL = "TRL"
PACKING = f"TRL, packed by bfd into {trl.LENGTH}"
FACTORY = "LLaMA-Factory"
EDGES = sorted(str(path) for path in Path(__file__).parent.glob("edges-*.jsonl"))
"""Rows of which the borders between messages are hard to keep; always compared."""
MAKERS = "makers' encoders"
PACKAGES = ("trl", "llamafactory", "mistral_common", "llama_models")


def main() -> int:
    """Compare, print and save; return the exit code."""
    parser = arguments(__doc__)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--tokenizer", nargs="+", default=[SMOLLM2])
    parser.add_argument("--rows", type=int, default=1000, help="of each file, at most")
    parser.add_argument("--save", action="store_true")
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
    documented = {TRL: trl.DOCUMENTED, FACTORY: factory.DOCUMENTED, MAKERS: makers.DOCUMENTED}
    for package, reasons in documented.items():
        print(f"Where {package} differs:")
        for what, why in reasons.items():
            print(f"  {what}: {why}")
    if options.save:
        settings = {
            "files": [Path(file).name for file in [*EDGES, *options.files]],
            "rows": options.rows,
            "packages": {name: version(name) for name in PACKAGES if find_spec(name) is not None},
        }
        figures = {"comparisons": [asdict(each) for each in results], "documented": documented}
        print(save("agreement", "agreement", settings, figures, options.results))
    return int(any(each.undocumented for each in results))


def compare(file: str, name: str, count: int) -> Iterator[Comparison]:
    """Yield the comparisons of one file and one tokenizer."""
    template, _, tokenizer = name.rpartition(":")
    rows = Rows.read(file, tokenizer, template or None, count)
    shown = f"{template}:{short(tokenizer)}" if template else short(tokenizer)
    yield trl.compare(rows, Comparison(file=Path(file).name, tokenizer=shown, against=TRL))
    yield trl.pack(rows, Comparison(file=Path(file).name, tokenizer=shown, against=PACKING))
    names = (shown, template or short(tokenizer))
    theirs = next((factory.NAMES[each] for each in names if each in factory.NAMES), None)
    strings = rows.layout.format == "completion" and not rows.layout.of_messages  # it has no such rows
    if theirs is not None and not strings and factory.installed():
        yield factory.compare(rows, theirs, Comparison(file=Path(file).name, tokenizer=shown, against=FACTORY))
    if rows.data.encoder.template is not None and (found := makers.encoder(template, short(tokenizer))) is not None:
        package, encode = found
        yield makers.compare(rows, encode, Comparison(file=Path(file).name, tokenizer=shown, against=package))


def described(result: Comparison) -> Iterator[str]:
    """Yield the lines that show a comparison."""
    where = f"{result.file:30} {result.tokenizer:24} {result.against:28}"
    yield f"{where} {result.same:>5} of {result.rows:>5} {result.note}"
    for reason, count in (result.documented | {"undocumented": result.undocumented}).items():
        if count:
            yield f"    {count} rows: {reason} ({result.examples.get(reason, 'sequences differ')})"


if __name__ == "__main__":
    sys.exit(main())
