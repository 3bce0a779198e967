"""Weight offloading (2022) again: its table 1 (GPT-2), from the planner's abstract model."""

from __future__ import annotations

from collections.abc import Iterator

from lt_offload.errors import InfeasibleError
from lt_offload.plan.papers.weights.model import select_gaps
from scripts.papers.rows import Row, Section
from scripts.papers.weights_problem import PaperChain, WeightLayer, l2l_s, schedule, weight_chain, weights_bound

PAPER = "Weight offloading strategies for training large DNN models (Beaumont et al., 2022)"
MIB, GIB = 1 << 20, 1 << 30
HIDDEN = 3072
LAYER = 12 * HIDDEN**2 * 4
EMBEDDING = (51200 + 1024) * HIDDEN * 4
TABLE_1 = (
    # depth, batch size; published ms: computation, bound, greedy, L2L, greedy without discount
    (74, 64, 47421, 47421, 47493, 52707, 47493),
    (56, 64, 35553, 35553, 35625, 39542, 35625),
    (38, 64, 23694, 23694, 23838, 26387, 23838),
    (74, 32, 23697, 23697, 23769, 28983, 23769),
    (56, 32, 17762, 17762, 17834, 21751, 17834),
    (38, 32, 11840, 11840, 11948, 14533, 11948),
    (74, 16, 11612, 11612, 11684, 16898, 11715),
    (56, 16, 8697, 8697, 8769, 12686, 8800),
    (38, 16, 5794, 5794, 5902, 8487, 5934),
)
BUDGETS = {64: 8, 32: 12, 16: 14}
"""GiB, by batch size."""

INPUTS = (
    "hidden size 3072, single precision, 20 MiB of activations per layer at batch size 16",
    "the published sum of the computation times; 12 GB/s in both directions",
)
ASSUMED = (
    "a depth of 74, 56 or 38 is 72, 54 or 36 equal layers of 12 x 3072^2 values and an embedding of (51200 + 1024) x "
    "3072 values; these sizes give the L2L column to 1 ms",
    "computation is divided equally between the layers and one to three between forward and backward",
    "1 GB/s of the link is 1000 MiB/s (read off the L2L column too)",
    "memory, which the paper does not give: 16 GiB less 2 GiB per 16 samples of a batch for the activations inside a "
    "layer, of which the text says 1 to 2 GB: 8, 12 and 14 GiB for batches of 64, 32 and 16; notes have other budgets",
    "the printed excess counts the own weight of a step twice, which keeps one layer of memory free; that is what the "
    "rows use, and the notes have the corrected excess without that margin",
)


def sections() -> Iterator[Section]:
    """Yield the paper's table."""
    yield _table_1()


def gpt2(depth: int, batch_size: int, milliseconds: float, gib: float, gb_per_s: float = 12) -> PaperChain:
    """Return GPT-2 as in table 1 with ``gib`` of memory, whose computations take ``milliseconds``."""
    weights = [EMBEDDING] + [LAYER] * (depth - 2)
    seconds = milliseconds / 1000 / len(weights)
    layers = [
        WeightLayer(
            weight_bytes=nbytes,
            forward_s=seconds / 4,
            backward_s=3 * seconds / 4,
            activation_bytes=20 * MIB * batch_size // 16,
        )
        for nbytes in weights
    ]
    return weight_chain(layers, memory=int(gib * GIB), bandwidth=gb_per_s * 1000 * MIB)


def _greedy_s(chain: PaperChain, *, margin: int = 1, discount: bool = True) -> float | None:
    """Return the seconds of the greedy algorithm with ``margin`` layers of free memory; None if that does not fit."""
    try:
        gaps = select_gaps(chain, margin=margin * LAYER, discount=discount)
    except InfeasibleError:
        return None
    return schedule(chain, gaps, discount=discount).period_s


def _bound_s(chain: PaperChain) -> tuple[float, str]:
    """Return the lower bound and how it was found."""
    for margin in (1, 2):
        found = _greedy_s(chain, margin=margin)
        if found is not None and found <= chain.compute_s * (1 + 1e-9):
            return chain.compute_s, "the sum of the computations, which a schedule reaches: no program had to be solved"
    return weights_bound(chain), "relaxation of the program"


def _ms(seconds: float | None) -> str:
    return "does not fit" if seconds is None else f"{1000 * seconds:.0f}"


def _table_1() -> Section:
    rows: list[Row] = []

    def row(label: str, published: float | None, seconds: float | None, note: str = "") -> None:
        ours = None if seconds is None else 1000 * seconds
        rows.append(Row(label=label, published=published, ours=ours, unit="ms", note=note))

    for depth, batch_size, computed, bound, greedy, l2l, undiscounted in TABLE_1:
        model = f"GPT-2 depth {depth}, batch {batch_size}"
        chain = gpt2(depth, batch_size, computed, BUDGETS[batch_size])
        others = {gib: gpt2(depth, batch_size, computed, gib) for gib in (6, 8, 10, 12) if gib != BUDGETS[batch_size]}
        row(f"{model}: lower bound", bound, *_bound_s(chain))
        for label, published, discount in (("greedy", greedy, True), ("greedy*", undiscounted, False)):
            plain = _ms(_greedy_s(chain, margin=0, discount=discount))
            elsewhere = ", ".join(f"{g} GiB {_ms(_greedy_s(c, discount=discount))}" for g, c in others.items())
            row(
                f"{model}: {label}",
                published,
                _greedy_s(chain, discount=discount),
                f"{BUDGETS[batch_size]} GiB; corrected excess {plain}; printed excess with {elsewhere}",
            )
        row(f"{model}: L2L", l2l, l2l_s(chain), "closed form, independent of the memory")
    tight = gpt2(38, 64, 23694, 4)
    row("GPT-2 depth 38, batch 64, 4 GiB: lower bound", None, weights_bound(tight), "a budget where waits are certain")
    row("GPT-2 depth 38, batch 64, 4 GiB: greedy", None, _greedy_s(tight, margin=0), "corrected excess")
    return Section(
        key="weights-table-1",
        title="Iteration time of GPT-2 with offloaded weights",
        source=f"{PAPER}, table 1",
        rows=tuple(rows),
        inputs=INPUTS,
        assumed=ASSUMED,
        missing=(
            "the six BERT rows: their L2L column waits 26.69 ms per layer, which is 3.0 bytes per parameter of a layer "
            "of that hidden size instead of 8 (two fetches in single precision); what was fetched is not said",
            "the greedy columns exactly: they depend on the memory budget, and on measured times per layer",
        ),
    )
