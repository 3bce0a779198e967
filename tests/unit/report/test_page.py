"""The report: one self-contained page that a browser can parse, with every lane, the budget line and every decision."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lt_offload.plan.what_if import Gain
from lt_offload.report import charts
from lt_offload.report.page import write_plan_report, write_report
from lt_offload.schema.plan import BatchPoint, Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Span, Trace
from lt_offload.units import format_seconds
from tests.support.samples import MB, make_plan, make_profile, make_trace

PROFILE = make_profile(layers=8, tensors_per_layer=3)
PLAN = make_plan(PROFILE)
PREDICTED = make_trace(PLAN)
MEASURED = make_trace(PLAN, source="measured", noise=0.1)
VOID = {"meta"}


class Page(HTMLParser):
    """Parses a page and fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [
            a
            for t, a in self.elements
            if t == tag and all(a.get(k.replace("_", "-")) == v for k, v in attributes.items())
        ]


def report(
    tmp_path: Path,
    plan: Plan = PLAN,
    profile: Profile = PROFILE,
    *,
    summary: dict[str, object] | None = None,
    **traces: Trace,
) -> str:
    predicted, measured = traces.get("predicted", PREDICTED), traces.get("measured", MEASURED)
    path = write_report(
        tmp_path, plan=plan, profile=profile, predicted=predicted, measured=measured, summary=summary or {}
    )
    assert path == tmp_path / "report.html"
    return path.read_text(encoding="utf-8")


