"""Hooks of mkdocs: pages that are made from other files, lists of settings, and what a page must not hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from lt_offload.cli.recipes import shipped
from lt_offload.cli.static import pages
from scripts.docs.keys import keys, markdown, verbs

ROOT = Path(__file__).resolve().parents[2]
LINKS = {"(docs/": "(", "(CHANGELOG.md)": "(changelog.md)", "(results/papers.md)": "(paper-tables.md)"}
"""How files at the root of the repository name pages."""
MADE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "paper-tables.md": "results/papers.md",
}
"""Pages that are files of the repository."""
KEYS = re.compile(r"<!-- keys ([\w.]+) as (\S*?)(?: without (\S+))? -->")
PAPER = re.compile(r"<!-- paper ([\w-]+) -->")
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):(<code>)(?:~?lt_offload\.)?")
"""What docstrings have from Sphinx."""
FETCHED = re.compile(r"""<(?:script|img|iframe)[^>]+src=["']https?:|<link[^>]+stylesheet[^>]+href=["']https?:""")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are files of the repository."""
    for page, source in MADE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        for old, new in LINKS.items():
            text = text.replace(old, new)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put lists where a page asks for them: ``<!-- keys package.module.Class as model. without a,b -->``."""
    for mark, made in MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return PAPER.sub(_paper, KEYS.sub(_listed, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Leave out Sphinx's roles."""
    return ROLE.sub(r"\1", html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that fetches something from elsewhere.

    Raises:
        PluginError: if it does.
    """
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} fetches something from elsewhere: {found[0]}")
    return output


def exit_codes() -> str:
    """Return what the exit codes of ``lt-finetune`` mean, in the words of its help."""
    codes = re.findall(r"^ +(\d+)  (.*)$", pages.page(pages.PROGRAM), flags=re.MULTILINE)
    rows = ("| {} | {} |".format(code, meaning.replace("|", "\\|")) for code, meaning in codes)
    return "\n".join(["| code | meaning |", "|---|---|", *rows])


def recipe_table() -> str:
    """Return the shipped recipes with what their headers say."""
    lines = ["| recipe | what it trains | simulated |", "|---|---|---|"]
    planned: dict[str, None] = {}
    for name, path in shipped().items():
        head = [line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        figures = next((line for line in head if "imulated" in line), "")
        about = re.sub(r"--\S+ [\w.]+", r"`\g<0>`", head[0])
        lines.append(f"| `{name}` | {about} | {figures.partition(':')[2].strip()} |")
        planned |= dict.fromkeys(line for line in head if line.startswith("Planned on"))
    return "\n".join([*lines, "", f"{'; '.join(planned)}."])


def _paper(found: re.Match[str]) -> str:
    """Return the table of results/papers.md that has this key."""
    text = (ROOT / MADE["paper-tables.md"]).read_text(encoding="utf-8")
    _, there, after = text.partition(f"Key: `{found[1]}`.")
    if not there:
        raise PluginError(f"results/papers.md has no table {found[1]!r}")
    return after.strip().partition("\n\n")[0]


def _listed(found: re.Match[str]) -> str:
    target, prefix, without = found.groups()
    return markdown(keys(target, prefix, skip=tuple(prefix + name for name in (without or "").split(","))))


MARKS = {"<!-- verbs -->": verbs, "<!-- recipes -->": recipe_table, "<!-- exit codes -->": exit_codes}
"""What stands where a page says so."""
