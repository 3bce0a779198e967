"""The figure of one iteration: bars where the spans are, a memory curve that hides no peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lt_offload.report import timeline
from lt_offload.schema.trace import Span, Trace
from tests.support.reports.pages import figures
from tests.support.samples import MB, make_plan, make_profile, make_trace

PROFILE = make_profile(layers=8, tensors_per_layer=3)
NAMES = [block.name for block in PROFILE.blocks]
PLAN = make_plan(PROFILE)
PREDICTED = make_trace(PLAN)
MEASURED = make_trace(PLAN, source="measured", noise=0.1)


def drawn(trace: Trace = PREDICTED, plan: Any = PLAN) -> dict[str, Any]:
    html = timeline.iteration(trace, plan, NAMES, trace.iteration_time, caption="one")
    return figures(html)["one"]


def bars_of(figure: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [trace for trace in figure["data"] if trace["name"] == name]
    return found


def test_all_lanes_and_the_budget_are_named() -> None:
    said = [note["text"] for note in drawn()["layout"]["annotations"]]
    for name in ("compute ", "copies to device ", "copies to host ", "updates on host ", "device memory: peak 423 MB"):
        assert any(text.startswith(name) for text in said), name
    assert "budget 440 MB" in said
    assert {"forward", "backward"} <= set(said)


def test_bars_lie_where_the_spans_are() -> None:
    figure = drawn()
    first = min((s for s in PREDICTED.spans if s.label.startswith("backward")), key=lambda s: s.start)
    backward = bars_of(figure, "backward")
    assert backward["base"][0] == pytest.approx(1e3 * first.start)
    assert backward["x"][0] == pytest.approx(1e3 * (first.end - first.start))
    assert backward["hovertext"][0].startswith("backward, block 9 · lm_head · 112 ms from ")
    assert backward["text"][:2] == ["9", "8"]
    assert figure["layout"]["xaxis"]["range"] == [0, pytest.approx(1e3 * PREDICTED.iteration_time)]
    assert figure["layout"]["xaxis"]["ticksuffix"] == " ms"


def test_every_kind_of_op_has_its_colour_and_legend_entry() -> None:
    from importlib.resources import files

    style = files("lt_offload.report").joinpath("report.css").read_text()
    legend = timeline.legend(timeline.bars(PREDICTED, PLAN))
    names = {trace["name"] for trace in drawn()["data"]} - {"device memory"}
    assert names == {
        "forward", "backward", "update", "weights to device", "optimizer state to device", "activations to device",
        "gradients to host", "weights to host", "optimizer state to host", "activations to host",
    }  # fmt: skip
    for kind, name in timeline.KINDS.items():
        assert f"--{timeline.colour(kind)}: " in style
        assert (f'background:var(--{timeline.colour(kind)})"></i>{name}<' in legend) is (name in names)


def test_merging_keeps_the_work_and_the_bytes() -> None:
    drawn = timeline.bars(MEASURED, PLAN)
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
    drawn = timeline.bars(replace(PREDICTED, spans=(inner, *PREDICTED.spans)), PLAN)
    nested = [bar for bar in drawn if bar.nested]
    assert [(bar.kind, bar.ops) for bar in nested] == [("update", 1)]
    assert drawn[-1] is nested[0]


def test_spans_outside_the_plan_are_named_by_their_label() -> None:
    spans = (
        Span(op=-1, lane="h2d", label="prefetch weight 3", start=0.0, end=0.1),
        Span(op=-1, lane="host", label="something else", start=0.0, end=0.1),
    )
    drawn = timeline.bars(replace(PREDICTED, spans=spans), PLAN)
    assert [(bar.kind, bar.block) for bar in drawn] == [("prefetch-weight", None), ("other", None)]


def test_work_beyond_the_iteration_is_drawn_where_it_recurs() -> None:
    op = next(op for op in PLAN.ops if op.kind == "prefetch")
    spans = (
        Span(op=op.id, lane="h2d", label="", start=-0.3, end=-0.1),
        Span(op=op.id, lane="host", label="", start=0.9, end=1.25),
        Span(op=op.id, lane="d2h", label="", start=-0.1, end=0.2),
    )
    trace = replace(PREDICTED, spans=spans, iteration_time=1.0, memory=())
    drawn = {(bar.lane, round(bar.start, 9), round(bar.end, 9)) for bar in timeline.bars(trace, PLAN)}
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
    times, sizes = timeline.columns(trace, 1.0)
    assert max(sizes) == 380 * MB
    assert times[sizes.index(380 * MB)] == pytest.approx(0.5)
    assert timeline.columns(replace(trace, memory=((0.3, 200 * MB),)), 1.0) == ([0.0, 1.0], [200 * MB] * 2)
    assert timeline.columns(replace(trace, memory=()), 1.0) == ([], [])


def test_a_budget_far_above_the_peak_is_told_but_not_drawn() -> None:
    figure = drawn(replace(PREDICTED, budget_bytes=10**12))
    assert not any("budget 1 TB" in note["text"] for note in figure["layout"]["annotations"])
    assert figure["layout"]["yaxis2"]["range"][1] < 10**9


def test_forwards_that_run_again_have_a_colour_of_their_own() -> None:
    op = next(op for op in PLAN.ops if op.kind == "forward" and op.block == 3)
    plan = replace(PLAN, ops=tuple(replace(o, save="input", bytes=2 * MB) if o.id == op.id else o for o in PLAN.ops))
    assert [bar.block for bar in timeline.bars(PREDICTED, plan) if bar.kind == "rerun"] == [3]
    [said] = bars_of(drawn(plan=plan), "forward that runs again")["hovertext"]
    assert said.startswith("forward that runs again, block 3 · model.layers.2")
    assert said.endswith("reads 2 MB in host memory")


def test_scattered_spans_are_merged_until_they_fit() -> None:
    op = next(op for op in PLAN.ops if op.kind == "prefetch")
    spans = tuple(
        Span(op=op.id, lane="h2d", label="", start=i * 1e-3, end=i * 1e-3 + 5e-4) for i in range(3 * timeline.MAX_BARS)
    )
    drawn = timeline.bars(replace(PREDICTED, spans=spans, iteration_time=6.0), PLAN)
    assert len(drawn) <= timeline.MAX_BARS
    assert sum(bar.busy for bar in drawn) == pytest.approx(len(spans) * 5e-4)
