"""Reads pages of the report: their text and their elements."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser


class Page(HTMLParser):
    """Parses a page and fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(content(html))
        self.close()
        assert [tag for tag in self.open if tag != "meta"] == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def content(html: str) -> str:
    """The page without the library that draws its figures."""
    return re.sub(r'<script id="plotly">.*?</script>', "", html, flags=re.DOTALL)


def plain(html: str) -> str:
    """What is to be read in a page; figures are drawings."""
    text = re.sub(r"<(script|style)[^>]*>.*?</\1>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", text)))
