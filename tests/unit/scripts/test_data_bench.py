"""What the bench of the data side finds out without TRL."""

from __future__ import annotations

from scripts.data import bench


def test_bins_are_compared_batch_by_batch() -> None:
    lengths = [700, 400, 300, 2000] * (bench.TRL_BATCH // 2)
    first = [[bench.LENGTH]] * 250 + [[700, 300]] * 250 + [[400, 400]] * 125
    assert bench.same_bins(lengths, first + first) == [2, 2]
    assert bench.same_bins(lengths, first + [[bench.LENGTH]] * 250 + [[700, 300]] * 250 + [[400], [400]] * 125) == [
        1,
        2,
    ]


def test_tables_for_trl_are_what_is_trained_here() -> None:
    assert bench.table_for_trl("text", [{"text": "ab", "n": 1}]).to_list() == [{"text": "ab"}]
    rows = [{"instruction": "say", "input": "it", "output": "so"}, {"instruction": "say", "output": "so"}]
    prompts = [row["prompt"][0]["content"] for row in bench.table_for_trl("alpaca", rows)]
    assert prompts == ["say\n\nit", "say"]
    assert bench.ratio([1.0, 4.0, 9.0], [2.0, 4.0, 3.0]) == 1.0
