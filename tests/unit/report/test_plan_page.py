"""The page of a plan: one self-contained file that a browser can parse, with every decision."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from pathlib import Path

from lt_offload import solve
from lt_offload.plan.what_if import Gain
from lt_offload.report.plan_page import sections, write_plan_report
from lt_offload.schema.plan import Plan
from tests.support.reports.pages import Page, content, plain
from tests.support.samples import make_plan, make_profile, make_trace

PROFILE = make_profile(layers=8, tensors_per_layer=3)
PLAN = make_plan(PROFILE)
PREDICTED = make_trace(PLAN)


def planned(folder: Path, plan: Plan = PLAN, gains: tuple[Gain, ...] = ()) -> str:
    path = write_plan_report(folder / "deep" / "plan.html", plan, PROFILE, PREDICTED, gains)
    assert path == folder / "deep" / "plan.html"
    return path.read_text(encoding="utf-8")


def test_page_is_well_formed_and_asks_for_nothing_outside(tmp_path: Path) -> None:
    html = planned(tmp_path)
    page = Page(html)
    assert not re.search(r"https?://|@import|url\(", content(html))
    assert not [a for _, a in page.elements if "src" in a or "href" in a]
    assert [a["content"] for a in page.all("meta") if a.get("name") == "viewport"]
    assert html.count('<script id="plotly">') == 1
    [policy] = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'; script-src 'sha256-" in policy
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert policy.count("'sha256-") == 1 + len(page.all("script"))


def test_the_plan_is_explained_in_words_and_drawn(tmp_path: Path) -> None:
    html = planned(tmp_path, replace(PLAN, estimated=True, notes=("a <b>note</b>",)))
    text = plain(html)
    for said in (
        "431 MB of 440 MB",
        "about 1.81 s",
        "1.27 times the 1.42 s of a device with enough memory",
        "estimated",
    ):
        assert said in text
    assert escape(replace(PLAN, estimated=True, notes=("a <b>note</b>",)).explain()) in html
    assert "<b>" not in html.split("<h2>Decisions")[1]
    labels = [figure["aria-label"] for figure in Page(html).all("figure")]
    assert labels[0] == "Predicted iteration of 634 ms, memory 423 MB of 440 MB"
    assert "Measured" not in text


def test_kernels_that_are_not_the_model_s_own_are_named(tmp_path: Path) -> None:
    with_kernels = solve(replace(PROFILE, kernels="those of somebody"), memory=PLAN.budget_bytes, planner="stream")
    said = "Kernels: those of somebody; numbers are exactly those of the model with them, not transformers' own."
    assert said in plain(planned(tmp_path, with_kernels))
    assert said not in plain(planned(tmp_path / "without", solve(PROFILE, memory=PLAN.budget_bytes, planner="stream")))


def test_what_more_would_buy(tmp_path: Path) -> None:
    found = (
        Gain(change="1 GB more device memory", iteration_s=1.6, lower_bound_s=1.5),
        Gain(change="8 GB more RAM", iteration_s=1.81, lower_bound_s=1.76, note="2 GB of 24 GB are needed"),
    )
    text = plain(planned(tmp_path, gains=found)).split("What more would buy")[1].split("Decisions")[0]
    assert "as planned 1.81 s 1.76 s" in text
    assert "1 GB more device memory 1.6 s -11.6% 1.5 s" in text
    assert "8 GB more RAM 1.81 s +0.0% 1.76 s 2 GB of 24 GB are needed" in text
    assert "What more would buy" not in plain(planned(tmp_path))


def test_eighty_blocks_are_small() -> None:
    profile = make_profile(layers=80, tensors_per_layer=12)
    plan = make_plan(profile)
    traces = {"Predicted": make_trace(plan), "Measured": make_trace(plan, source="measured", noise=0.1)}
    assert len("".join(sections(plan, profile, traces, ())).encode()) < 500_000
