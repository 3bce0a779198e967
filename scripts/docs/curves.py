"""Draws learning curves of two runs that should be one: ``scripts.data.quality``'s results as small SVG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from lt_offload.units import format_bytes, parse_bytes

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 340, 60, 210, 40, 44
STOCK, OURS = "#b9c4cc", "#c8553d"
"""Colours. The line of the stock strategy is broad, that of ``offmate`` lies on it."""

Points = Sequence[tuple[float, float]]


def name(result: Mapping[str, Any]) -> str:
    """Return the file's name below ``docs/``."""
    settings = result["settings"]
    return f"pictures/quality-{settings['data'].partition('_')[0]}-{settings['method']}.svg"


def title(result: Mapping[str, Any]) -> str:
    """Return what is drawn, for people."""
    settings = result["settings"]
    trained = "LoRA" if settings["method"] == "lora" else "all weights"
    return f"SmolLM2-135M on {settings['data']}, {trained}, in {format_bytes(parse_bytes(settings['memory']))}"


def section(table: Callable[..., str], results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of trainings on whole files, made by ``table``, and the learning curve and answers of each."""
    if not results:
        return ""
    rows = []
    for result in results:
        settings, figures = result["settings"], result["figures"]
        run, stock = figures["offmate"], figures["stock"]
        unequal = [what for what, same in figures["equal"].items() if not same]
        rows.append(
            [
                f"`{settings['data']}`",
                settings["method"],
                str(run["steps"]),
                *(f"{run['val_loss'][at][1]:.3f}" for at in (0, -1)),
                f"not in {', '.join(unequal)}" if unequal else "yes",
                f"{run['step_s'] / stock['step_s']:.2f}",
                format_bytes(run["device_peak_bytes"]),
            ]
        )
    losses = ["held-out loss before", "after"]
    head = ["data", "trained", "steps", *losses, "all equal to plain Lightning's", "time ratio", "device peak"]
    parts = [table("SmolLM2-135M trained on whole files", "scripts.data.quality NAME=FILE", results, head, rows)]
    for result in results:
        parts.append(f"![{title(result)}: losses by step]({name(result)})")
        parts.append(answers(result))
    return "\n\n".join(parts)


def answers(result: Mapping[str, Any]) -> str:
    """Return what the model wrote before and after, which both strategies gave alike."""
    run = result["figures"]["offmate"]
    lines = ["| prompt | before | after |", "| --- | --- | --- |"]
    for prompt, after in run["answers"].items():
        cells = map(_cell, (prompt, run["answers_before"].get(prompt, ""), after))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def draw(result: Mapping[str, Any]) -> str:
    """Return training and held-out losses of both strategies over the steps."""
    runs = [result["figures"][name] for name in ("stock", "offmate")]
    every = [point for run in runs for kind in ("train_loss", "val_loss") for point in run[kind]]
    last = max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    margin = 0.06 * (high - low or 1.0)
    low, high = low - margin, high + margin

    def place(point: tuple[float, float]) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / last
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (point[1] - low) / (high - low)
        return f"{x:.1f} {y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title(result))}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title(result))}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        loss = low + share * (high - low)
        y = place((0, loss)).split()[1]
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        x = place((share * last, low)).split()[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{share * last:.0f}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for run, colour, width in zip(runs, (STOCK, OURS), (6, 1.5), strict=True):
        parts.append(_line(run["train_loss"], place, colour, width))
        parts.append(_line(run["val_loss"], place, colour, width, dashes="7 4"))
        parts += [
            '<circle cx="{}" cy="{}" r="{}" fill="{}"/>'.format(*place(point).split(), 2 + width / 2, colour)
            for point in run["val_loss"]
        ]
    key = WIDTH - RIGHT + 16
    legend = [("plain Lightning", STOCK, 6, ""), ("offmate", OURS, 1.5, "")]
    legend += [("held out", "#555555", 1.5, "7 4"), ("training, means", "#555555", 1.5, "")]
    for row, (what, colour, width, dashes) in enumerate(legend):
        y = TOP + 20 + 22 * row
        parts.append(_line([(key, y), (key + 30, y)], lambda point: f"{point[0]} {point[1]}", colour, width, dashes))
        parts.append(f'<text x="{key + 38}" y="{y + 4}">{what}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _line(points: Points, place: Any, colour: str, width: float, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    path = "L".join(place(point) for point in points)
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'
