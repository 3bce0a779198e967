"""The report of a plan: one self-contained page that a browser can parse, with every decision."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lt_offload.plan.what_if import Gain
from lt_offload.report.plan_page import sections, write_plan_report
from lt_offload.schema.plan import BatchPoint, Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from tests.support.profiles.small import of_one_pass
from tests.support.reports.pages import Page, content, figures, plain
from tests.support.samples import MB, make_plan, make_profile, make_trace

PROFILE = make_profile(layers=8, tensors_per_layer=3)
PLAN = make_plan(PROFILE)
PREDICTED = make_trace(PLAN)
MEASURED = make_trace(PLAN, source="measured", noise=0.1)


def report(plan: Plan = PLAN, profile: Profile = PROFILE, **traces: Trace) -> str:
    """The sections about a plan that the report of a run has, too."""
    return "".join(sections(plan, profile, traces.get("predicted", PREDICTED), traces.get("measured", MEASURED), ()))


def planned(folder: Path, plan: Plan = PLAN, gains: tuple[Gain, ...] = ()) -> str:
    path = write_plan_report(folder / "plan.html", plan, PROFILE, PREDICTED, gains)
    assert path == folder / "plan.html"
    return path.read_text(encoding="utf-8")


def test_page_is_well_formed_and_asks_for_nothing_outside(tmp_path: Path) -> None:
    html = planned(tmp_path)
    page = Page(html)
    assert not re.search(r"https?://|@import|url\(", content(html))
    assert not [a for _, a in page.elements if "src" in a or "href" in a]
    assert [a["content"] for a in page.all("meta") if a.get("name") == "viewport"]
    assert html.count('<script id="plotly">') == 1
    assert len(html) < 1_500_000
    [policy] = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'; script-src 'sha256-" in policy
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html


def test_both_iterations_are_drawn() -> None:
    html = report()
    assert [name for name in figures(html) if "ms" in name] == ["Predicted 634 ms", "Measured 673 ms"]
    assert html.count('<figure class="iteration">') == 2


def test_decisions_share_a_row_where_they_are_alike() -> None:
    decisions = plain(report()).split("Decisions")[1].split("Traffic")[0]
    assert "model.embed_tokens 113 MB (tied) 100% – keep device, state fetched" in decisions
    assert "model.layers.0 – 2 3 blocks 14 MB 100% – keep host" in decisions
    assert "model.layers.3 – 5 3 blocks 14 MB 0% 28 MB offload, 18 MB to host host" in decisions
    assert "model.layers.6 – 7 2 blocks 14 MB 0% 28 MB recompute host" in decisions


def with_ops(plan: Plan, **changes: dict[int, dict[str, object]]) -> Plan:
    """Return ``plan`` with changed ops, by kind and block."""
    ops = tuple(replace(op, **changes.get(op.kind, {}).get(op.block, {})) for op in plan.ops)  # type: ignore[arg-type]
    return replace(plan, ops=ops)


def test_decisions_say_what_runs_again_and_what_is_read_in_place() -> None:
    tensor = next(i for i, t in enumerate(PROFILE.tensors) if t.blocks == (2,))
    changed = with_ops(PLAN, forward={2: {"zero_copy": (tensor,), "bytes": 5 * MB}})
    again = replace(next(op for op in PLAN.ops if op.kind == "forward" and op.block == 3), save="all", id=len(PLAN.ops))
    html = report(of_one_pass(changed, (*changed.ops, again)))
    decisions = plain(html).split("Decisions")[1].split("Traffic")[0]
    assert "read in place per iteration" in decisions
    assert "model.layers.1 14 MB 67% – 5 MB keep host" in decisions
    assert "keep, runs again 1×" in decisions
    assert "keep what the backward needs stays on the device" in decisions
    traffic = plain(html).split("Traffic and load")[1].split("Runners-up")[0]
    assert re.search(r"weights read in place .* compute – – – – 5 MB 5 MB", traffic)
    assert "read in place" not in plain(report())


def test_what_more_would_buy(tmp_path: Path) -> None:
    found = (
        Gain(change="1 GB more device memory", iteration_s=1.6, lower_bound_s=1.5),
        Gain(change="8 GB more RAM", iteration_s=1.81, lower_bound_s=1.76, note="2 GB of 24 GB are needed"),
    )
    text = plain(planned(tmp_path, gains=found)).split("What more would buy")[1].split("Decisions")[0]
    assert "1 GB more device memory would buy the most: 11.6% less time." in text
    assert "as planned 1.81 s – 1.76 s" in text
    assert "1 GB more device memory 1.6 s −11.6% 1.5 s" in text
    assert "8 GB more RAM 1.81 s no change 1.76 s 2 GB of 24 GB are needed" in text
    nothing = plain(planned(tmp_path, gains=found[1:]))
    assert "None of these would make a noticeable difference" in nothing
    assert "What more would buy" not in plain(planned(tmp_path))


def test_the_curve_of_batch_sizes() -> None:
    curve = (
        BatchPoint(batch_size=2, samples_per_s=1.5, iteration_s=1.33, device_peak_bytes=200 * MB, reason="slower"),
        BatchPoint(batch_size=4, samples_per_s=2.21, iteration_s=1.81, device_peak_bytes=431 * MB, reason="chosen"),
        BatchPoint(batch_size=64, relaxed_samples_per_s=None, reason="does not fit"),
    )
    html = report(replace(PLAN, batch_curve=curve))
    text = plain(html).split("Batch size")[1].split("Decisions")[0]
    assert "4 2.21 1.81 s 431 MB chosen" in text
    assert "64 – – – does not fit" in text
    drawn = figures(html)["Samples per second"]
    assert [(trace["name"], trace["y"]) for trace in drawn["data"]] == [
        ("relaxed program", [None, None, None]),
        ("plan", [1.5, 2.21, None]),
    ]
    assert drawn["layout"]["xaxis"]["ticktext"] == ["2", "4", "64"]
    assert "Samples per second: plan 1.5 at 2, 2.21 at 4" in html
    assert "Batch size" not in plain(report())


def test_names_lose_the_prefix_that_all_share() -> None:
    blocks = tuple(replace(block, name=f"net.{block.name}") for block in PROFILE.blocks)
    html = report(profile=replace(PROFILE, blocks=blocks))
    assert "net." not in html
    assert "model.layers.0 – 2" in plain(html)


def test_totals_of_bytes_are_those_of_the_plan() -> None:
    traffic = plain(report()).split("Traffic and load")[1].split("Runners-up")[0]
    down = sum(op.bytes for op in PLAN.ops if op.lane == "d2h") / MB
    assert re.search(r"copies to host 113 MB 112 MB 226 MB 54 MB (\d+) MB", traffic)[1] == f"{down:.0f}"
    updated = sum(PROFILE.tensors[t].bytes for op in PLAN.ops if op.lane == "host" for t in PLAN.tensors(op)) / MB
    assert f"updates on host – – – – {updated:.0f} MB" in traffic


def test_runners_up_and_notes_are_escaped() -> None:
    html = report(replace(PLAN, notes=("a <b>note</b>",)))
    assert "a &lt;b&gt;note&lt;/b&gt;" in html
    assert "stream 1.93 s slower by 6.6 %" in plain(html)
    Page(html)


@pytest.mark.parametrize("factor", [0.5, 10.0])
def test_scale_is_common_unless_the_two_differ_a_lot(factor: float) -> None:
    spans = tuple(replace(s, start=s.start * factor, end=s.end * factor) for s in MEASURED.spans)
    other = replace(MEASURED, spans=spans, iteration_time=MEASURED.iteration_time * factor, memory=())
    text = plain(report(measured=other))
    assert ("same scale" in text) is (factor == 0.5)
    assert ("different time scales" in text) is (factor == 10.0)


def test_plan_report_promises_and_does_not_claim_measurements(tmp_path: Path) -> None:
    text = plain(planned(tmp_path / "deep", replace(PLAN, estimated=True)))
    assert "estimated from the hardware's description" in text
    assert "Measured" not in text.split("Plan and machine")[0]
    for figure in ("440 MB", "431 MB", "1.81 s", "lower bound of 1.76 s", "1.42 s with enough memory", "2.8%"):
        assert figure in text


def test_eighty_blocks_are_small(tmp_path: Path) -> None:
    profile = make_profile(layers=80, tensors_per_layer=12)
    plan = make_plan(profile)
    html = write_plan_report(tmp_path / "plan.html", plan, profile, make_trace(plan)).read_text(encoding="utf-8")
    assert len(content(html).encode()) < 500_000
