"""MemFerry (2024) again: its forward, whole iterations and the gradient reserve, on chains from the models' shapes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lt_offload.plan.papers.memferry.model import (
    CopiedWeights,
    MemFerryLayer,
    MemFerryWeight,
    Position,
    backward,
    best_forward,
    forward,
    kept_gradients,
    switched_weights,
    uniform,
)
from scripts.papers.memferry_algorithm import algorithm_1_as_printed, algorithm_1_corrected
from scripts.papers.memferry_networks import (
    A100,
    BERT_BASE,
    DIRECT,
    GPT2_MEDIUM,
    SMALL,
    V100,
    XL_1B,
    XL_4B,
    XL_7B,
    XLS,
    Machine,
    chain,
    parameter_bytes,
)
from scripts.papers.rows import Row, Section

PAPER = (
    "MemFerry: A Fast and Memory Efficient Offload Training Framework with Hybrid GPU Computation (Yao et al., 2024)"
)
RESERVES = (0.0, 0.25, 0.5, 0.75, 1.0)
RANDOM_CHAINS, RANDOM_LAYERS = 300, 9

INPUTS = (
    "V100 and A100 with PCIe 3.0; single precision parameters, all updated on the host; the five models' shapes",
    "forward: all weights copied layer by layer (ZeRO-Offload), all read directly, algorithm 1, or the optimum",
)
ASSUMED = (
    "times are not published, only plots: here they follow from the shapes. Products: 78 TFLOP/s on the A100 (half of "
    "TF32, which PyTorch 1.9 uses for them), 10.4 TFLOP/s on the V100; everything else: 1.9 and 0.9 TB/s of memory",
    "12 GB/s per direction of the link; direct reads reach 80 % of that, on top of the computation; a product reads "
    "its matrix once if the cache holds it (40 MB, 6 MB), else once per 128 rows; an embedding reads the batch's rows",
    "batch sizes and lengths, where the paper has none: 8 x 512 (BERT, RoBERTa), 8 x 1024 (GPT-2), 8 x 378 "
    "(TransformerXL, whose lengths are 378 to 4096); on the V100 a batch of 1",
    "BERT and RoBERTa without an output projection; those of GPT-2 and TransformerXL have a copy of the table",
    "as in the paper, direct reads take nothing of the link from copies, unless a row says so",
)
MISSING = (
    "figures 3 and 9 to 14 are plots without numbers; the text has only averages and ranges",
    "comparisons with DeepSpeed include the time it takes to allocate gradient buffers, which nothing here models",
    "memory (figure 12, the largest models of figure 11): batch sizes and recomputation settings are not given, and "
    "activations decide about it",
    "several GPUs (figure 14): this planner is for one",
)


def sections() -> Iterator[Section]:
    """Yield what the paper compares."""
    yield _direct_access()
    yield _forwards()
    yield _iterations()
    yield _reserve()


def with_reads(layers: Sequence[MemFerryLayer]) -> list[MemFerryLayer]:
    """Return ``layers`` whose direct reads take their bytes of the link from copies."""
    return [
        replace(
            layer,
            weights=tuple(
                replace(w, forward_read_s=DIRECT * w.forward_s, backward_read_s=DIRECT * w.backward_s)
                for w in layer.weights
            ),
        )
        for layer in layers
    ]


def iteration_s(
    layers: Sequence[MemFerryLayer],
    copied: CopiedWeights,
    machine: Machine,
    *,
    overlapped: bool,
    switched: frozenset[Position] = frozenset(),
    written: frozenset[Position] = frozenset(),
) -> float:
    """Return a whole iteration; ``overlapped``: layers are updated as their gradients arrive, else after the last."""
    found = backward(layers, copied, switched, written)
    begin = 0.0 if overlapped else max(found.compute_s, *found.arrivals)
    host = begin
    for layer, arrival in zip(reversed(layers), reversed(found.arrivals), strict=True):
        host = max(host, arrival) + parameter_bytes([layer]) / machine.update
    return max(host, found.compute_s)


def zero_offload_s(layers: Sequence[MemFerryLayer], machine: Machine) -> float:
    """Return ZeRO-Offload's iteration: everything copied, the update after the last gradient."""
    return iteration_s(layers, uniform(layers, True), machine, overlapped=False)


