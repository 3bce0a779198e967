"""Makes the numbers in README.md and docs/ from results/*.json, and tables of limits and states from the package.

    python -m scripts.tables            write the blocks between marks such as <!-- numbers --> and <!-- /numbers -->
    python -m scripts.tables --check    exit with 1 if they are not what the results say

Every table names the script that made its figures, the machine, the date and the commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lt_offload import limits
from lt_offload.units import format_bytes, format_seconds
from scripts.agreement import tables as agreement_tables
from scripts.bench.contenders import tables as contender_tables
from scripts.breadth import tables as breadth_tables
from scripts.common import ROOT
from scripts.docs import curves, figures, gpu_runs, several, states
from scripts.hf import tables as trainer_tables
from scripts.planning import shown, worst
from scripts.simulated import clipping, kernels, large_updates, near_floor

CURVE = "pictures/bench-curve.svg"
"""Where the drawing is, seen from docs/."""
_COMPARED = ("attack", breadth_tables.NAME, "gpu-mutants", "mutants", "optimizers", "states", "processes")
NO_TABLES = (
    kernels.NAME,
    breadth_tables.NAME,
    "papers",
    "quality",
    "recipes",
    "bench-cards",
    "bench-links",
    *_COMPARED,
)
"""Results with a place of their own."""

Result = dict[str, Any]
Rows = list[list[str]]


def compare(results: Sequence[Result]) -> str:
    """One row per recipe: same numbers, at which cost, in how much memory."""
    rows = []
    for result in results:
        settings, figures = result["settings"], result["figures"]
        difference = figures["difference"]
        rows.append(
            [
                f"`{settings['recipe']}`",
                str(settings["steps"]),
                _exact(difference["loss"]),
                _exact(difference["weights"]),
                _exact(difference["optimizer"]),
                f"{figures['time_ratio']:.2f}",
                format_bytes(figures["stock"]["device_peak_bytes"]),
                format_bytes(figures["offmate"]["device_peak_bytes"]),
            ]
        )
    head = ["recipe", "steps", "Δ loss", "Δ weights", "Δ optimizer", "time ratio", "device peak, plain", "with offmate"]
    return _section("Same numbers as plain Lightning", "scripts.compare RECIPE", results, head, rows)


def bench_emulated(results: Sequence[Result]) -> str:
    """Ratios against plain Lightning, and what ran beside computations."""
    rows = [
        [
            f"{result['settings']['model']}, {case['name']}",
            format_seconds(case["step_s"]),
            f"{case['ratio']:.2f}",
            f"{case['goal']:.2f}" if case.get("goal") else "",
            *(_beside(case.get("lanes"), lane) for lane in ("h2d", "d2h", "host")),
            format_bytes(case["device_peak_bytes"]),
        ]
        for result in results
        for case in result["figures"]["cases"]
    ]
    head = ["case", "step time", "against plain", "goal", *OVERLAPPED, "device peak"]
    return _section("Cost on the emulated device", "scripts.bench.emulated", results, head, rows)


def bench_predictions(results: Sequence[Result]) -> str:
    """What plans said beside what was measured, the worst first."""
    cases = [case for result in results for case in result["figures"]["cases"]]
    rows = [
        [
            f"{case['name']}, {case['shape'][0]} x {case['shape'][1]}, {format_bytes(case['budget_bytes'])}",
            format_seconds(case["step_s"]),
            f"{case['first_error']:+.0%}",
            str(case["corrections"]),
            f"{case['last_error']:+.1%}",
            f"{case['goal']:.0%}",
        ]
        for case in sorted(cases, key=lambda case: -abs(case["last_error"]))
    ]
    head = ["model, batch, budget", "measured", "predicted at first", "corrections", "predicted then", "goal"]
    return _section(
        "Predicted and measured iterations, emulated device",
        "scripts.bench.emulated --predictions",
        results,
        head,
        rows,
    )


def bench_clipping(results: Sequence[Result]) -> str:
    """What clipping by norm costs."""
    cases = [case for result in results for case in result["figures"]["cases"]]
    rows = [
        [
            str(case["window"]),
            format_seconds(case["step_s"]),
            f"{case['clipping']:.3f}",
            f"{case['clipping_worst']:.3f}",
            f"{case['goal']:.2f}",
            f"{case['plain_clipping']:.3f}",
            f"{case['step_s'] / case['plain_step_s']:.2f}",
        ]
        for case in sorted(cases, key=lambda case: case["goal"] - case["clipping"])
    ]
    head = [
        "micro-batches per update",
        "update, with clipping",
        "against without",
        "worst round",
        "goal",
        "the same of plain",
        "against plain with clipping",
    ]
    return _section("Clipping by norm", "scripts.bench.emulated --clipping", results, head, rows)


def bench_orders(results: Sequence[Result]) -> str:
    """Both orders of accumulation, weights travelling."""
    rows = []
    for result in results:
        figures, settings = result["figures"], result["settings"]
        slow, fast = figures["cases"]
        rows.append(
            [
                f"{settings['micro_batches']}, {format_bytes(settings['link_bytes_per_s'])}/s",
                format_seconds(slow["update_s"]),
                format_seconds(fast["update_s"]),
                f"{figures['ratio']:.2f}",
                f"{figures['worst_ratio']:.2f}",
                f"{figures['goal']:.2f}",
                format_bytes(slow["device_peak_bytes"]),
                format_bytes(fast["device_peak_bytes"]),
            ]
        )
    head = [
        "micro-batches, link",
        "one after the other",
        "layer by layer",
        "times as fast",
        "worst round",
        "goal",
        "device memory",
        "layer by layer",
    ]
    return _section("Orders of accumulation", "scripts.bench.emulated --orders", results, head, rows)


OVERLAPPED = ("copies in beside computations", "copies out", "host updates")


def _beside(lanes: dict[str, Any] | None, lane: str) -> str:
    share = (lanes or {}).get(lane, {}).get("beside_compute")
    return "" if share is None else f"{share:.0%}"


def bench_launch(results: Sequence[Result]) -> str:
    """What the engine costs the launching thread."""
    rows = [
        [
            f"{plan['name']}, {result['figures']['blocks']} blocks",
            format_seconds(plan["own_per_block_step_s"]),
            format_seconds(plan["phases_s"].get("update", 0.0)),
            format_seconds(plan["plain_update_s"] / (2 * result["figures"]["blocks"])),
            format_seconds(plan["thread_per_block_step_s"]),
            format_seconds(plan["per_block_step_s"]),
            format_seconds(result["figures"]["goal_s"]),
        ]
        for result in results
        for plan in result["figures"]["plans"]
    ]
    head = ["plan", "engine's own", "of it updates on the device", "plain loop's updates"]
    head += ["against plain, launching thread", "against plain, by the clock", "goal"]
    return _section("Launch cost per block and step", "scripts.bench.launch", results, head, rows)


def guard(results: Sequence[Result]) -> str:
    """What it costs that users' code sees complete weights."""
    shown = {
        "an operation outside the blocks, plain loop": "operation_plain_us",
        "the same with the engine": "operation_us",
        "reading a weight that is complete": "weight_us",
        "leaving and entering the guard for a block": "block_us",
        "beginning and ending an iteration": "borders_us",
        "stand-ins for all gradients, put and dropped": "gradients_us",
    }
    rows = []
    for result in results:
        figures = result["figures"]
        for name, key in shown.items():
            rows.append([name, *(format_seconds(figures[key + worst] / 1e6) for worst in ("", "_worst"))])
        ratios = (f"{figures['iteration_ratio' + worst]:.2f}" for worst in ("", "_worst"))
        blocks, weights = (int(figures[key]) for key in ("blocks", "weights"))
        rows.append([f"an iteration ({blocks} blocks, {weights} weights) against the same without", *ratios])
    return _section(
        "Users' code around the engine", "scripts.bench.guard", results, ["what", "median", "worst round"], rows
    )