def plain(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def test_page_is_well_formed_and_asks_for_nothing_outside(tmp_path: Path) -> None:
    html = report(tmp_path)
    page = Page(html)
    assert not re.search(r"https?://|@import|url\(", html)
    assert not [a for _, a in page.elements if "src" in a or "href" in a]
    assert page.all("meta", name="viewport")
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html


def test_every_drawing_has_all_lanes_and_the_budget_line(tmp_path: Path) -> None:
    html = report(tmp_path)
    figures = re.findall(r'<figure data-source="(\w+)">(.*?)</figure>', html, re.DOTALL)
    assert [source for source, _ in figures] == ["simulated", "measured"]
    for _, figure in figures:
        assert re.findall(r'data-lane="(\w+)"', figure) == ["compute", "h2d", "d2h", "host", "memory"]
        svgs = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", figure, re.DOTALL)]
        assert len(svgs) == 5
        assert all(svg.findall("rect") for svg in svgs[:4])
        line = svgs[4].find("line[@class='budget']")
        assert line is not None
        heights = [float(y) for y in re.findall(r"(?:V|M0 )([\d.]+)", svgs[4].find("path[@class='curve']").get("d"))]
        assert min(heights) > float(line.get("y1")), "the curve must stay under the budget line"


def test_bars_lie_where_the_spans_are() -> None:
    html = charts.iteration(PREDICTED, PLAN, [b.name for b in PROFILE.blocks], axis_s=2 * PREDICTED.iteration_time)
    rects = [ET.fromstring(rect) for rect in re.findall(r"<rect.*?</rect>", html)]
    first = min((s for s in PREDICTED.spans if s.label.startswith("backward")), key=lambda s: s.start)
    match = [r for r in rects if r.get("class").split()[0] == "backward"][0]
    assert float(match.get("x")) == pytest.approx(500 * first.start / PREDICTED.iteration_time, abs=0.01)
    assert float(match.get("width")) == pytest.approx(
        500 * (first.end - first.start) / PREDICTED.iteration_time, abs=0.01
    )
    assert match.find("title").text.startswith("backward, block 9 · lm_head · 112 ms from ")
    assert all(float(r.get("x")) + float(r.get("width")) <= 1000.01 for r in rects)


def test_every_kind_of_op_has_its_colour_and_legend_entry(tmp_path: Path) -> None:
    html = report(tmp_path)
    used = set(re.findall(r'<rect class="([\w-]+)', html))
    assert used == {
        "forward", "backward", "update", "prefetch-weight", "prefetch-state", "prefetch-activation",
        "offload-grad", "offload-weight", "offload-state", "offload-activation",
    }  # fmt: skip
    for kind in used:
        assert f".{kind} {{ fill:" in html
        assert f'<i class="{kind}"></i>{charts.KINDS[kind]}' in html


def test_merging_keeps_the_work_and_the_bytes() -> None:
    drawn = charts.bars(MEASURED, PLAN)
    assert len(drawn) < len(MEASURED.spans)
    assert sum(bar.ops for bar in drawn) == len(MEASURED.spans)
    assert sum(bar.bytes for bar in drawn) == sum(PLAN.ops[span.op].bytes for span in MEASURED.spans)
    for lane in ("compute", "h2d", "d2h", "host"):
        assert sum(bar.busy for bar in drawn if bar.lane == lane) == pytest.approx(MEASURED.busy(lane))


def test_device_updates_within_a_backward_are_drawn_on_top() -> None:
    backward = next(s for s in PREDICTED.spans if s.label.startswith("backward"))
    update = next(op for op in PLAN.ops if op.kind == "update")
    inner = Span(
        op=update.id, lane="compute", label="update", start=backward.start, end=(backward.start + backward.end) / 2
    )
    drawn = charts.bars(replace(PREDICTED, spans=(inner, *PREDICTED.spans)), PLAN)
    nested = [bar for bar in drawn if bar.nested]
    assert [(bar.kind, bar.ops) for bar in nested] == [("update", 1)]
    assert drawn[-1] is nested[0]


def test_spans_outside_the_plan_are_named_by_their_label() -> None:
    spans = (
        Span(op=-1, lane="h2d", label="prefetch weight 3", start=0.0, end=0.1),
        Span(op=-1, lane="host", label="something else", start=0.0, end=0.1),
    )
    drawn = charts.bars(replace(PREDICTED, spans=spans), PLAN)
    assert [(bar.kind, bar.block) for bar in drawn] == [("prefetch-weight", None), ("other", None)]


def test_work_beyond_the_iteration_is_drawn_where_it_recurs() -> None:
    op = next(op for op in PLAN.ops if op.kind == "prefetch")
    spans = (
        Span(op=op.id, lane="h2d", label="", start=-0.3, end=-0.1),
        Span(op=op.id, lane="host", label="", start=0.9, end=1.25),
        Span(op=op.id, lane="d2h", label="", start=-0.1, end=0.2),
    )
    trace = replace(PREDICTED, spans=spans, iteration_time=1.0, memory=())
    drawn = {(bar.lane, round(bar.start, 9), round(bar.end, 9)) for bar in charts.bars(trace, PLAN)}
    assert drawn == {("h2d", 0.7, 0.9), ("host", 0.9, 1.0), ("host", 0.0, 0.25), ("d2h", 0.9, 1.0), ("d2h", 0.0, 0.2)}


def test_memory_curve_never_hides_a_peak() -> None:
    spike = ((0.0, 100), (0.50001, 380 * MB), (0.50002, 100))
    trace = Trace(
        source="measured",
        iteration_time=1.0,
        device_peak=380 * MB,
        host_peak=0,
        budget_bytes=400 * MB,
        spans=(),
        memory=spike,
    )
    path = charts._curve(trace, 1.0, 400 * MB)
    late = charts._curve(replace(trace, memory=((0.3, 200 * MB),)), 1.0, 400 * MB)
    assert late == "M0 50.0H1000.00"
    assert min(float(y) for y in re.findall(r"V([\d.]+)", path)) == pytest.approx(100 * (1 - 380 / 400))


def test_a_budget_far_above_the_peak_is_told_but_not_drawn(tmp_path: Path) -> None:
    huge = {"predicted": replace(PREDICTED, budget_bytes=10**12), "measured": replace(MEASURED, budget_bytes=10**12)}
    page = Page(report(tmp_path, replace(PLAN, budget_bytes=10**12), **huge))
    assert page.all("path", **{"class": "curve"})
    assert not page.all("line", **{"class": "budget"})
    assert len(page.all("line", **{"class": "peak"})) == 2


def test_headline_figures(tmp_path: Path) -> None:
    html = report(
        tmp_path, summary={"loss_before": 3.21874, "loss_after": 2.5, "tokens_per_s": 553.25, "recipe": "quickstart"}
    )
    text = plain(html)
    for figure in (
        "440 MB",
        "predicted 431 MB",
        "predicted 1.81 s",
        "lower bound of 1.76 s",
        "1.42 s with enough memory",
        "2.8%",
    ):
        assert figure in text
    assert "Held-out loss 2.500 3.219 before training" in text
    assert "tokens per s 553.2" in text
    assert "recipe quickstart" in text
    assert "loss before" not in text


def test_figures_of_the_whole_run_come_before_those_of_one_iteration(tmp_path: Path) -> None:
    run = {"step_s": 3.62, "device_peak_bytes": 435 * MB, "host_peak_bytes": 3_000 * MB}
    text = plain(report(tmp_path, summary=run))
    assert "One iteration took 3.62 s, 2.00 times the planned 1.81 s." in text
    assert "Device peak 435 MB predicted 431 MB Step time 3.62 s predicted 1.81 s" in text
    assert "Host peak 3 GB of 24 GB allowed" in text
    assert f"Measured {format_seconds(MEASURED.iteration_time)}" in text


def test_decisions_share_a_row_where_they_are_alike(tmp_path: Path) -> None:
    decisions = plain(report(tmp_path)).split("Decisions")[1].split("Traffic")[0]
    assert "model.embed_tokens 113 MB (tied) 100% – keep device, state fetched" in decisions
    assert "model.layers.0 – 2 3 blocks 14 MB 100% – keep host" in decisions
    assert "model.layers.3 – 5 3 blocks 14 MB 0% 28 MB offload, 18 MB to host host" in decisions
    assert "model.layers.6 – 7 2 blocks 14 MB 0% 28 MB recompute host" in decisions


def with_ops(plan: Plan, **changes: dict[int, dict[str, object]]) -> Plan:
    """Return ``plan`` with changed ops, by kind and block."""
    ops = tuple(replace(op, **changes.get(op.kind, {}).get(op.block, {})) for op in plan.ops)  # type: ignore[arg-type]
    return replace(plan, ops=ops)


def test_decisions_say_what_runs_again_and_what_is_read_in_place(tmp_path: Path) -> None:
    tensor = next(i for i, t in enumerate(PROFILE.tensors) if t.blocks == (2,))
    changed = with_ops(PLAN, forward={2: {"zero_copy": (tensor,), "bytes": 5 * MB}})
    again = replace(next(op for op in PLAN.ops if op.kind == "forward" and op.block == 3), save="all", id=len(PLAN.ops))
    html = report(tmp_path, replace(changed, ops=(*changed.ops, again)))
    decisions = plain(html).split("Decisions")[1].split("Traffic")[0]
    assert "read in place per iteration" in decisions
    assert "model.layers.1 14 MB 67% – 5 MB keep host" in decisions
    assert "keep, runs again 1×" in decisions
    assert "keep what the backward needs stays on the device" in decisions
    traffic = plain(html).split("Traffic and load")[1].split("Runners-up")[0]
    assert re.search(r"weights read in place .* compute – – – – 5 MB 5 MB", traffic)
    assert "read in place" not in plain(report(tmp_path))


def test_forwards_that_run_again_have_a_colour_of_their_own() -> None:
    op = next(op for op in PLAN.ops if op.kind == "forward" and op.block == 3)
    plan = replace(PLAN, ops=tuple(replace(o, save="input", bytes=2 * MB) if o.id == op.id else o for o in PLAN.ops))
    drawn = charts.bars(PREDICTED, plan)
    assert [bar.block for bar in drawn if bar.kind == "rerun"] == [3]
    html = charts.iteration(PREDICTED, plan, [b.name for b in PROFILE.blocks], axis_s=PREDICTED.iteration_time)
    assert "forward that runs again, block 3 · model.layers.2" in html
    assert "reads 2 MB in host memory" in html


def test_what_more_would_buy(tmp_path: Path) -> None:
    found = (
        Gain(change="1 GB more device memory", iteration_s=1.6, lower_bound_s=1.5),
        Gain(change="8 GB more RAM", iteration_s=1.81, lower_bound_s=1.76, note="2 GB of 24 GB are needed"),
    )
    path = write_plan_report(tmp_path / "plan.html", PLAN, PROFILE, PREDICTED, found)
    text = plain(path.read_text()).split("What more would buy")[1].split("Decisions")[0]
    assert "1 GB more device memory would buy the most: 11.6% less time." in text
    assert "as planned 1.81 s – 1.76 s" in text
    assert "1 GB more device memory 1.6 s −11.6% 1.5 s" in text
    assert "8 GB more RAM 1.81 s no change 1.76 s 2 GB of 24 GB are needed" in text
    nothing = plain(write_plan_report(path, PLAN, PROFILE, PREDICTED, found[1:]).read_text())
    assert "None of these would make a noticeable difference" in nothing
    assert "What more would buy" not in plain(write_plan_report(path, PLAN, PROFILE, PREDICTED).read_text())


def test_the_curve_of_batch_sizes(tmp_path: Path) -> None:
    curve = (
        BatchPoint(batch_size=2, samples_per_s=1.5, iteration_s=1.33, device_peak_bytes=200 * MB, reason="slower"),
        BatchPoint(batch_size=4, samples_per_s=2.21, iteration_s=1.81, device_peak_bytes=431 * MB, reason="chosen"),
        BatchPoint(batch_size=64, relaxed_samples_per_s=None, reason="does not fit"),
    )
    html = report(tmp_path, replace(PLAN, batch_curve=curve))
    text = plain(html).split("Batch size")[1].split("Decisions")[0]
    assert "4 2.21 1.81 s 431 MB chosen" in text
    assert "64 – – – does not fit" in text
    assert html.count('class="dot') == 2
    assert html.count('class="dot chosen"') == 1
    assert 'aria-label="Samples per second: 1.5 at 2, 2.21 at 4, nothing at 64"' in html
    assert "Batch size" not in plain(report(tmp_path))


def test_names_lose_the_prefix_that_all_share(tmp_path: Path) -> None:
    blocks = tuple(replace(block, name=f"net.{block.name}") for block in PROFILE.blocks)
    html = report(tmp_path, profile=replace(PROFILE, blocks=blocks))
    assert "net." not in html
    assert "model.layers.0 – 2" in plain(html)


def test_totals_of_bytes_are_those_of_the_plan(tmp_path: Path) -> None:
    traffic = plain(report(tmp_path)).split("Traffic and load")[1].split("Runners-up")[0]
    down = sum(op.bytes for op in PLAN.ops if op.lane == "d2h") / MB
    assert re.search(r"device to host 113 MB 112 MB 226 MB 54 MB (\d+) MB", traffic)[1] == f"{down:.0f}"
    updated = sum(PROFILE.tensors[t].bytes for op in PLAN.ops if op.lane == "host" for t in PLAN.tensors(op)) / MB
    assert f"host update – – – – {updated:.0f} MB" in traffic


def test_runners_up_notes_and_sample_are_escaped(tmp_path: Path) -> None:
    plan = replace(PLAN, notes=("a <b>note</b>",))
    html = report(tmp_path, plan, summary={"sample": "if a < b & c:\n    pass"})
    assert "if a &lt; b &amp; c:\n    pass" in html
    assert "a &lt;b&gt;note&lt;/b&gt;" in html
    assert "stream 1.93 s slower by 6.6 %" in plain(html)
    Page(html)


@pytest.mark.parametrize("factor", [0.5, 10.0])
def test_scale_is_common_unless_the_two_differ_a_lot(tmp_path: Path, factor: float) -> None:
    spans = tuple(replace(s, start=s.start * factor, end=s.end * factor) for s in MEASURED.spans)
    other = replace(MEASURED, spans=spans, iteration_time=MEASURED.iteration_time * factor, memory=())
    text = plain(report(tmp_path, measured=other))
    assert ("same scale" in text) is (factor == 0.5)
    assert ("different time scales" in text) is (factor == 10.0)


def test_plan_report_promises_and_does_not_claim_measurements(tmp_path: Path) -> None:
    path = write_plan_report(tmp_path / "deep" / "plan.html", replace(PLAN, estimated=True), PROFILE, PREDICTED)
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert [a["data-source"] for a in page.all("figure")] == ["simulated"]
    assert "estimated from the hardware's description" in plain(html)
    assert "Measured" not in plain(html.split("</style>")[1].split("<h2>Settings")[0])


def test_eighty_blocks_are_small(tmp_path: Path) -> None:
    profile = make_profile(layers=80, tensors_per_layer=12)
    plan = make_plan(profile)
    predicted, measured = make_trace(plan), make_trace(plan, source="measured", noise=0.3)
    html = report(tmp_path, plan, profile, predicted=predicted, measured=measured)
    assert len(html.encode()) < 1_000_000
    assert html.count("<rect") <= 2 * charts.MAX_BARS


def test_scattered_spans_are_merged_until_they_fit() -> None:
    op = next(op for op in PLAN.ops if op.kind == "prefetch")
    spans = tuple(
        Span(op=op.id, lane="h2d", label="", start=i * 1e-3, end=i * 1e-3 + 5e-4) for i in range(3 * charts.MAX_BARS)
    )
    drawn = charts.bars(replace(PREDICTED, spans=spans, iteration_time=6.0), PLAN)
    assert len(drawn) <= charts.MAX_BARS
    assert sum(bar.busy for bar in drawn) == pytest.approx(len(spans) * 5e-4)
