"""Trains every architecture of an installed library for a task, tiny, under Lightning, plainly and offloaded.

    python -m scripts.breadth                        causal ones (40 minutes of processor time)
    python -m scripts.breadth --family masked        those with another head, encoders with decoders, or images
    python -m scripts.breadth --family diffusion     transformers of diffusers, or models of sentence-transformers
    python -m scripts.breadth --family optimizers    those of pytorch_optimizer, in a loop of one's own
    python -m scripts.breadth --only gemma3 olmo2    some, whose rows in the file are made anew

Each in a process of its own: in the smallest memory that is named, and there without activations that travel, compared
bit for bit with Lightning's default strategy; causal ones are planned from their configuration, too, without weights. A
default configuration is changed in its sizes only. Ends are those of ``scripts.attack``; "not run" is what plain
PyTorch does not train either. Results are in results/breadth-FAMILY.json, of which docs/models.md shows a table.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.metadata import version

from scripts.attack.children import compared, options_of
from scripts.breadth.tables import NAME
from scripts.common import arguments, read_json


def main() -> int:
    """Run the program; returns 1 if something is neither equal nor refused."""
    parser = arguments(__doc__)
    parser.add_argument("--family", default="causal", metavar="TASK", help="(default causal)")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="model types of transformers")
    options = options_of(parser, NAME)
    from scripts.breadth.models import FAMILIES, compare

    if options.family not in FAMILIES:
        parser.error(f"--family is one of {', '.join(FAMILIES)}")
    if options.file == NAME:
        options.file = f"{NAME}-{options.family}"
    works = {kind: partial(compare, options.family, kind) for kind in options.only or FAMILIES[options.family].kinds()}
    file = options.results / f"{options.file}.json"
    before = read_json(file)["figures"]["rows"] if options.only and file.exists() else []
    library = FAMILIES[options.family].library
    library = f"{library} {version(library)}"
    return compared(
        works, lambda kind, runs: {}, options, kind=NAME, before=before, family=options.family, library=library
    )


if __name__ == "__main__":
    sys.exit(main())