def bench_update(results: Sequence[Result]) -> str:
    """How fast the host updates, beside other kernels and the memory's speed."""
    rows = [
        [
            case["name"],
            case["scheme"],
            str(case["threads"]),
            f"{case['bytes_per_s'] / 1e9:.1f} GB/s",
            f"{case['weights_per_s'] / 1e9:.2f}",
            "" if case["of_memory"] is None else f"{case['of_memory']:.0%}",
            "" if case["of_deepspeed"] is None else f"{case['of_deepspeed']:.2f}",
        ]
        for result in results
        for case in result["figures"]["cases"]
        if case["threads"] == max(other["threads"] for other in result["figures"]["cases"])
    ]
    head = [
        "update on the host",
        "precision",
        "threads",
        "memory traffic",
        "1e9 weights per second",
        "of the memory's speed",
        "against DeepSpeed",
    ]
    return _section("AdamW on the host", "scripts.bench.update --deepspeed FOLDER", results, head, rows)


def bench_packing(results: Sequence[Result]) -> str:
    """How much of the arena no step needs, over all plans of a model."""
    rows: Rows = []
    for result in results:
        cases = [case for case in result["figures"]["cases"] if "waste" in case]
        for model in dict.fromkeys((case["model"], case["dtype"]) for case in cases):
            of_model = [case for case in cases if (case["model"], case["dtype"]) == model]
            wastes = [case["waste"] for case in of_model]
            moved = sum(case["tensors"] for case in of_model) / max(1, sum(case["transfers"] for case in of_model))
            within = sum(waste <= PACKING_GOAL for waste in wastes)
            rows.append(
                [
                    ", ".join(model),
                    str(len(of_model)),
                    f"{statistics.median(wastes):.1%}",
                    f"{max(wastes):.1%}",
                    f"{within} of {len(wastes)}",
                    f"{moved:.1f}",
                ]
            )
    head = ["model", "plans", "waste, median", "largest", f"at most {PACKING_GOAL:.0%}", "tensors per copy"]
    return _section("The arena's packing", "scripts.bench.packing", results, head, rows)


