"""Reports in headless Chromium: nothing overflows on a phone, nothing is lost in print, nothing is unnamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plotly.graph_objects import Figure

from lt_offload.plan.what_if import Gain
from lt_offload.report.page import drawn, write_page
from lt_offload.report.plan_page import write_plan_report
from lt_offload.report.run_page import write_run_report
from lt_offload.schema.plan import BatchPoint
from tests import sampling
from tests.support import browser
from tests.support.reports.run_folders import make_run
from tests.support.samples import MB, make_plan, make_profile, make_trace

PROFILE = make_profile(layers=30, tensors_per_layer=3)
GAINS = (
    Gain(change="1 GB more device memory", iteration_s=1.5, lower_bound_s=1.4),
    Gain(change="8 GB more RAM", iteration_s=1.81, lower_bound_s=1.76, note="2.31 GB of 24 GB are needed"),
)
CURVE = tuple(
    BatchPoint(batch_size=size, samples_per_s=size / (1 + 0.2 * size), iteration_s=1 + 0.2 * size, reason="slower")
    for size in (1, 2, 4, 8, 16)
)
PLAN = replace(make_plan(PROFILE), batch_curve=CURVE)


def run_report(folder: Path) -> Path:
    run = make_run(folder / "run", steps=300)
    PROFILE.save(run / "profile.json")
    PLAN.save(run / "plan.json")
    make_trace(PLAN, source="measured", noise=0.2).save(run / "trace.json")
    return write_run_report(run, GAINS)


def unplanned_report(folder: Path) -> Path:
    return write_run_report(make_run(folder / "run", planned=False))


def plan_report(folder: Path) -> Path:
    return write_plan_report(folder / "plan.html", PLAN, PROFILE, make_trace(PLAN), GAINS)


REPORTS = [run_report, unplanned_report, plan_report]
WIDER_THAN_THE_WINDOW = """[...document.querySelectorAll("body *")].filter(
  e => e.getBoundingClientRect().right > window.innerWidth + 1 && !e.closest(".scroll") && !e.closest("svg")
    && !e.closest("details:not([open])")).map(e => e.tagName + "." + e.className).slice(0, 5)"""
COLLIDING = """(() => {
  const found = [];
  for (const figure of document.querySelectorAll(".plotly-graph-div")) {
    const texts = [...figure.querySelectorAll("text")].filter(e => e.textContent.trim() && e.closest(
        ".xtick, .ytick, .annotation, .legendtext, .bartext, .legend") && window.getComputedStyle(e).opacity !== "0"
        && e.getBoundingClientRect().width && window.getComputedStyle(e).display !== "none");
    const boxes = texts.map(e => [e.textContent, e.getBoundingClientRect()]);
    for (const [i, [one, a]] of boxes.entries())
      for (const [other, b] of boxes.slice(i + 1))
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
          found.push(one + " / " + other);
    const frame = figure.getBoundingClientRect();
    for (const [text, box] of boxes)
      if (box.left < frame.left - 1 || box.right > frame.right + 1) found.push(text + " is cut off");
  }
  return found; })()"""
NAMES = """({
  language: document.documentElement.lang, heads: document.querySelectorAll("h1").length,
  drawings: [...document.querySelectorAll("figure")].filter(e => !e.getAttribute("aria-label")).length,
  undrawn: [...document.querySelectorAll(".plotly-graph-div")].filter(e => !e.querySelector("svg")).length,
  headings: [...document.querySelectorAll("th")].filter(e => !e.scope).length,
  empty: [...document.querySelectorAll("h2")].filter(e => !e.nextElementSibling).length})"""


@pytest.mark.slow
@pytest.mark.parametrize(("write", "width"), sampling.grid(REPORTS, [360, 1280], count=8))
def test_layout_and_names(write: Callable[[Path], Path], width: int, tmp_path: Path) -> None:
    """Nothing is wider than the window, no label covers another one, everything has a name for those who cannot see."""
    page = write(tmp_path)
    question = (
        f"[window.innerWidth, document.documentElement.scrollWidth, {WIDER_THAN_THE_WINDOW}, {COLLIDING}, {NAMES}]"
    )
    inner, content, culprits, colliding, names = browser.ask(page, question, width=width, height=4000)
    assert inner == width
    assert culprits == []
    assert content <= width
    assert colliding == []
    assert names == {
        "language": "en", "heads": 1, "drawings": 0, "undrawn": 0, "headings": 0, "empty": 0
    }  # fmt: skip


def test_pointing_at_a_bar_tells_what_it_is_and_both_iterations_are_zoomed_together(tmp_path: Path) -> None:
    said, zoomed = browser.ask(
        run_report(tmp_path),
        """(() => { const figure = document.getElementById("iteration");
          const curve = figure.data.findIndex(trace => trace.name === "backward");
          window.Plotly.Fx.hover(figure, [{curveNumber: curve, pointNumber: 0}], ["xy"]);
          const said = figure.querySelector(".hoverlayer").textContent;
          window.Plotly.relayout(figure, {"xaxis.range[0]": 0.1, "xaxis.range[1]": 0.2});
          return [said, figure.layout.xaxis3.range]; })()""",
        width=360,
    )
    assert said.startswith("backward ")
    assert zoomed == [0.1, 0.2]


def test_names_cannot_break_a_page_and_it_runs_and_loads_nothing_but_its_own(tmp_path: Path) -> None:
    evil = "</script><script>document.title = 'evil'</script><!--<script>"
    page = tmp_path / "page.html"
    bar = {"type": "bar", "name": evil, "x": [1], "y": [2]}
    write_page(page, "mine", evil, [drawn(Figure([bar]), name, evil) for name in ("one", "two")])
    html = page.read_text()
    assert evil not in html
    question = """(() => {
      const observer = new window.ReportingObserver(() => {}, {buffered: true});
      observer.observe();
      const drawn = [...document.querySelectorAll(".plotly-graph-div")].filter(e => e.querySelector("svg"));
      const refused = observer.takeRecords().map(report => report.body.effectiveDirective);
      return [document.title, drawn.map(e => e.data[0].name), refused]; })()"""
    for more, refused in (
        ("", []),
        (
            "<img src='https://example.invalid/a.png'/><script>document.title = 'evil'</script>",
            ["img-src", "script-src-elem"],
        ),
    ):
        page.write_text(html.replace("</body>", f"{more}</body>"))
        assert browser.ask(page, question, width=1280) == ["mine", [evil, evil], refused]


def test_text_stands_out_from_the_page(tmp_path: Path) -> None:
    """Contrast of at least 4.5, as WCAG 2.1 AA asks for."""
    colors = browser.ask(
        plan_report(tmp_path),
        """(() => { const color = (e, name) => window.getComputedStyle(e)[name].match(/[0-9.]+/g).map(Number);
          return [color(document.body, "backgroundColor"),
                  ...["h1", "h2 + p", "td", "pre"].map(s => color(document.querySelector(s), "color")),
                  ...[".xtick text", ".annotation text"].map(s => color(document.querySelector(s), "fill"))];
        })()""",
        width=1280,
    )
    background, *others = colors
    for color in others:
        assert contrast(color, background) >= 4.5, (color, background)


def contrast(one: list[float], other: list[float]) -> float:
    def luminance(color: list[float]) -> float:
        parts = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color[:3]]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_it_can_be_printed(tmp_path: Path) -> None:
    printed = browser.pdf(run_report(tmp_path))
    assert printed.startswith(b"%PDF")
    pages = printed.count(b"/Type /Page\n")
    assert 1 <= pages <= 8
    assert len(printed) < 20 * MB
