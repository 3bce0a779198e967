"""The figures at the head of the README, and the tables of what fits into which card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lt_offload.units import format_bytes, format_seconds
from scripts.common import when
from scripts.planning import shown, worst

Result = dict[str, Any]
Results = Mapping[str, Sequence[Result]]


def origins(results: Sequence[Result]) -> str:
    """Return on which machines, on which days and at which commits results were made, each machine once."""
    days: dict[str, set[str]] = {}
    for result in results:
        days.setdefault(_machine(result), set()).add(when(result))
    return "; ".join(f"{where}, {', '.join(sorted(dates))}" for where, dates in days.items())


def _machine(result: Result) -> str:
    machine = result["machine"]
    where = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
    return f"{where}, torch {result['versions']['torch']}"


def headline(results: Results) -> str:
    """Return the figures that matter most, the worst beside the best, with where they were made."""
    rows = [row for make in (_same, _memory, _time, _predicted, _simulated, _bound) for row in make(results)]
    used = [result for kind in ("compare", *_RANGES) for result in results.get(kind, [])]
    table = ["| | best | worst | made by |", "|---|---:|---:|---|"]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*table, "", f"Made on {origins(used)}."])


def _cases(results: Results, kind: str) -> list[dict[str, Any]]:
    return [case for result in results.get(kind, []) for case in result["figures"]["cases"]]


def _same(results: Results) -> list[list[str]]:
    found = [
        value
        for result in results.get("compare", [])
        for value in result["figures"]["difference"].values()
        if value is not None
    ]
    what = "loss, weights and optimizer states: difference from plain Lightning"
    return [[what, f"{min(found):g}", f"{max(found):g}", "`python -m scripts.compare quickstart`"]] if found else []


def _memory(results: Results) -> list[list[str]]:
    found = [result["figures"] for result in results.get("compare", [])]
    shares = [one["offmate"]["device_peak_bytes"] / one["stock"]["device_peak_bytes"] for one in found]
    what = "device memory, as a share of plain training's"
    return [_range(what, shares, "{:.0%}", "the same")] if found else []


def _time(results: Results) -> list[list[str]]:
    ratios = [case["ratio"] for case in _cases(results, "bench-emulated") if case["name"] != "plain"]
    ratios += [case["step_s"] / case["plain_step_s"] for case in _cases(results, "bench-clipping")]
    ratios += [result["figures"]["time_ratio"] for result in results.get("compare", [])]
    what = "time of an update over plain Lightning's, emulated device"
    command = "and `python -m scripts.bench.emulated`, with `--clipping`"
    return [_range(what, ratios, "{:.2f}", command)] if ratios else []


def _predicted(results: Results) -> list[list[str]]:
    errors = sorted((case["last_error"] for case in _cases(results, "bench-predictions")), key=abs)
    what = "predicted time of a step against the measured one, once corrected"
    command = "`python -m scripts.bench.emulated --predictions`"
    return [[what, f"{errors[0]:+.1%}", f"{errors[-1]:+.1%}", command]] if errors else []


def _simulated(results: Results) -> list[list[str]]:
    cases = [*_planned(results), *_cases(results, "fits")]
    ratios = [case["iteration_s"] / case["no_offload_s"] for case in cases if case["iteration_s"] is not None]
    what = "**simulated** iteration on desktop cards of 6 to 24 GB, over that with enough memory"
    command = "`python -m scripts.recipes.headers`, `scripts.bench.planner --gaps`, `scripts.docs.fits`"
    return [_range(what, ratios, "{:.2f}", command)] if ratios else []


def _bound(results: Results) -> list[list[str]]:
    gaps = sorted((case.get("gap") for case in _planned(results)), key=worst)
    what = "**simulated** iteration above the lower bound"
    return [[what, shown(gaps[0]), shown(gaps[-1]), "the first two of them"]] if gaps else []


def _planned(results: Results) -> list[dict[str, Any]]:
    """Return the cases of plans with their bounds: where memory is short, and the recipes on their own cards."""
    of_recipes = [figure for result in results.get("recipes", []) for figure in result["figures"].values()]
    return [*_cases(results, "bench-gaps"), *of_recipes]


def _range(what: str, values: Sequence[float], form: str, command: str) -> list[str]:
    return [what, form.format(min(values)), form.format(max(values)), command]


_RANGES = ("bench-emulated", "bench-clipping", "bench-predictions", "bench-gaps", "recipes", "fits")


_SHOWN = ("llama3-8b",)
"""Models of which the table of cards is shown; results/ has more."""


def fits(results: Sequence[Result]) -> str:
    """Return one table per way to train: cards in columns, models in rows."""
    if not results:
        return ""
    settings = results[0]["settings"]
    cards = [card["name"] for card in settings["cards"]]
    head = ["model", *(f"{card['bytes'] / 2**30:.0f} GiB, {card['name']}" for card in settings["cards"])]
    parts = []
    for way in settings["ways"][1:]:  # of float32, which costs least beside enough memory, the README has the range
        rows = ["| " + " | ".join(head) + " |", "|---|" + "---|" * len(cards)]
        for result in (one for one in results if one["settings"]["model"] in _SHOWN):
            cases = {case["card"]: _cell(case) for case in result["figures"]["cases"] if case["way"] == way}
            rows.append(
                "| " + " | ".join([f"`{result['settings']['model']}`", *(cases[card] for card in cards)]) + " |"
            )
        parts += [f"**{way}**", "\n".join(rows)]
    made = origins(results)
    size, length = settings["batch"]
    return "\n\n".join([*parts, f"**Simulated**, {size} x {length} tokens, by `python -m scripts.docs.fits` ({made})."])


def _cell(case: dict[str, Any]) -> str:
    if case["iteration_s"] is None:
        return "does not fit" if not case["reason"] else f"no: {case['reason']}"
    ratio = case["iteration_s"] / case["no_offload_s"]
    return f"{format_seconds(case['iteration_s'])} ({ratio:.2f}), {format_bytes(case['host_peak_bytes'])}"


def at_home(results: Sequence[Result]) -> str:
    """Return how models are trained with 12 GB and 32 GB of RAM, and how fast by each of the other ways."""
    if not results:
        return ""
    rows = ["| model | proposed | tokens/s | RAM | others, tokens/s |", "|---|---|---:|---:|---|"]
    for row in (row for result in results for row in result["figures"]["rows"]):
        fitting = [way for way in row["ways"] if "iteration_s" in way]
        chosen = next((way for way in fitting if way["way"] == row["chosen"]), None)
        if chosen is None:
            rows.append(f"| `{row['model']}` | no | | | |")
            continue
        others = ", ".join(f"{_SHORT[way['way']]} {way['tokens_per_s']:.0f}" for way in fitting if way is not chosen)
        cells = [f"`{row['model']}`", _SHORT[chosen["way"]], f"{chosen['tokens_per_s']:.0f}"]
        rows.append("| " + " | ".join([*cells, format_bytes(chosen["host_peak_bytes"]), others]) + " |")
    settings = results[0]["settings"]
    how = f"`--memory {settings['memory']} --hardware {settings['hardware']}`, {settings['batch']} x 1024 tokens"
    made = f"`python -m scripts.docs.at_home` ({origins(results)})"
    return "\n".join([*rows, "", f"**Simulated**, {how}, by {made}."])


_SHORT = {
    "all weights in fp32": "full fp32",
    "all weights in bf16, fp32 masters": "full bf16",
    "all weights in bf16, rounded at random": "rounded",
    "all weights in bf16, AdamW in 8 bits": "full 8-bit",
    "LoRA on bf16 weights": "LoRA",
    "LoRA on 4-bit weights (QLoRA)": "QLoRA",
}
"""Methods of ``lt-finetune new`` in a cell."""


def large(results: Sequence[Result]) -> str:
    """Return the least RAM that is enough beside each card, and the speed with it, for models larger than cards."""
    if not results:
        return ""
    settings, made = results[0]["settings"], origins(results)
    cards = [f"{memory.replace('GB', ' GB')}, {card}" for card, memory in settings["memory"].items()]
    rows = ["| | " + " | ".join(cards) + " |", "|---" * (len(cards) + 1) + "|"]
    for row in results[0]["figures"]["rows"]:
        cells = (_with_ram(row["cells"][card]) for card in settings["memory"])
        rows.append(f"| {row['title']} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", f"**Simulated**, 16 x 512 tokens, by `python -m scripts.docs.large` ({made})."])


def _with_ram(cell: dict[str, Any]) -> str:
    if "reason" in cell:
        return f"no: {cell['reason']}"
    return f"{cell['ram'].replace('GB', ' GB')}: {cell['tokens_per_s']:.0f}"


def longest(results: Sequence[Result]) -> str:
    """Return the longest sequences by card, without tiles of tokens and with them."""
    if not results:
        return ""
    settings, rows_of = results[0]["settings"], results[0]["figures"]["longest"]
    cards = [*rows_of[0]["longest"]]
    rows = ["| | " + " | ".join(card.replace("GB", " GB") for card in cards) + " |", "|---" * (len(cards) + 1) + "|"]
    for way in dict.fromkeys(row["way"] for row in rows_of):
        pair = [row["longest"] for row in rows_of if row["way"] == way]
        cells = [" -> ".join(f"{each[card] // 1024}k" for each in pair) for card in cards]
        rows.append(f"| {way} | {' | '.join(cells)} |")
    how = (
        f"one sequence, {settings['host_memory'].replace('GB', ' GB')} of RAM, `tile_tokens={settings['tile_tokens']}`"
    )
    made = f"`python -m scripts.docs.longest` ({origins(results)})"
    return "\n".join([*rows, "", f"**Simulated**, {how}, k = 1,024 tokens, by {made}."])


BLOCKS: dict[str, Callable[[Sequence[Result]], str]] = {
    "at-home": at_home,
    "large": large,
    "longest": longest,
    "fits": fits,
}
"""Blocks of docs/will-it-fit.md by the kind of result they show."""


PEAK, TIME = "test_the_peak_is_within_the_budget", "test_the_time_is_what_was_predicted"


def budgets(results: Sequence[Result]) -> str:
    """Return the table of budgets on a real GPU: what was planned beside what its driver showed."""
    rows = [
        "| budget | planned peak | peak, by the driver | planned step | measured step |",
        "|---:|---:|---:|---:|---:|",
    ]
    made: list[dict[str, Any]] = []
    for result in results:
        for part in result["figures"]["parts"]:
            figures = (part.get("figures") or {}) if part["name"] == "memory" else {}
            for test, peak in figures.items():
                if test.startswith(PEAK):
                    seconds = figures[test.replace(PEAK, TIME)]
                    sizes = (format_bytes(peak[key]) for key in ("budget", "predicted", "peak"))
                    times = (format_seconds(seconds[key]) for key in ("predicted_s", "measured_s"))
                    rows.append(f"| {' | '.join((*sizes, *times))} |")
                    made.append(result)
    said = f"160 million parameters in fp32, 4 x 512 tokens ({origins(made)})."
    return "\n".join([*rows, "", said]) if made else ""
