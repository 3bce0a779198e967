"""Trains every causal architecture of the installed transformers, with four tiny layers, plainly and offloaded.

    python -m scripts.breadth                    all (an hour and a half of processor time); writes results/breadth.json
    python -m scripts.breadth --only gemma3 olmo2    some

Each in a process of its own: in the smallest memory that is named, and there without activations that travel, compared
bit for bit with plain PyTorch; and planned from its configuration, without weights. A default configuration is changed
in its sizes only. Ends are those of ``scripts.attack``; "not run" is what plain PyTorch does not train either.
"""

from __future__ import annotations

import sys
from functools import partial

from scripts.attack.children import compared, options_of
from scripts.common import arguments


def main() -> int:
    """Run the program; returns 1 if something is neither equal nor refused."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", metavar="KIND", help="model types of transformers")
    options = options_of(parser, "breadth")
    from scripts.breadth.causal import architectures, compare

    kinds = options.only or architectures()
    return compared({kind: partial(compare, kind) for kind in kinds}, lambda kind, runs: {}, options)


if __name__ == "__main__":
    sys.exit(main())
