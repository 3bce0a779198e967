"""The tables of docs/several-gpus.md."""

from __future__ import annotations

from typing import Any

from scripts.docs import several


def section(title: str, command: str, results: Any, head: list[str], rows: list[list[str]]) -> str:
    assert all(len(row) == len(head) for row in rows)
    return "\n".join([f"{title} ({command}, {len(results)})", *(" | ".join(row) for row in rows)])


def row(cards: int, *, common: bool, seconds: float, times: float) -> dict[str, Any]:
    busy = {"computations": 2.0, "copies between machines": 0.5}
    found = {"cards": cards, "one_host_copy": common, "iteration_s": seconds, "tokens_per_s": 100 * times}
    found |= {"times_one": times, "busy_s": busy, "limit": "computations", "ram_bytes": 3_000_000_000}
    return found | {"batch": 8, "parts": 1 + common, "window": 2, "least_s": 1.5, "waits_s": 2.75}


def machine(number: int, name: str) -> dict[str, Any]:
    rows = [row(1, common=True, seconds=4.0, times=1.0), row(2, common=True, seconds=2.5, times=1.6)]
    rows.append(row(2, common=False, seconds=3.0, times=1.3))
    several_machines = [
        {"machines": count, "network": "10 Gbit/s"} | row(2, common=True, seconds=2.5 + count, times=1.6 * count)
        for count in (1, 2, 4)
    ]
    settings = {"number": number, "machine": name}
    return {"settings": settings, "figures": {"cards": rows, "machines": several_machines}}


def test_machines_stand_in_their_order_with_both_ways_side_by_side() -> None:
    found = several.blocks(section, {"bench-cards": [machine(1, "slow"), machine(0, "fast")]})
    assert found["links"] == ""
    first, alone, two, *_ = found["cards"].splitlines()
    assert first == "Cards, simulated (scripts.cards, 2)"
    assert alone.split(" | ")[:5] == ["fast", "1", "", "4 s", "1.5 s"]
    assert two.split(" | ")[5] == "2.75 s"
    assert two.split(" | ")[:4] == ["fast", "2", "3 s", "2.5 s"]
    assert "1.60 | computations, 2 s | 2 x 8 in 2 parts | 3 GB | 3 GB" in two
    _, fast, slow = found["machines"].splitlines()
    assert fast == "fast | 10 Gbit/s | 1.6 | 3.2 | 6.4 | 3.5 s to 6.5 s | 500 ms to 500 ms"
    assert slow.startswith("slow | ")


def test_links_are_compared_with_the_goal() -> None:
    figures = {"rows": [], "goal": 1.6}
    figures["rows"] = [
        {"processes": count, "step_s": 2.0, "h2d_s": 1.5, "d2h_s": 1.0, "tokens_per_s": rate}
        for count, rate in ((1, 50.0), (2, 85.0))
    ]
    text = several.blocks(section, {"bench-links": [{"figures": figures}]})["links"]
    assert text.splitlines()[1:] == [
        "1 | 2 s | 1.5 s | 1 s | 50 | 1.00 | ",
        "2 | 2 s | 1.5 s | 1 s | 85 | 1.70 | 1.60",
    ]
