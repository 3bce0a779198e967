"""The tables of several processes in docs/gpu.md."""

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


def test_machines_stand_in_their_order_with_one_host_copy_each() -> None:
    results = [machine(1, "slow"), machine(0, "fast")]
    first, alone, two, slow, *_ = several.cards(section, results).splitlines()
    assert first == "Cards, simulated (scripts.cards, 2)"
    assert alone == "fast | 1 | 4 s | 100 | 1.00 | computations | 3 GB"
    assert two == "fast | 2 | 2.5 s | 160 | 1.60 | computations | 3 GB"
    assert slow.startswith("slow | 1 | ")
    _, fast, slow = several.machines(section, results).splitlines()
    assert fast == "fast | 10 Gbit/s | 1.6 | 3.2 | 6.4"
    assert slow.startswith("slow | ")


def test_processes_are_counted_by_what_they_are_equal_to() -> None:
    rows = [
        {"processes": 2, "one": 0.0, "stock": 0.0},
        {"processes": 4, "one": 0.0, "stock": 2.5e-7},
        {"processes": 1, "one": 1.0},
    ]
    made = {"machine": {"gpu": "GPU X"}, "versions": {"torch": "2.11"}, "date": "2026-01-01", "commit": "abc1234"}
    text = several.processes([made | {"figures": {"rows": rows}}])
    assert text.startswith(
        "2 of 3 cases are equal to one process that accumulates as many batches. With two processes 1 of 1"
    )
    assert "with more, 0 of 1, and the largest difference is 2.5e-07" in text
    assert several.processes([]) == several.cards(section, []) == ""
