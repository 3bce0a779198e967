"""Reports in headless Chromium: nothing overflows on a phone, nothing is lost in print, nothing is unnamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lt_offload.plan.sweep import Sweep, SweepPoint
from lt_offload.plan.what_if import Gain
from lt_offload.report import drawing
from lt_offload.report.compare import read_runs, write_comparison
from lt_offload.report.drawing import Drawing
from lt_offload.report.plan_page import write_plan_report
from lt_offload.report.run_page import write_run_report
from lt_offload.report.sweep_page import write_sweep_report
from lt_offload.schema.plan import BatchPoint
from tests import sampling
from tests.support import browser
from tests.support.reports.run_folders import make_run
from tests.support.samples import MB, make_plan, make_profile, make_trace

GB = 10**9
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


def comparison(folder: Path) -> Path:
    names = ("quickstart-20260101-120000", "quickstart-20260102-120000", "a-much-longer-name-of-a-run-folder")
    runs = [str(make_run(folder / name, lr=number)) for number, name in enumerate(names, start=1)]
    return write_comparison(folder / "page.html", read_runs(runs))


def plan_report(folder: Path) -> Path:
    return write_plan_report(folder / "plan.html", PLAN, PROFILE, make_trace(PLAN), GAINS)


def sweep_report(folder: Path) -> Path:
    points = [
        SweepPoint(hardware="rtx-3060-12gb", memory_bytes=size * GB, host_memory_bytes=64 * GB, reason="needs 7GB")
        if size < 8
        else SweepPoint(
            hardware="rtx-3060-12gb",
            memory_bytes=size * GB,
            host_memory_bytes=64 * GB,
            batch_size=4,
            iteration_s=30 / size,
            tokens_per_s=70.0 * size,
            lower_bound_s=1.0,
            no_offload_s=2.0,
            device_peak_bytes=size * GB,
            host_peak_bytes=60 * GB,
            planner="stream, update on the device",
        )
        for size in range(4, 26)
    ]
    sweep = Sweep(
        axis="memory",
        model="a-model-of-some-length",
        dtype="float32",
        sequence_length=512,
        points=tuple(points),
        smallest_bytes=7 * GB,
    )
    return write_sweep_report(folder / "sweep.html", sweep)


def cards_report(folder: Path) -> Path:
    names = ("rtx-3060-12gb", "rtx-3090, ddr4-64gb, pcie3-x8", "h200")
    points = [
        SweepPoint(hardware=name, memory_bytes=GB, host_memory_bytes=GB, iteration_s=at, tokens_per_s=900.0 / at)
        if at < 3
        else SweepPoint(hardware=name, memory_bytes=GB, host_memory_bytes=GB, reason="needs host_memory=123456MB")
        for at, name in enumerate(names, start=1)
    ]
    sweep = Sweep(axis="hardware", model="m", dtype="bfloat16", sequence_length=512, points=tuple(points))
    return write_sweep_report(folder / "cards.html", sweep)


REPORTS = [run_report, unplanned_report, plan_report, sweep_report, cards_report, comparison]
WIDER_THAN_THE_WINDOW = """[...document.querySelectorAll("body *")].filter(
  e => e.getBoundingClientRect().right > window.innerWidth + 1 && !e.closest("thead") && !e.closest(".plot")
    && !e.closest("details:not([open])")).map(e => e.tagName + "." + e.className).slice(0, 5)"""
COLLIDING = """(() => {
  const found = [];
  for (const figure of document.querySelectorAll(".plot")) {
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
  drawings: [...document.querySelectorAll(".plot")].filter(e => !e.getAttribute("aria-label")).length,
  undrawn: [...document.querySelectorAll(".plot")].filter(e => !e.querySelector("svg")).length,
  tables: [...document.querySelectorAll("table")].filter(e => !e.closest("[aria-label]")).length,
  headings: [...document.querySelectorAll("th")].filter(e => !e.scope || !e.textContent).length,
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
        "language": "en", "heads": 1, "drawings": 0, "undrawn": 0, "tables": 0, "headings": 0, "empty": 0
    }  # fmt: skip


def test_on_a_phone_a_cell_shows_its_heading_and_nothing_needs_to_be_scrolled(tmp_path: Path) -> None:
    headings, smallest, scrolled = browser.ask(
        plan_report(tmp_path),
        """[
          [...document.querySelectorAll("td:not(.none)")].map(e => window.getComputedStyle(e, "::before").content),
          Math.min(...[...document.querySelectorAll("p, td, th, dd, dt, li")].filter(e => e.offsetHeight)
            .map(e => parseFloat(window.getComputedStyle(e).fontSize))),
          [...document.querySelectorAll("*")].filter(e => e.scrollWidth > e.clientWidth + 1 &&
            window.getComputedStyle(e).overflowX === "auto").length]""",
        width=360,
    )
    assert len(headings) > 40
    assert "none" not in headings
    assert '""' not in headings
    assert smallest >= 11
    assert scrolled == 0


def test_pointing_at_a_bar_tells_what_it_is_and_both_iterations_are_zoomed_together(tmp_path: Path) -> None:
    said, zoomed = browser.ask(
        run_report(tmp_path),
        """(() => { const [one, other] = document.querySelectorAll(".iteration .plot");
          const curve = one.data.findIndex(trace => trace.name === "backward");
          window.Plotly.Fx.hover(one, [{curveNumber: curve, pointNumber: 0}], ["xy"]);
          const said = one.querySelector(".hoverlayer").textContent;
          one.emit("plotly_relayout", {"xaxis.range[0]": 0.1, "xaxis.range[1]": 0.2});
          return [said, other.layout.xaxis.range]; })()""",
        width=360,
    )
    assert said.startswith("backward, block ")
    assert zoomed == [0.1, 0.2]


def test_names_cannot_break_a_page_and_it_runs_and_loads_nothing_but_its_own(tmp_path: Path) -> None:
    evil = "</script><script>document.title = 'evil'</script><!--<script>"
    drawn = Drawing(traces=[{"type": "bar", "name": evil, "x": [1], "y": [2]}])
    html = drawing.page("mine", [drawing.frame(drawn, caption="", label=evil, height=200) for _ in range(2)])
    assert evil not in html
    question = """(() => {
      const observer = new window.ReportingObserver(() => {}, {buffered: true});
      observer.observe();
      const drawn = [...document.querySelectorAll(".plot")].filter(e => e.querySelector("svg"));
      const refused = observer.takeRecords().map(report => report.body.effectiveDirective);
      return [document.title, drawn.map(e => e.data[0].name), refused]; })()"""
    page = tmp_path / "page.html"
    for more, refused in (
        ("", []),
        (
            "<img src='https://example.invalid/a.png'/><script>document.title = 'evil'</script>",
            ["img-src", "script-src-elem"],
        ),
    ):
        page.write_text(html.replace("</body>", f"{more}</body>"))
        assert browser.ask(page, question, width=1280) == ["mine", [evil, evil], refused]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_the_page(scheme: str, tmp_path: Path) -> None:
    """Contrast of at least 4.5, as WCAG 2.1 AA asks for."""
    page = plan_report(tmp_path)
    # The scheme is the system's; a page that has only the dark colours shows what they look like.
    text = page.read_text()
    dark = "@media (prefers-color-scheme: dark)"
    assert text.count(dark) == 1
    page.write_text(text.replace(dark, "@media all" if scheme == "dark" else "@media not all"))
    colors = browser.ask(
        page,
        """(() => { const color = (e, name) => window.getComputedStyle(e)[name].match(/[0-9.]+/g).map(Number);
          return [color(document.body, "backgroundColor"),
                  ...["h1", ".note", "td", "small"].map(s => color(document.querySelector(s), "color")),
                  ...[".xtick text", ".annotation text"].map(s => color(document.querySelector(s), "fill"))];
        })()""",
        width=1280,
    )
    background, *others = colors
    assert (sum(background) < 200) is (scheme == "dark")
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
