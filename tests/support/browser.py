"""A real browser for pages: lays a page out in a window of a given size and answers questions about the result."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str:
    """Return the browser: what LT_OFFLOAD_BROWSER says, else the first of its usual names; skips the test without one.

    Where it must not be missing, LT_OFFLOAD_BROWSER=chromium makes its absence an error.
    """
    wanted = os.environ.get("LT_OFFLOAD_BROWSER")
    found = next((path for name in ([wanted] if wanted else NAMES) if (path := shutil.which(name))), None)
    if found is None and wanted:
        pytest.fail(f"LT_OFFLOAD_BROWSER={wanted!r} is not installed")
    if found is None:
        pytest.skip(f"layout is NOT tested: none of {', '.join(NAMES)} is installed")
    return found


def ask(page: Path, question: str, *, width: int, height: int = 800) -> Any:
    """Return the value of the JavaScript expression ``question`` in ``page``, laid out in a window of that size."""
    # A window cannot be as narrow as a phone, a frame can.
    frame = page.with_name("frame.html")
    frame.write_text(
        f'<body style="margin:0"><iframe id="f" src="{page.name}" style="border:0;width:{width}px;height:{height}px">'
        "</iframe><pre id=answer></pre><script>onload = () => { const window = "
        'document.getElementById("f").contentWindow, document_ = window.document; document.getElementById("answer")'
        f".textContent = JSON.stringify(((window, document) => ({question}))(window, document_)); }}</script>"
    )
    done = _run(page, "--allow-file-access-from-files", "--dump-dom", frame.as_uri())
    answer = re.search(r'<pre id="answer">(.+?)</pre>', done, re.DOTALL)
    assert answer, done[-2000:]
    return json.loads(unescape(answer[1]))


def pdf(page: Path) -> bytes:
    """Return ``page`` as it is printed."""
    target = page.with_suffix(".pdf")
    _run(page, "--no-pdf-header-footer", f"--print-to-pdf={target}", page.as_uri())
    return target.read_bytes()


def _run(page: Path, *args: str) -> str:
    profile = page.parent / "browser"
    command = [
        find(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        *args,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
