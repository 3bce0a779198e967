"""Times and bytes of a run by clock and roofline, and shares of the host's memory from measured slowdowns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lt_offload.profiling import meters, rates
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.machine import SETS, SHARING, factors, fitted
from lt_offload.profiling.meters import Roofline, Stopwatch, fastest
from lt_offload.schema.profile import Contention, Slowdown

MACHINE = load_hardware("rtx-3060")
RATE, MEMORY = MACHINE.flops_per_s["float32"], MACHINE.device_memory_bytes_per_s


def test_products_are_bound_by_the_rate_of_their_dtype() -> None:
    n = 2048
    with FakeTensorMode(), Roofline(MACHINE) as meter:
        a = torch.empty(n, n)
        meter.lap()
        a @ a.t()
        assert meter.lap().seconds == pytest.approx(2 * n**3 / RATE)
        half = a.bfloat16()
        meter.lap()
        half @ half
        assert meter.lap().seconds == pytest.approx(2 * n**3 / MACHINE.flops_per_s["bfloat16"])
    assert meter.enough([])


def test_no_block_is_known_by_the_time_in_which_the_machine_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "_MOST", 4)
    watch, times = Stopwatch(torch.device("cpu")), [30.0]
    while not watch.enough(times):
        times.append(1e-3)
    assert fastest(times) == [1e-3, 1e-3]
    assert watch.enough([30.0, 1e-3, 20.0, 2e-3]), "nothing agrees"


@pytest.mark.parametrize("longest", range(5))
def test_no_speed_is_that_of_a_piece_in_which_the_machine_stood_still(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, count = [0.0], itertools.count()

    def piece() -> None:
        now[0] += 30.0 if next(count) == longest else 2**-10

    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert rates.paces({"compute": piece})["compute"] == 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("left", "right", "terms"),
    [
        ((2048, 512), (4, 512, 256), 2048 * 512 * 256),  # rows of a group
        ((512, 2048), (2048, 256), 512 * 2048 * 256),  # terms
        ((4, 512, 256), (256, 2048), 512 * 256 * 2048),  # columns
        ((4, 512, 256), (4, 256, 64), 4 * 512 * 256 * 64),
    ],
    ids=["rows", "terms", "columns", "batches"],
)
def test_groups_have_the_shapes_of_real_ones_and_count_each_term_once(
    left: tuple[int, ...], right: tuple[int, ...], terms: int, dtype: torch.dtype
) -> None:
    grouped = torch.nn.functional.grouped_mm
    ends = None if len(left) == len(right) == 3 else [16, 16, 40, 2048]

    def product() -> torch.Tensor:
        offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
        return grouped(torch.ones(left, dtype=dtype), torch.ones(right, dtype=dtype), offs=offsets)

    expected = product()
    with FakeTensorMode(), Roofline(replace(MACHINE, flops_per_s={"float32": 1.0, "bfloat16": 1.0})) as meter:
        a, b = torch.empty(left, dtype=dtype), torch.empty(right, dtype=dtype)
        offsets = None if ends is None else torch.empty(4, dtype=torch.int32)
        meter.lap()
        found = grouped(a, b, offs=offsets)
        seconds = meter.lap().seconds
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert seconds == pytest.approx(2 * terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("hides", ["nothing", "later tokens", "what a mask says", "what a mask says, which is causal"])
def test_attention_is_as_fast_as_its_inputs_and_leaves_out_what_is_hidden(dtype: torch.dtype, hides: str) -> None:
    """Its backward reads sums in float32, and multiplies in the dtype of its inputs."""
    batch, heads, length, width = 1, 4, 4096, 64
    shown = (1 + 128 / length) / 2 if hides in ("later tokens", "what a mask says, which is causal") else 1.0
    with FakeTensorMode(), Roofline(MACHINE, unmasked="causal" in hides) as meter:
        q, k, v = (torch.empty(batch, heads, length, width, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = torch.empty(batch, 1, length, length, dtype=dtype) if "mask" in hides else None
        meter.lap()
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q, k, v, attn_mask=mask, is_causal=hides == "later tokens")
        forward = meter.lap().seconds
        out.backward(out.detach())
        backward = meter.lap().seconds
    product = 2 * batch * heads * length**2 * width / MACHINE.flops_per_s[str(dtype).removeprefix("torch.")]
    assert forward == pytest.approx(shown * 2 * product)
    # Gradients are added up, too, which memory bounds.
    assert shown * 5 * product <= backward + 1e-12 < 1.2 * shown * 5 * product


def test_lists_that_are_written_count_wherever_they_stand() -> None:
    aten = torch.ops.aten
    with FakeTensorMode(), Roofline(MACHINE) as meter:
        lists = [[torch.empty(1000) for _ in range(2)] for _ in range(3)]
        before = meter.traffic
        aten._foreach_add.List(lists[0], lists[1])
        once = meter.traffic - before
        aten._foreach_add_.List(lists[0], lists[1])
        assert meter.traffic - before == 2 * once
        aten._foreach_add.List_out(lists[0], lists[1], out=lists[2])
        assert meter.traffic - before >= 3 * once > 0


def test_memory_bound_operations_count_what_they_read_and_write() -> None:
    with FakeTensorMode(), Roofline(MACHINE) as meter:
        a, table, ids = torch.empty(1 << 20), torch.empty(1000, 1 << 10), torch.zeros(10, dtype=torch.long)
        meter.lap()
        a + a
        assert meter.lap().seconds == pytest.approx(3 * a.nbytes / MEMORY)
        a.add_(1)
        assert meter.lap().seconds == pytest.approx(2 * a.nbytes / MEMORY)
        rows = torch.nn.functional.embedding(ids, table)
        assert meter.lap().seconds == pytest.approx((ids.nbytes + 2 * rows.nbytes) / MEMORY)


def slowdowns(shares: Sequence[float]) -> list[Slowdown]:
    """What lanes with ``shares`` do to each other."""
    of = dict(zip(SHARING, shares, strict=True))
    found = []
    for lanes in SETS:
        slow = factors(np.array([[of[lane] for lane in lanes]]))[0]
        for lane, factor in zip(lanes, slow, strict=True):
            beside = tuple(other for other in lanes if other != lane)
            found.append(Slowdown(lane=lane, beside=beside, factor=float(factor)))
    return found


def shares(found: Contention) -> list[float]:
    return [found.of(lane) for lane in SHARING]


@pytest.mark.parametrize(
    ("asked", "slow"),
    [
        ([0.4, 0.5], [1.0, 1.0]),
        ([1.0, 1.0], [2.0, 2.0]),
        ([0.9, 0.3], [0.9 / 0.7, 1.0]),
        ([0.2, 0.8, 0.8], [1.0, 2.0, 2.0]),
        ([0.0, 1.0], [1.0, 1.0]),
    ],
)
def test_each_gets_what_it_asks_for_or_an_equal_part(asked: list[float], slow: list[float]) -> None:
    assert factors(np.array([asked]))[0].tolist() == pytest.approx(slow)


@pytest.mark.parametrize(
    "true",
    [
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.45, 0.45, 0.9],
        [0.0, 0.62, 0.71, 1.0],
        [0.83, 0.57, 0.64, 0.91],
        [1.0, 0.37, 0.41, 0.78],
    ],
    ids=str,
)
def test_shares_are_found_again(true: list[float]) -> None:
    found = fitted(slowdowns(true))
    assert [s.factor for s in slowdowns(shares(found))] == pytest.approx([s.factor for s in slowdowns(true)], abs=1e-3)
    assert shares(found) == pytest.approx(true, abs=2e-3)
    assert found.slowdowns == tuple(slowdowns(true))


def test_what_nothing_slows_down_shares_nothing() -> None:
    noisy = [
        replace(s, factor=s.factor + 0.03 * (-1) ** number) if "compute" in (s.lane, *s.beside) else s
        for number, s in enumerate(slowdowns([0.0, 0.7, 0.7, 0.9]))
    ]
    assert fitted(noisy).compute == 0.0
    scattered = [replace(s, scatter=0.5) for s in slowdowns([0.0, 0.6, 0.6, 0.0])]
    assert shares(fitted(scattered)) == [0.0] * 4, "it may be chance"