def memferry_s(
    layers: Sequence[MemFerryLayer],
    machine: Machine,
    choose: Callable[[Sequence[MemFerryLayer]], CopiedWeights],
    reserve: float = 1.0,
) -> float:
    """Return MemFerry's iteration, or GO-MemFerry's with ``reserve`` of the gradients kept on the device."""
    copied = choose(layers)
    places = [(at, index) for at, layer in enumerate(layers) for index in range(len(layer.weights))]
    weights = [layers[at].weights[index] for at, index in places]
    kept = kept_gradients(weights, int(reserve * parameter_bytes(layers)))
    written = frozenset(place for place, keep in zip(places, kept, strict=True) if not keep)
    switched = switched_weights(layers, copied)
    return iteration_s(layers, copied, machine, overlapped=True, switched=switched, written=written)


def _direct_access() -> Section:
    layers = chain(BERT_BASE, A100)
    norm = next(i for i, layer in enumerate(layers) if layer.weights and layer.weights[0].gradient_bytes < 10_000)
    inner = max(range(2, len(layers)), key=lambda i: sum(w.gradient_bytes for w in layers[i].weights))
    rows = []
    for name, at in (("embedding", 0), ("layer norm", norm), ("linear 768 x 3072", inner)):
        layer, weight = layers[at], layers[at].weights[0]
        for label, near, far in (
            ("forward", weight.transfer_s + layer.forward_s, layer.forward_s + weight.forward_s),
            ("backward", layer.backward_s, layer.backward_s + weight.backward_s),
            ("backward, gradient included", layer.backward_s, layer.backward_s + weight.gradient_s),
        ):
            note = f"{1e3 * far:.3g} ms read or written directly, {1e3 * near:.3g} ms on the device"
            rows.append(
                Row(label=f"{name}, {label}: direct / on device", published=None, ours=far / near, unit="x", note=note)
            )
    return Section(
        key="memferry-figure-3",
        title="Direct host access, layer by layer (BERT-base, A100)",
        source=f"{PAPER}, figure 3",
        rows=tuple(rows),
        inputs=("forwards on the device include the copy, backwards do not, as in the figure",),
        assumed=ASSUMED[:3],
        missing=(
            "the figure has no numbers; the text says that embeddings and norms are faster and products slower in the "
            "forward; norms come out equal here, because a copy has no latency in the model",
            "the text says that backwards with direct reads take 5 to 10 % longer; its layers' inputs are not given, "
            "and with these a product's matrix takes longer to cross the link than its backward to compute",
        ),
    )


def _forwards() -> Section:
    rows = []
    for machine, shapes in ((A100, SMALL + XLS), (V100, (replace(GPT2_MEDIUM, batch=1), replace(XL_1B, batch=1)))):
        for shape in shapes:
            layers = chain(shape, machine)
            best = forward(layers, best_forward(layers)).seconds
            charged = with_reads(layers)
            ways = {
                "optimum": best,
                "algorithm 1 as printed": forward(layers, algorithm_1_as_printed(layers)).seconds,
                "algorithm 1 corrected": forward(layers, algorithm_1_corrected(layers)).seconds,
                "all copied": forward(layers, uniform(layers, True)).seconds,
                "all direct": forward(layers, uniform(layers, False)).seconds,
                "optimum, reads take the link": forward(charged, best_forward(charged)).seconds,
            }
            for name, found in ways.items():
                label = f"{shape.name}, {shape.batch} x {shape.length}, {machine.name}: {name}"
                rows.append(
                    Row(
                        label=label,
                        published=None,
                        ours=1e3 * found,
                        unit="ms",
                        note=f"{found / best:.2f} x the optimum",
                    )
                )
    rows += _random_chains()
    return Section(
        key="memferry-forward",
        title="Forward: what is copied and what is read directly",
        source=f"{PAPER}, section IV-B, algorithm 1",
        rows=tuple(rows),
        inputs=INPUTS,
        assumed=(
            *ASSUMED,
            f"random chains: {RANDOM_CHAINS} of {RANDOM_LAYERS} layers, copies of up to 10, computations of 0.1 to 3, "
            "direct reads of up to 2 or 12 more",
        ),
        missing=("no forward times are published, so that only our own algorithms can be compared",),
    )


def _random_chains() -> Iterator[Row]:
    rng = random.Random(0)
    ratios: dict[str, list[float]] = {"as printed": [], "corrected": []}
    for _ in range(RANDOM_CHAINS):
        layers = [
            MemFerryLayer(
                forward_s=rng.uniform(0.1, 3),
                weights=(
                    MemFerryWeight(
                        transfer_s=rng.uniform(0, rng.choice((2, 10))), forward_s=rng.uniform(0, rng.choice((2, 12)))
                    ),
                ),
            )
            for _ in range(RANDOM_LAYERS)
        ]
        best = forward(layers, best_forward(layers, buckets=None)).seconds
        for name, decide in (("as printed", algorithm_1_as_printed), ("corrected", algorithm_1_corrected)):
            ratios[name].append(forward(layers, decide(layers)).seconds / best)
    for name, found in ratios.items():
        note = f"mean; {max(found):.2f} at most"
        yield Row(
            label=f"random chains: algorithm 1 {name} / optimum",
            published=None,
            ours=statistics.mean(found),
            unit="x",
            note=note,
        )