PACKING_GOAL = 0.03


def smallest_budget(results: Sequence[Result]) -> str:
    """The smallest budget that runs, beside the planner's own floor."""
    rows = [
        [
            f"`{result['settings']['recipe']}`",
            format_bytes(result["figures"]["runs_bytes"]),
            format_bytes(result["figures"]["floor_bytes"]),
            format_bytes(result["figures"]["model_bytes"]),
            f"{result['figures']['runs_bytes'] / result['figures']['model_bytes']:.0%}",
        ]
        for result in results
    ]
    head = ["recipe", "smallest that runs", "planner's floor", "weights, gradients, states", "share"]
    return _section("Smallest budget", "scripts.smallest_budget RECIPE", results, head, rows)


_PLANNED = ("planned in", "processor time")


def _planned(case: dict[str, Any]) -> tuple[str, str]:
    """Return the time of a plan by the clock, which depends on what else runs, and what it took of the processor."""
    worked = case.get("plan_cpu_s")  # older results do not say
    return format_seconds(case["plan_s"]), format_seconds(worked) if worked else ""


def bench_planner(results: Sequence[Result]) -> str:
    """Planning time and quality over the depth of the model."""
    rows = [
        [
            f"{result['settings']['config']}, {case['layers']} layers",
            format_bytes(case["model_bytes"]),
            format_bytes(result["settings"]["memory_bytes"]),
            *_planned(case),
            format_seconds(case["goal_s"]) if case["goal_s"] else "",
            shown(case["gap"]),
            f"{case['iteration_s'] / case['finer_iteration_s'] - 1:+.1%}" if "finer_iteration_s" in case else "",
            f"{case['iteration_s'] / case['no_offload_s']:.2f}",
        ]
        for result in results
        for case in result["figures"]["cases"]
    ]
    head = ["model", "weights, gradients, states", "budget", *_PLANNED, "goal", "gap to bound"]
    head += ["against ten times as long", "against no offload"]
    return _section("Planning time", "scripts.bench.planner", results, head, rows)


def bench_gaps(results: Sequence[Result]) -> str:
    """How near plans come to the lower bound, the worst first."""
    cases = [case for result in results for case in result["figures"]["cases"]]
    rows = [
        [
            case["name"],
            format_bytes(case["budget_bytes"]),
            format_bytes(case["host_peak_bytes"]),
            format_seconds(case["iteration_s"]),
            format_seconds(case["goal_s"]) if case["goal_s"] else "",
            shown(case["gap"]),
            f"{case['iteration_s'] / case['no_offload_s']:.2f}",
            *_planned(case),
        ]
        for case in sorted(cases, key=lambda case: -worst(case["gap"]))
    ]
    head = ["model", "budget", "RAM", "iteration, simulated", "goal", "gap to bound", "against no offload", *_PLANNED]
    return _section("Gaps to the lower bound", "scripts.bench.planner --gaps", results, head, rows)


