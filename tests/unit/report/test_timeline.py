"""The figure of one iteration: bars where the spans are, a memory curve that hides no peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lt_offload.report.page import MAX_POINTS
from lt_offload.report.timeline import KINDS, bars, iteration, kind_of
from lt_offload.schema.lanes import MACHINE_LANES
from lt_offload.schema.trace import Span, Trace
from tests.support.samples import MB, make_plan, make_profile, make_trace

PLAN = make_plan(make_profile(layers=8, tensors_per_layer=3))
PREDICTED = make_trace(PLAN)
MEASURED = make_trace(PLAN, source="measured", noise=0.1)


def bars_of(figure: Any, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


def test_planned_and_measured_share_the_axis_of_time() -> None:
    figure = iteration({"Predicted": PREDICTED, "Measured": MEASURED})
    said = [note.text for note in figure.layout.annotations]
    peak = "memory 423 MB of 440 MB"
    assert said == ["Predicted 634 ms", peak, "Measured 673 ms", peak]
    axes = [figure.layout[name] for name in ("xaxis", "xaxis2", "xaxis3")]
    assert {axis.matches for axis in axes} == {"x4"}
    lanes = set(bars_of(figure, "forward").y) | set(bars_of(figure, "weights to device").y)
    assert {lane.partition("<br>")[0] for lane in lanes} == {"compute", "copies to device"}
    assert len(figure.layout.yaxis.categoryarray) == len(MACHINE_LANES)


def test_every_kind_of_op_has_a_name_and_each_is_once_in_the_legend() -> None:
    assert {kind_of(span) for span in PREDICTED.spans} <= KINDS.keys() - {"other"}
    shown = [bar.name for bar in iteration({"one": PREDICTED, "two": MEASURED}).data if bar.showlegend is not False]
    assert len(shown) == len(set(shown)) == len({kind_of(span) for span in PREDICTED.spans})
    for label, kind in (
        ("forward 3 again", "forward-again"),
        ("update 4, other rows", "update"),
        ("backward 2, direct", "backward"),
        ("clipping factor", "other"),
    ):
        assert kind_of(Span(op=-1, lane="host", label=label, start=0.0, end=0.1)) == kind


def test_spans_that_a_screen_cannot_tell_apart_are_one_bar() -> None:
    spans = tuple(
        Span(op=0, lane="h2d", label=f"prefetch weight {i // 3}", start=i * 1e-3, end=i * 1e-3 + 8e-4)
        for i in range(30_000)
    )

    def joined(count: int, seconds: float) -> list[Span]:
        return bars(replace(PREDICTED, spans=spans[:count], iteration_time=seconds))

    assert joined(6, 6e-3) == list(spans[:6])
    assert [(bar.label, bar.start, bar.end) for bar in joined(6, 0.5)] == [
        ("prefetch weight 0", 0.0, spans[2].end),
        ("prefetch weight 1", spans[3].start, spans[5].end),
    ]
    drawn = joined(30_000, 30.0)
    assert len(drawn) < 1000
    assert (drawn[0].start, drawn[-1].end) == (0.0, spans[-1].end)
    assert {kind_of(bar) for bar in drawn} == {"prefetch-weight"}


def test_memory_curve_never_hides_a_peak() -> None:
    points = [(i / 10_000, 100) for i in range(10_000)]
    points[5_001] = (0.5001, 380 * MB)
    trace = Trace(
        source="measured",
        iteration_time=1.0,
        device_peak=380 * MB,
        host_peak=0,
        budget_bytes=400 * MB,
        spans=(),
        memory=tuple(points),
    )
    curve = bars_of(iteration({"one": trace}), "device memory")
    assert len(curve.x) <= MAX_POINTS + 2
    assert curve.x[curve.y.index(380 * MB)] == 0.5001
    late = bars_of(iteration({"one": replace(trace, memory=((0.3, 200 * MB),))}), "device memory")
    assert (late.x, late.y) == ((0.0, 0.3, 1.0), (200 * MB,) * 3)
    assert bars_of(iteration({"one": replace(trace, memory=())}), "device memory").x == ()
