"""Reports in headless Chromium: nothing overflows on a phone, nothing is lost in print, nothing is unnamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lt_offload.plan.sweep import Sweep, SweepPoint
from lt_offload.plan.what_if import Gain
from lt_offload.report.page import write_plan_report, write_report, write_sweep_report
from lt_offload.schema.plan import BatchPoint
from tests.support import browser
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
    return write_report(
        folder,
        plan=PLAN,
        profile=PROFILE,
        predicted=make_trace(PLAN),
        measured=make_trace(PLAN, source="measured", noise=0.2),
        summary={"loss_before": 3.2, "loss_after": 2.5, "sample": "a sample " * 40, "steps": 60},
        gains=GAINS,
    )


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
            planner="stream all, update on the device",
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


REPORTS = [run_report, plan_report, sweep_report, cards_report]
WIDER_THAN_THE_WINDOW = """[
  window.innerWidth, document.documentElement.scrollWidth,
  [...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > window.innerWidth + 1
     && !e.closest("thead")).map(e => e.tagName + "." + e.className).slice(0, 5)]"""


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("write", REPORTS)
def test_nothing_is_wider_than_the_window(write: Callable[[Path], Path], width: int, tmp_path: Path) -> None:
    inner, content, culprits = browser.ask(write(tmp_path), WIDER_THAN_THE_WINDOW, width=width)
    assert inner == width
    assert culprits == []
    assert content <= width


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


def test_labels_of_an_axis_do_not_run_into_each_other(tmp_path: Path) -> None:
    overlapping = """[...document.querySelectorAll(".axis")].flatMap(axis => {
        const shown = [...axis.children].map(e => e.getBoundingClientRect()).filter(r => r.width);
        return shown.slice(1).filter((r, i) => r.left < shown[i].right).length; }).reduce((a, b) => a + b, 0)"""
    for write in (run_report, sweep_report):
        for width in (360, 1280):
            assert browser.ask(write(tmp_path), overlapping, width=width) == 0, (write, width)


@pytest.mark.parametrize("write", REPORTS)
def test_everything_has_a_name_for_those_who_cannot_see_it(write: Callable[[Path], Path], tmp_path: Path) -> None:
    found = browser.ask(
        write(tmp_path),
        """({
          language: document.documentElement.lang, title: document.title, heads: document.querySelectorAll("h1").length,
          drawings: [...document.querySelectorAll("svg")].filter(e => !e.getAttribute("aria-label")).length,
          tables: [...document.querySelectorAll("table")].filter(e => !e.closest("[aria-label]")).length,
          headings: [...document.querySelectorAll("th")].filter(e => !e.scope || !e.textContent).length,
          empty: [...document.querySelectorAll("h2")].filter(e => !e.nextElementSibling).length})""",
        width=1280,
    )
    title = found.pop("title")
    assert title
    assert found == {"language": "en", "heads": 1, "drawings": 0, "tables": 0, "headings": 0, "empty": 0}


def test_touching_a_bar_tells_what_it_is(tmp_path: Path) -> None:
    said = browser.ask(
        plan_report(tmp_path),
        """(() => { const bar = document.querySelector("rect.backward");
          bar.dispatchEvent(new window.Event("click", {bubbles: true}));
          return bar.closest("figure").querySelector(".readout").textContent; })()""",
        width=360,
    )
    assert said.startswith("backward, block ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_the_page(scheme: str, tmp_path: Path) -> None:
    """Contrast of at least 4.5, as WCAG 2.1 AA asks for."""
    page = plan_report(tmp_path)
    # The scheme is the system's; a page that has only the dark colours shows what they look like.
    text = page.read_text()
    assert "(prefers-color-scheme: dark)" in text
    page.write_text(text.replace("(prefers-color-scheme: dark)", "all" if scheme == "dark" else "not all"))
    colors = browser.ask(
        page,
        """(() => { const color = (e, name) => window.getComputedStyle(e)[name].match(/[0-9.]+/g).map(Number);
          return [color(document.body, "backgroundColor"),
                  ...["h1", ".note", "td", ".limit", "small"].map(s => color(document.querySelector(s), "color"))];
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


@pytest.mark.parametrize("write", [run_report, sweep_report])
def test_it_can_be_printed(write: Callable[[Path], Path], tmp_path: Path) -> None:
    printed = browser.pdf(write(tmp_path))
    assert printed.startswith(b"%PDF")
    pages = printed.count(b"/Type /Page\n")
    assert 1 <= pages <= 8
    assert len(printed) < 20 * MB