def bench_batch(results: Sequence[Result]) -> str:
    """What choosing the batch size costs, and what it finds."""
    rows = [
        [
            f"Llama-2-7B, {case['layers']} layers",
            format_bytes(result["settings"]["memory_bytes"]),
            str(case["batch_size"]),
            f"{case['samples_per_s']:.3g}",
            format_seconds(case["choice_s"]),
            f"{case['plans']:.1f}",
            f"{case['goal']:g}",
        ]
        for result in results
        for case in result["figures"]["cases"]
    ]
    head = ["model", "budget", "batch size", "samples/s, simulated", "chosen in", "plans' time", "goal"]
    return _section("Choosing the batch size", "scripts.bench.batch", results, head, rows)


def bench(results: Sequence[Result]) -> str:
    """What this package and others reach in the same memory, per suite; only what ran on a GPU is shown."""
    parts = []
    for result in results:
        suite = result["settings"]["suite"]
        if result["settings"]["device"] != "cuda":
            continue
        command, lines = f"scripts.bench.suite --suite {suite}", contender_tables.rows(result)
        parts.append(_section(contender_tables.TITLES[suite], command, [result], contender_tables.HEAD, lines))
        if suite == "curve":
            parts.append(f"![{contender_tables.TITLES[suite]}]({CURVE})")
    return "\n\n".join(parts)


def bench_checkpoints(results: Sequence[Result]) -> str:
    """How long a checkpoint keeps training waiting."""
    words = {"now": "training waits", "later": "training goes on"}
    rows = [
        [
            words[case["name"]],
            format_bytes(result["figures"]["bytes"]),
            format_seconds(result["figures"]["step_s"]),
            format_seconds(case["flush_s"]),
            format_seconds(case["call_s"]),
            f"{case['call_of_a_step']:.2f}",
            f"{case['of_a_step']:+.2f}",
            f"{case['goal']:.2f}" if case["goal"] else "",
        ]
        for result in results
        for case in result["figures"]["cases"]
    ]
    head = ["while it is written", "file", "step", "flush", "call", "of a step", "with the next steps", "goal"]
    return _section("Checkpoints", "scripts.bench.emulated --checkpoints", results, head, rows)


def bench_load(results: Sequence[Result]) -> str:
    """Loading a model beside reading its files."""
    rows = [
        [
            f"{format_bytes(figures['file_bytes'])} in {result['settings']['files']} files",
            "memory" if result["settings"]["warm"] else "disk",
            *(format_seconds(statistics.median(figures[name])) for name in ("read_s", "keep_s", "load_s")),
            f"{figures['ratio']:.0%}",
            f"{figures['ratio_of_keeping']:.0%}",
            f"{figures['goal']:.0%}",
            f"{figures['copies']:.2f}",
        ]
        for result in results
        for figures in [result["figures"]]
    ]
    speeds = ["read", "read into new memory", "loaded", "of reading", "of reading into new memory", "goal"]
    head = ["bfloat16 model", "from", *speeds, "copies in memory"]
    return _section("Loading weights", "scripts.startup.load", results, head, rows)


def bench_start(results: Sequence[Result]) -> str:
    """From start to the end of the first step."""
    rows = [
        [
            f"`{result['settings']['recipe']}`",
            *(format_seconds(figures[name]) for name in ("plain_s", "first_step_s")),
            f"{figures['ratio']:.2f}",
            f"{figures['goal']:.2f}",
        ]
        for result in results
        for figures in [result["figures"]]
    ]
    head = ["recipe", "without the strategy", "with it", "ratio", "goal"]
    return _section("From start to the end of the first step", "scripts.startup.start", results, head, rows)


def bench_data(results: Sequence[Result]) -> str:
    """Reading, tokenising and packing beside TRL, in turns."""
    rows = [
        [
            f"{name}, {result['settings']['rows']} rows",
            format_seconds(case["ours_s"]),
            f"{case['ratio']:.2f}",
            "1.00",
            *(f"{tokens / 1e6:.2f} M" for tokens in (case["tokens"], case["trl_tokens"])),
            " of ".join(map(str, case["batches_with_the_same_bins"])),
        ]
        for result in results
        for name, case in result["figures"]["cases"].items()
    ]
    head = ["data", "tokenised and packed in", "against TRL", "goal", "tokens kept", "by TRL", "batches packed alike"]
    return _section("Data beside TRL", "scripts.data.bench", results, head, rows)


TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "compare": compare,
    "bench-emulated": bench_emulated,
    "bench-predictions": bench_predictions,
    "bench-clipping": bench_clipping,
    "bench-clipping-cards": lambda results: clipping.tables(_section, results),
    "bench-checkpoints": bench_checkpoints,
    "bench-orders": bench_orders,
    "bench-launch": bench_launch,
    "guard": guard,
    "bench-update": lambda results: "\n\n".join(map(bench_update, figures.by_processor(results))),
    "smallest-budget": smallest_budget,
    "bench-planner": bench_planner,
    "bench-gaps": bench_gaps,
    "bench-near-floor": lambda results: near_floor.table(_section, results),
    "bench-batch": bench_batch,
    "bench-packing": bench_packing,
    "bench-data": bench_data,
    "hf": lambda results: trainer_tables.sections(_section, results),
    "agreement": lambda results: agreement_tables.sections(_section, results),
    "bench-load": bench_load,
    "large-updates": lambda results: large_updates.table(_section, results),
    "bench-start": bench_start,
    "bench-imports": lambda results: trainer_tables.imports(_section, results),
    "bench": bench,
}


def read(folder: Path) -> dict[str, list[Result]]:
    """Return the result files in ``folder`` by their kind."""
    results: dict[str, list[Result]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        kind = result.get("kind")
        if kind not in (*TABLES, *figures.BLOCKS, *NO_TABLES):
            raise SystemExit(f"{path}: kind {kind!r} is not one of {', '.join(TABLES)}")
        results.setdefault(kind, []).append(result)
    return results


def render(folder: Path) -> str:
    """Return the block of tables for the result files in ``folder``."""
    results = read(folder)
    return "\n\n".join(filter(None, (table(results[kind]) for kind, table in TABLES.items() if kind in results)))


def pages(root: Path) -> dict[Path, str]:
    """Return what the files below ``root`` should hold that have blocks of figures or are drawings."""
    results = read(root / "results")
    blocks = {
        "README.md": {"numbers": figures.headline(results)},
        "docs/architecture.md": {"states": states.markdown()},
        "docs/benchmarks.md": {"numbers": render(root / "results")},
        "docs/faq.md": {"home": figures.home(results.get("recipes", []))},
        "docs/gpu.md": gpu_runs.blocks(root) | {"mutants": figures.mutants(results.get("gpu-mutants", []))},
        "docs/limits.md": {
            "limits": limits.markdown(),
            "optimizers": figures.optimizers(results.get("optimizers", [])),
        },
        "docs/models.md": {
            "breadth": breadth_tables.table(_section, results.get(breadth_tables.NAME, [])),
            "kernels": kernels.table(_section, results.get(kernels.NAME, [])),
        },
        "docs/quality.md": {"quality": curves.section(_section, results.get("quality", []))},
        "docs/several-gpus.md": {
            "processes": agreement_tables.processes(_section, results.get("processes", [])),
            **several.blocks(_section, results),
        },
        "docs/will-it-fit.md": {kind: block(results.get(kind, [])) for kind, block in figures.BLOCKS.items()},
    }
    files = {}
    for name, marked in blocks.items():
        text = (root / name).read_text(encoding="utf-8")
        for mark, block in marked.items():
            text = insert(text, mark, block, name)
        files[root / name] = text
    for result in results.get("quality", []):
        files[root / "docs" / curves.name(result)] = curves.draw(result)
    for result in results.get("bench", []):
        if result["settings"]["suite"] == "curve":
            files[root / "docs" / CURVE] = contender_tables.curve(result)
    return files


def insert(text: str, mark: str, block: str, name: str) -> str:
    """Return ``text`` of the file ``name`` with ``block`` between the lines of ``mark``."""
    opening, closing = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, begin, rest = text.partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end:
        raise SystemExit(f"{name} has no lines {opening} and {closing}, in this order")
    return f"{before}{opening}\n\n{block}\n\n{closing}{after}"


def _section(title: str, command: str, results: Sequence[Result], head: list[str], rows: Rows) -> str:
    return f"**{title}** (`python -m {command}`; {figures.origins(results)})\n\n{_table(head, rows)}"


def _table(head: list[str], rows: Rows) -> str:
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "|".join([" --- ", *[" ---: "] * (len(head) - 1)]) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join(lines)


def _exact(difference: float | None) -> str:
    if difference is None:
        return "not comparable"
    return "0" if difference == 0 else f"{difference:.1e}"


def main() -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md, docs/ and results/")
    options = parser.parse_args()
    files = pages(options.root)
    if options.check:
        stale = [path.name for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
        for name in stale:
            print(f"{name} is out of date; run python -m scripts.tables", file=sys.stderr)
        return int(bool(stale))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