def _speedups() -> Iterator[Row]:
    published = {XL_1B: 1.37, XL_7B: 1.26}
    speedups = []
    for shape in SMALL + XLS:
        layers = chain(shape, A100)
        before, after = zero_offload_s(layers, A100), memferry_s(layers, A100, best_forward)
        printed = memferry_s(layers, A100, algorithm_1_as_printed)
        if shape in XLS:
            speedups.append(before / after)
        yield Row(
            label=f"{shape.name}, A100: MemFerry over ZeRO-Offload",
            published=published.get(shape),
            ours=before / after,
            unit="x",
            note=f"{before:.3g} s and {after:.3g} s; algorithm 1 as printed: {printed:.3g} s",
        )
    mean = statistics.mean(speedups)
    yield Row(label="TransformerXL, mean: MemFerry over ZeRO-Offload", published=1.32, ours=mean, unit="x")


def _single_batches() -> Iterator[Row]:
    single = [chain(replace(shape, batch=1), V100) for shape in (XL_1B, GPT2_MEDIUM)]
    gains = [zero_offload_s(layers, V100) / memferry_s(layers, V100, best_forward) for layers in single]
    losses = [memferry_s(layers, V100, best_forward, 0.0) / zero_offload_s(layers, V100) for layers in single]
    ours = "ours: TransformerXL 1B and GPT-2-medium"
    yield Row(
        label="batch of 1, V100, mean: MemFerry over ZeRO-Offload",
        published=1.12,
        ours=statistics.mean(gains),
        unit="x",
        note=ours,
    )
    yield Row(
        label="batch of 1, V100, mean: GO-MemFerry's time over ZeRO-Offload's, no gradients kept",
        published=1.034,
        ours=statistics.mean(losses),
        unit="x",
        note=f"{ours}; the paper: at most 3.4 % slower",
    )


def _iterations() -> Section:
    absolute = Row(
        label="TransformerXL 4.3B, one GPU: iteration of MemFerry",
        published=5.41,
        ours=memferry_s(chain(XL_4B, A100), A100, best_forward),
        unit="s",
        note="the batch is not given; ours is 8 x 378",
    )
    return Section(
        key="memferry-iteration",
        title="Whole iterations: MemFerry and ZeRO-Offload",
        source=f"{PAPER}, sections V-B to V-D (figures 9, 11 and 13)",
        rows=(*_speedups(), *_single_batches(), absolute),
        inputs=(
            *INPUTS,
            "the text: 1.32 x on average and up to 1.68 x; 1.217 to 1.687 for BERT-base and RoBERTa, 1.071 to 1.321 "
            "for BERT-large and GPT-2; all against DeepSpeed and the authors' own ZeRO-Offload together",
        ),
        assumed=(
            *ASSUMED,
            "ZeRO-Offload updates after the last gradient has arrived and copies after the last update (the paper's "
            "figure 2 has some overlap of the two), MemFerry updates as gradients arrive; Adam on the host runs "
            "at 120 GB/s of memory (A100 machine) and 75 GB/s (V100 machine)",
            "TransformerXL: 16 layers of 2048 with a vocabulary of 32768 (1B), 18 of 4096 with 65536 (4.3B), 26 of "
            "4096 with 130528 (6.7B); the paper gives ranges",
        ),
        missing=MISSING,
    )


def _reserve() -> Section:
    layers = chain(GPT2_MEDIUM, A100)
    times = [memferry_s(layers, A100, best_forward, reserve) for reserve in RESERVES]
    rows = [
        Row(
            label=f"GPT-2-medium, A100: {reserve:.0%} of the gradients kept on the device",
            published=None,
            ours=seconds,
            unit="s",
            note=f"{seconds / times[-1]:.2f} x as long as with all",
        )
        for reserve, seconds in zip(RESERVES, times, strict=True)
    ]
    return Section(
        key="memferry-figure-10b",
        title="GO-MemFerry: time against the gradient reserve",
        source=f"{PAPER}, figure 10(b)",
        rows=tuple(rows),
        inputs=("falling and convex in the paper",),
        assumed=ASSUMED,
        missing=("the figure is a plot without numbers; its model and machine are not named",),
    )
