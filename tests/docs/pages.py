"""The pages of the documentation, README included, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted(SITE.rglob("*.md"))]}
"""By their paths from the root of the repository."""
_FENCE = re.compile(r"^([ ]*)```(\w+)[^\n]*\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)
LANGUAGES = ("python", "sh", "yaml", "json", "diff", "text")
"""Python is run, commands are checked, recipes are parsed; a difference of two files is compared with them, and
text is what programs print."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block of code."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def blocks(*languages: str) -> list[Block]:
    """The blocks in these languages, page by page."""
    found = []
    for page in PAGES:
        text = read(page)
        for match in _FENCE.finditer(text):
            indent, language, code = match.groups()
            code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page=page, line=line, language=language, text=code))
    return [block for block in found if not languages or block.language in languages]


def commands() -> list[tuple[str, str]]:
    """Every line of every shell block, with where it stands."""
    return [
        (f"{block.page}:{block.line + number}", line.split("  #")[0].strip())
        for block in blocks("sh")
        for number, line in enumerate(block.text.splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
