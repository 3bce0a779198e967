"""What offloading costs on the emulated device, as ratios against plain Lightning in one run.

    python -m scripts.bench.emulated [--small | --experts] [--steps N] [--rounds N] [--links 1GB,4GB]
    python -m scripts.bench.emulated --predictions
    python -m scripts.bench.emulated --clipping

Cases, each in a process of its own, round after round:

    plain        Lightning's own strategy, no offloading
    resident     everything stays on the emulated device                  goal: 1.10 of plain
    streamed     every weight travels, every update is the host's,        goal: 1.30 of plain
                 nothing is recomputed; links as fast as the RAM
    link SPEED   the plan for half of the memory of "resident", made and run with links of this speed each way

Besides step times: how long each lane was busy in the recorded iteration. Compute, copies and updates share the
processor's cores here, so what overlaps still costs; on a GPU it does not. ``--small`` takes a model of 20 million
parameters instead of SmolLM2: two minutes, for keeping an eye on changes of the engine. ``--experts`` takes a mixture
like OLMoE (16 experts, 4 for each token), and 43 % of the memory instead of half.

``--predictions``: what plans say an iteration takes, before and after the first iterations have corrected the profile,
beside what it takes: the quickstart's model and three small ones in half of the memory that they would take.

``--clipping``: what clipping by norm costs with 1, 2 and 4 micro-batches per update, against the same without, and
against plain Lightning: the model of ``--small`` in half of the memory that it would take.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scripts.common import arguments, in_child, read_json, save, serve_child
from scripts.planning import stream_all

GOALS = {"resident": 1.10, "streamed": 1.30}
PREDICTION_GOAL = 0.10
"""Of an iteration, on two cores that computations, copies and updates share."""
PREDICTED_STEPS = 40
SETTLED = 20
"""Steps at the end of a run, after all corrections."""
CLIPPING_GOALS = {1: 1.10, 2: 1.03, 4: 1.03}
"""By micro-batches per update: a step with clipping, by one without."""
WARM_UP = 3
SHAPE = [2, 128]
"""Samples and tokens of a batch."""
BUDGET_SHARE = 0.5
SMALL = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""About 17 million parameters."""
BLOOM = {"model_type": "bloom", "vocab_size": 8192, "hidden_size": 384, "n_layer": 8, "n_head": 6}
OLMOE = {
    "model_type": "olmoe",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
"""About 48 million parameters, of which a token meets a third."""
EXPERTS_SHARE = 0.43
PHI = SMALL | {"model_type": "phi", "tie_word_embeddings": False}
MODELS = {"small": SMALL, "bloom": BLOOM, "phi": PHI, "olmoe": OLMOE}


def make_plans(
    model: str, shape: list[int], folder: str, links: list[int], share: float = BUDGET_SHARE
) -> dict[str, Any]:
    """Profile ``model`` and save the plans of the cases."""
    import lt_offload

    profile, budget = profiled(model, shape, folder, share)
    stream_all(profile).save(Path(folder) / "streamed.json")
    for link in links:
        machine = replace(profile.hardware, h2d_bytes_per_s=float(link), d2h_bytes_per_s=float(link))
        plan = lt_offload.solve(replace(profile, hardware=machine), memory=budget)
        plan.save(Path(folder) / f"{_case(link)}.json")
    return {"model": profile.model, "half": budget}


def train(
    model: str,
    shape: list[int],
    folder: str,
    case: str,
    steps: int,
    link: int | None = None,
    memory: int | None = None,
    window: int = 1,
    clip: float | None = None,
) -> dict[str, Any]:
    """Train for ``steps`` timed micro-batches and return what was recorded.

    ``memory``: for the case ``planned``; ``window``: micro-batches per update; ``clip``: norm of gradients.
    """
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lt_offload import OffmateStrategy
    from scripts.training import Recorder

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning_utilities").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    strategy: Any = "auto"
    if case == "resident":
        strategy = OffmateStrategy(planner="resident", host_update=False)
    elif case == "planned":
        strategy = OffmateStrategy(memory=memory)
    elif case != "plain":
        strategy = OffmateStrategy(plan=Path(folder) / f"{case}.json", micro_batches="auto")
    with _throttled(link):
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            max_epochs=1,
            accumulate_grad_batches=window,
            gradient_clip_val=clip,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Recorder(folder, WARM_UP * window, checkpoint=False)],
        )
        batches = [_batch(shape, seed) for seed in range(WARM_UP * window + steps)]
        trainer.fit(_module(model, folder), DataLoader(batches, batch_size=None))
    return read_json(Path(folder) / "figures.json")


