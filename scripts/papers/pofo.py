"""POFO (2021) again: figures 2 and 3 in shape, and what its text says, from the chain that its program schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf

from lt_offload.plan.papers.pofo.chain import Chain, memory, sequential, walk
from lt_offload.plan.papers.pofo.program import ChainProgram
from scripts.papers import pofo_networks as networks
from scripts.papers.pofo_heuristics import Rematerialisation, autocapper_s, from_scratch, opportunist_s, simulated_s
from scripts.papers.rows import Row, Section

PAPER = "Efficient Combination of Rematerialization and Offloading for Training DNNs (Beaumont et al., NeurIPS 2021)"
ALPHAS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
BANDWIDTHS = (12, 18, 24, 30, 36)
SLOTS, FINE_SLOTS = 60, 400
"""Of the programs with offloading, and of rematerialisation alone."""
SURPLUS = 1.1
ALLOWED = 1.2
"""Time over that of the computations that the paper's conclusion allows for."""

INPUTS = (
    "batches of 16 images of 500 x 500 pixels on a V100; 12 GB/s in each direction",
    "memory: (1 - alpha) of the least that any sequence needs (every backward from the chain's input) plus alpha of "
    "what it takes to keep everything",
    "figures are times over the sum of all forward and backward times",
)
ASSUMED = (
    "times and sizes: the paper measured its networks; here they follow from the shapes of the convolutions, 11 "
    "TFLOP/s and 750 GB/s, a backward twice the forward; the temporary memory of a forward is its largest tensor, that "
    "of a backward two of them",
    "the classifier and the pooling before it are the loss",
    f"the program is solved with {SLOTS} slots for up to {SURPLUS:g} times the memory, sizes and what the link moves "
    "rounded to the nearest slot and the rest carried from layer to layer; every sequence is then simulated with exact "
    "bytes and copies of whole tensors, and the fastest that fits counts (the paper: 50 slots, how they are rounded is "
    "not said, solutions changed into ones with copies of whole tensors)",
    "offload-only is the same program without rematerialisation, not the one of Beaumont et al. (2020)",
    "opportunist leaves all memory but its stored input to each group of layers in the backward",
)
MISSING = (
    "the figures are plots without numbers, so only the orders of the curves can be compared, as the text states them",
    "the networks' measured times and sizes were not published",
)


def sections() -> Iterator[Section]:
    """Yield the paper's figures, and the figures of its text."""
    chains = {
        "resnet101": networks.resnet(),
        "densenet121": networks.densenet(),
        "inception v3": networks.inception(),
        "synthetic, 30 layers": networks.synthetic(30),
    }
    found = {name: {alpha: times(chain, alpha) for alpha in ALPHAS} for name, chain in chains.items()}
    yield _figure_2(found)
    yield _figure_3({name: chains[name] for name in ("resnet101", "inception v3")})
    yield _text(chains, found)


def times(chain: Chain, alpha: float) -> dict[str, float]:
    """Return the time of each algorithm over that of all computations; infinity where it finds nothing."""
    low, high = memory_range(chain)
    room = int((1 - alpha) * low + alpha * high)
    alone = Rematerialisation(chain, memory_bytes=high, slots=FINE_SLOTS)
    found = {
        "pofo": _fastest_s(chain, room, recompute=True),
        "rematerialisation": alone.seconds(room),
        "offload-only": _fastest_s(chain, room, recompute=False),
        "opportunist": opportunist_s(chain, room, alone),
        "autocapper": autocapper_s(chain, room, alone),
    }
    return {name: seconds / chain.sequential_s for name, seconds in found.items()}


def memory_range(chain: Chain) -> tuple[int, int]:
    """Return the least memory of all sequences, and that of keeping everything."""
    low, high = (max(memory(walk(made(chain), chain))) for made in (from_scratch, sequential))
    return low, high


def _fastest_s(chain: Chain, room: int, *, recompute: bool) -> float:
    program = ChainProgram(chain, memory_bytes=int(SURPLUS * room), slots=SLOTS, recompute=recompute, nearest=True)
    walks = (walk(operations, chain) for operations in program.sequences())
    return min((simulated_s(walked, room, chain.bytes_per_s) for walked in walks), default=inf)


def _rows(label: str, found: Mapping[str, float], note: str = "") -> Iterator[Row]:
    for name, ratio in found.items():
        ours = ratio if ratio < inf else None
        yield Row(
            label=f"{label}, {name}",
            published=None,
            ours=ours,
            unit="x",
            note=note if ours is not None else "finds no sequence that fits",
        )


def _figure_2(found: Mapping[str, Mapping[float, Mapping[str, float]]]) -> Section:
    rows = [
        row
        for name, by_alpha in found.items()
        for alpha, ratios in by_alpha.items()
        for row in _rows(f"{name}, alpha {alpha:g}", ratios)
    ]
    return Section(
        key="pofo-figure-2",
        title="Overhead against memory at 12 GB/s",
        source=f"{PAPER}, figure 2",
        rows=tuple(rows),
        inputs=INPUTS,
        assumed=(
            *ASSUMED,
            "the synthetic chain has random times and sizes, and a link that carries all outputs in 0.6 of the forward",
        ),
        missing=MISSING,
    )


def _figure_3(chains: Mapping[str, Chain]) -> Section:
    rows = [
        row
        for name, chain in chains.items()
        for speed in BANDWIDTHS
        for row in _rows(f"{name}, {speed} GB/s", times(replace(chain, bytes_per_s=speed * 1e9), 0.2))
    ]
    return Section(
        key="pofo-figure-3",
        title="Overhead against the link's speed at alpha 0.2",
        source=f"{PAPER}, figure 3",
        rows=tuple(rows),
        inputs=INPUTS,
        assumed=ASSUMED,
        missing=MISSING,
    )


def _text(chains: Mapping[str, Chain], found: Mapping[str, Mapping[float, Mapping[str, float]]]) -> Section:
    """What abstract and conclusion say in numbers."""
    rows = []
    for name, chain in chains.items():
        low, high = memory_range(chain)
        alpha = min((alpha for alpha in ALPHAS if found[name][alpha]["pofo"] <= ALLOWED), default=1.0)
        rows.append(
            Row(
                label=f"{name}, activation memory divided by, at an overhead of at most 20 %",
                published=4.0,
                ours=high / ((1 - alpha) * low + alpha * high),
                unit="x",
                note=f"published: 4 to 6, in many cases; ours at alpha {alpha:g}, the smallest of figure 2 that does",
            )
        )
    for name, by_alpha in found.items():
        shares = [
            1 - (ratios["pofo"] - 1) / (ratios["rematerialisation"] - 1)
            for alpha, ratios in by_alpha.items()
            if ratios["pofo"] < inf and 1 < ratios["rematerialisation"] < inf and alpha <= 0.5
        ]
        rows.append(
            Row(
                label=f"{name}, share of rematerialisation's overhead that offloading removes",
                published=1 / 3,
                ours=sum(shares) / len(shares) if shares else None,
                unit="",
                note="mean over the memories of figure 2 up to alpha 0.5",
            )
        )
    return Section(
        key="pofo-text",
        title="Memory saved and overhead removed",
        source=f"{PAPER}, abstract and conclusion",
        rows=tuple(rows),
        inputs=INPUTS,
        assumed=ASSUMED,
        missing=("which memories and networks the paper's averages are over",),
    )
