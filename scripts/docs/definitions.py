"""Writes what the command line says of settings and verbs, from docstrings to the file that it reads.

python -m scripts.docs.definitions            write lt_offload/cli/static/definitions.json
python -m scripts.docs.definitions --check    exit with 1 if it is not what the docstrings say
"""

from __future__ import annotations

import argparse
import sys

from lt_offload.cli.static.definitions import FILE, as_file
from lt_offload.cli.static.settings import GROUPS
from lt_offload.cli.static.source import read_definition
from lt_offload.cli.table import VERBS


def text() -> str:
    """Return what the file should hold."""
    verbs = [(verb.source, verb.name) for verb in VERBS.values()]
    return as_file({where: read_definition(*where) for where in (*GROUPS.values(), *verbs)})


def main() -> int:
    """Write or check the file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file would change")
    if not parser.parse_args().check:
        FILE.write_text(text(), encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") != text():
        print(f"{FILE} is out of date; run python -m scripts.docs.definitions", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