def profiled(model: str, shape: list[int], folder: str, share: float = BUDGET_SHARE) -> tuple[Any, int]:
    """Return the profile of a model, and a share of the bytes that training takes with everything on the device."""
    import torch

    import lt_offload

    torch.manual_seed(0)
    module = _module(model, folder)
    module.configure_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    profile = lt_offload.profile(module.model, _batch(shape), optimizer=optimizer)
    resident = lt_offload.solve(profile, memory=profile.hardware.device_bytes, planner="resident", host_update=False)
    return profile, int(share * resident.predicted.device_peak_bytes)


def predict(model: str, shape: list[int], folder: str) -> dict[str, Any]:
    """Train with a plan of the strategy's own and return what was predicted and measured."""
    _, budget = profiled(model, shape, folder)
    ran = train(model, shape, folder, "planned", PREDICTED_STEPS, None, memory=budget)
    measured = statistics.median(ran["steps_s"][-SETTLED:])
    first, last = ran["predicted_s"][0], ran["predicted_s"][-1]
    return {
        "name": model,
        "shape": shape,
        "budget_bytes": budget,
        "first_s": first,
        "last_s": last,
        "corrections": len(set(ran["predicted_s"])) - 1,
        "step_s": measured,
        "step_quartiles_s": statistics.quantiles(ran["steps_s"][-SETTLED:], n=4)[::2],
        "first_error": first / measured - 1,
        "last_error": last / measured - 1,
    }


def _case(link: int) -> str:
    from lt_offload.units import format_bytes

    return f"link {format_bytes(link)}/s".replace("/", " per ")


def _module(model: str, folder: str) -> Any:
    from lt_offload.finetune.load import SMOLLM2
    from lt_offload.finetune.module import FineTune

    if model == "smollm2":
        return FineTune(SMOLLM2, lr=1e-4, schedule="constant")
    path = Path(folder) / f"{model}.json"
    if not path.exists():
        path.write_text(json.dumps(MODELS[model]), encoding="utf-8")
    return FineTune(model, architecture=str(path), init="random", lr=1e-4, schedule="constant")


def _batch(shape: list[int], seed: int = 0) -> dict[str, Any]:
    import torch

    ids = torch.randint(256, tuple(shape), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


@contextmanager
def _throttled(link: int | None) -> Iterator[None]:
    """Let emulated devices that are made within the context have links of the given speed."""
    from lt_offload.execute.device import emulated
    from tests.support.hostile.device import HostileDevice

    if link is None:
        yield
        return
    with patch.object(emulated, "EmulatedDevice", partial(HostileDevice, h2d_bytes_per_s=link, d2h_bytes_per_s=link)):
        yield


def measure(
    model: str, shape: list[int], *, steps: int, rounds: int, links: list[int], share: float = BUDGET_SHARE
) -> dict[str, Any]:
    """Return the cases of ``model``: medians over rounds, in which the cases take turns."""
    with tempfile.TemporaryDirectory() as folder:
        common = {"model": model, "shape": shape, "folder": folder}
        planned = in_child("scripts.bench.emulated", "make_plans", **common, links=links, share=share)
        cases: dict[str, int | None] = {"plain": None, "resident": None, "streamed": None}
        cases |= {_case(link): link for link in links}
        times: dict[str, list[float]] = {case: [] for case in cases}
        ran: dict[str, dict[str, Any]] = {}
        for _ in range(rounds):
            for case, link in cases.items():
                ran[case] = in_child("scripts.bench.emulated", "train", **common, case=case, steps=steps, link=link)
                times[case].append(statistics.median(ran[case]["steps_s"]))
    return {**planned, "cases": [_row(case, times, ran[case]) for case in cases]}


def _row(case: str, times: dict[str, list[float]], ran: dict[str, Any]) -> dict[str, Any]:
    # The ratio of each round first: what slows the machine for a while then slows both sides.
    ratio = statistics.median(s / p for s, p in zip(times[case], times["plain"], strict=True))
    return {
        "name": case,
        "step_s": statistics.median(times[case]),
        "ratio": ratio,
        "goal": GOALS.get(case),
        "device_peak_bytes": ran["device_peak_bytes"],
        "plan": ran.get("plan"),
        "busy_s": ran.get("busy_s"),
    }


def predictions(folder: Path) -> Path:
    """Compare predicted and measured iterations of four models, print and save; return the file."""
    from lt_offload.units import format_seconds

    cases = []
    for model, shape in (("smollm2", [1, 256]), ("small", [4, 128]), ("bloom", [4, 128]), ("phi", [4, 128])):
        with tempfile.TemporaryDirectory() as place:
            case = in_child("scripts.bench.emulated", "predict", model=model, shape=shape, folder=place)
        cases.append(case | {"goal": PREDICTION_GOAL})
        print(
            f"{model:8s} {format_seconds(case['step_s'])} a step; predicted {case['first_error']:+.1%} before "
            f"{case['corrections']} corrections, {case['last_error']:+.1%} after"
        )
    settings = {"steps": PREDICTED_STEPS, "settled": SETTLED, "budget_share": BUDGET_SHARE}
    return save("bench-predictions", "bench-predictions", settings, {"cases": cases}, folder)


def clipping(folder: Path, rounds: int, updates: int) -> Path:
    """Compare steps with and without clipping in turn, print and save; return the file."""
    from lt_offload.units import format_seconds

    shape, kinds = [4, 128], [(case, clip) for case in ("plain", "planned") for clip in (None, 1.0)]
    times: dict[tuple[int, str, float | None], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        common = {"model": "small", "shape": shape, "folder": place}
        memory = in_child("scripts.bench.emulated", "make_plans", **common, links=[])["half"]
        for window in [window for _ in range(rounds) for window in CLIPPING_GOALS]:
            for case, clip in kinds:
                timed = {"steps": updates * window, "window": window}
                ran = in_child(
                    "scripts.bench.emulated", "train", **common, **timed, case=case, memory=memory, clip=clip
                )
                steps = ran["steps_s"]
                whole = [sum(steps[at : at + window]) for at in range(0, len(steps), window)]
                times[window, case, clip].append(statistics.median(whole[len(whole) // 2 :]))  # corrected by then
    cases = []
    for window, goal in CLIPPING_GOALS.items():
        each = [times[window, case, clip] for case, clip in kinds]
        rows = [{"plain": p / q, "planned": a / b} for q, p, b, a in zip(*each, strict=True)]
        case = {
            "window": window,
            "goal": goal,
            "step_s": statistics.median(each[3]),
            "plain_step_s": statistics.median(each[1]),
            "clipping": statistics.median(row["planned"] for row in rows),
            "clipping_worst": max(row["planned"] for row in rows),
            "plain_clipping": statistics.median(row["plain"] for row in rows),
        }
        cases.append(case)
        print(
            f"{window} micro-batches: {format_seconds(case['step_s'])} with clipping, {case['clipping']:.3f} of that "
            f"without (worst round {case['clipping_worst']:.3f}, plain {case['plain_clipping']:.3f}, goal {goal:.2f})"
        )
    settings = {"updates": updates, "rounds": rounds, "budget_share": BUDGET_SHARE, "memory_bytes": memory}
    return save("bench-clipping", "bench-clipping", settings, {"cases": cases}, folder)


def main() -> int:
    """Measure, print and save."""
    from lt_offload.units import format_bytes, format_seconds, parse_bytes

    parser = arguments(__doc__)
    parser.add_argument("--small", action="store_true", help="a small model and few steps: about two minutes")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts in 43 %% of its memory")
    parser.add_argument("--steps", type=int, default=None, help="timed steps per round (default 8; small: 12)")
    parser.add_argument("--rounds", type=int, default=None, help="rounds (default 3; small: 1)")
    parser.add_argument(
        "--links", metavar="SIZES", default=None, help='bytes per second, "1GB,4GB" (default; small: 1GB)'
    )
    parser.add_argument("--predictions", action="store_true", help="predicted beside measured iterations instead")
    parser.add_argument("--clipping", action="store_true", help="what clipping costs instead")
    options = parser.parse_args()
    if options.clipping:
        print(clipping(options.results, options.rounds or 3, options.steps or 24))
        return 0
    if options.predictions:
        print(predictions(options.results))
        return 0
    model, share = ("small" if options.small else "smollm2"), BUDGET_SHARE
    if options.experts:
        model, share = "olmoe", EXPERTS_SHARE
    given = (options.links or ("1GB" if options.small else "1GB,4GB")).split(",")
    links = [parse_bytes(link, setting="--links") for link in given]
    steps = options.steps or (12 if options.small else 8)
    rounds = options.rounds or (1 if options.small else 3)
    began = time.monotonic()
    found = measure(model, SHAPE, steps=steps, rounds=rounds, links=links, share=share)
    for case in found["cases"]:
        goal = f"   goal {case['goal']:.2f}" if case["goal"] else ""
        peak = format_bytes(case["device_peak_bytes"])
        print(
            f"{case['name']:16s} {format_seconds(case['step_s']):>9s}   {case['ratio']:.2f} of plain   {peak:>8s}{goal}"
        )
        busy = ", ".join(f"{lane} {format_seconds(seconds)}" for lane, seconds in (case["busy_s"] or {}).items())
        print(f"    busy: {busy}" if busy else "", end="\n" * bool(busy))
    settings = {
        "model": found["model"],
        "small": options.small,
        "batch_size": SHAPE[0],
        "sequence_length": SHAPE[1],
        "steps": steps,
        "rounds": rounds,
        "links": links,
    }
    figures = {"cases": found["cases"], "seconds": time.monotonic() - began}
    name = "bench-emulated" + ("-small" if options.small else "-experts" if options.experts else "")
    print(save(name, "bench-emulated", settings, figures, options.results))
    return 0


if __name__ == "__main__":
    serve_child(make_plans, train, predict)
    raise SystemExit(main())
