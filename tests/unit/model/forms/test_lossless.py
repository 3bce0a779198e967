"""The lossless form gives back every bit, whatever code closes and opens it."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lt_offload import compiling
from lt_offload.model.forms.base import Layout, Pieces
from lt_offload.model.forms.lossless import Closed, Lossless, host, plain
from lt_offload.optim import native

FORM = Lossless()
SHAPES = [(1,), (63,), (1023,), (1024,), (1025,), (3, 5, 7), (300, 77), (17, 1024), (2, 3, 1000), (1 << 20, 3)]
LEVELS = {"x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl", "native": ""}
CODED = torch.arange(110, 117)
"""Exponents of a tensor that has no others often."""
IN_THE_INTERPRETER = """
import torch
from lt_offload.model.forms.lossless import cuda, plain

assert cuda.agrees(torch.device("cpu"))
for numbers in (1, 1000, 5000):
    bits = torch.randint(-(1 << 15), 1 << 15, (numbers,), generator=torch.manual_seed(numbers)).to(torch.int16)
    bits[numbers // 3 :] = torch.randn(numbers - numbers // 3).mul_(0.02).bfloat16().view(torch.int16)
    opened = torch.zeros_like(bits)
    cuda.open_(plain.close(bits), opened)
    assert torch.equal(opened, bits), numbers
print("equal")
"""


@pytest.fixture(scope="module")
def compiled() -> host.Library:
    library = host.library()
    if library is None:
        assert not shutil.which("g++"), "there is a compiler, and no library"
        pytest.skip("no C++ compiler")
    return library


@pytest.fixture
def fresh() -> Iterator[None]:
    """Let the compiled code be looked for anew, within the test and after it."""
    host.library.cache_clear()
    yield
    host.library.cache_clear()


def bits_of(weight: Tensor) -> Tensor:
    return weight.contiguous().view(-1).view(torch.int16)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits: NaN is unequal to itself."""
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(bits_of(one), bits_of(other))


def layout_of(pieces: Pieces) -> Layout:
    return tuple((tuple(piece.shape), piece.dtype) for piece in pieces)


def opened(pieces: Pieces, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return FORM.open(pieces, shape, dtype)


def open_into(pieces: Pieces, out: Tensor) -> None:
    torch.ops.lt_offload.open_lossless_(out, *pieces)


def weights(shape: tuple[int, ...], scale: float = 0.02) -> Tensor:
    return (torch.randn(shape) * scale).to(torch.bfloat16)


def joined(exponents: Tensor) -> Tensor:
    """Return numbers with these exponents and random signs and mantissas."""
    rest = torch.randint(-(1 << 15), 1 << 15, exponents.shape).to(torch.int16) & -0x7F81
    return (rest | (exponents.to(torch.int16) << 7)).view(torch.bfloat16)


def every_pattern() -> Tensor:
    return (torch.randperm(1 << 16) - (1 << 15)).to(torch.int16).view(torch.bfloat16)


def escaping() -> dict[str, Tensor]:
    """Weights with escapes in all places that a block may have them."""
    few, others = CODED[torch.randint(7, (8192,))], torch.randint(0, 100, (8192,))
    rare = torch.rand(8192) < 0.03
    return {
        "none": joined(few),
        "some": joined(torch.where(rare, others, few)),
        "whole blocks": joined(torch.where((torch.arange(8192) // 1024) % 4 == 2, others, few)),
        "first and last": joined(torch.where(torch.arange(8192) % 1024 % 1023 == 0, others, few)),
        "one exponent": joined(torch.full((4100,), 120)),
        "zeros": torch.zeros(4100, dtype=torch.bfloat16),
    }


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def check(weight: Tensor, compiled: host.Library) -> Closed:
    """Check that both ways close to the same pieces, and that both open each."""
    bits = bits_of(weight)
    closed, other = plain.close(bits), compiled.close(bits)
    assert all(map(torch.equal, closed, other))
    for open_ in (plain.open_, compiled.open_):
        out = torch.full_like(bits, 12345)
        open_(closed, out)
        assert torch.equal(out, bits)
    return closed


# -- every bit --------------------------------------------------------------------------------------------------------


def test_all_patterns_of_sixteen_bits_come_back(compiled: host.Library) -> None:
    for scale in (1, 5):  # with commonest exponents, too
        weight = torch.cat([every_pattern(), weights(((scale - 1) << 16,)), every_pattern()])
        check(weight, compiled)
        assert same(opened(FORM.close(weight), weight.shape), weight)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...], compiled: host.Library) -> None:
    weight = weights(shape)
    check(weight, compiled)
    pieces = FORM.close(nn.Parameter(weight))
    assert same(opened(pieces, shape), weight)
    assert layout_of(pieces) == plain.layout(weight.numel(), len(Closed(*pieces).escapes))


@pytest.mark.parametrize("name", ["none", "some", "whole blocks", "first and last", "one exponent", "zeros"])
def test_escapes(name: str, compiled: host.Library) -> None:
    closed = check(escaping()[name], compiled)
    assert (name in ("none", "one exponent", "zeros")) == (closed.escapes.tolist() == [0])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    numbers=st.integers(0, 5000),
    exponents=st.lists(st.integers(0, 255), min_size=1, max_size=256),
    seed=st.integers(0, 1 << 30),
)
def test_any_numbers(compiled: host.Library, numbers: int, exponents: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    among = torch.tensor(exponents)
    # Some exponents are common: the square of what is drawn evenly is small more often.
    check(joined(among[(torch.rand(numbers).square() * len(among)).long()]), compiled)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_set_of_instructions_gives_the_same_bits(level: str, compiled: host.Library, tmp_path: Path) -> None:
    """Those that this processor has: words, AVX2, AVX-512, and AVX-512 that spreads bytes."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    if LEVELS[level] not in flags:
        pytest.skip(f"no {LEVELS[level]} here")
    same_bits(host.Library(compiling.build(host.SOURCE, tmp_path, [f"-march={level}"])))


@pytest.mark.slow
def test_every_library_of_a_wheel_gives_the_same_bits(tmp_path: Path) -> None:
    if platform.machine() not in compiling.WHEEL:
        pytest.skip(f"no wheel for {platform.machine()}")
    folder = tmp_path / "built"
    folder.mkdir()
    for library in compiling.build_for_wheel(host.SOURCE, folder):
        if "avx512" not in library.name or torch.backends.cpu.get_cpu_capability() == "AVX512":
            same_bits(host.Library(library))


def same_bits(library: host.Library) -> None:
    assert host.agrees(library)
    for weight in (torch.cat([every_pattern(), weights((200_003,))]), *map(weights, SHAPES[:-1]), *escaping().values()):
        check(weight, library)


def test_threads(compiled: host.Library) -> None:
    weight, before = weights((300_001,)), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        check(weight, compiled)
    finally:
        torch.set_num_threads(before)


def test_nothing_beyond_the_memory_that_is_named_is_read_or_written(compiled: host.Library) -> None:
    """Pieces at the ends of their memory: whatever follows has no part in it, and stays."""
    weight = weights((5, 211))
    closed = Closed(*FORM.close(weight))
    for filling in (0, 255):
        padded = [torch.full((piece.nbytes + 256,), filling, dtype=torch.uint8) for piece in closed]
        inside = Closed(
            *(p[128 : 128 + c.nbytes].view(c.dtype).view(c.shape) for p, c in zip(padded, closed, strict=True))
        )
        for to, piece in zip(inside, closed, strict=True):
            to.copy_(piece)
        memory = torch.full((weight.numel() + 128,), 7.0, dtype=torch.bfloat16)
        out = memory[64 : 64 + weight.numel()].view(weight.shape)
        open_into(inside, out)
        assert same(out, weight)
        assert memory[:64].eq(7).all()
        assert memory[64 + weight.numel() :].eq(7).all()


# -- the format -------------------------------------------------------------------------------------------------------


def test_a_number_is_read_as_the_pieces_say() -> None:
    """A reader in plain Python."""
    weight = escaping()["some"][:3001]
    mantissas, codes, starts, escapes, exponents = (piece.tolist() for piece in FORM.close(weight))
    for block in range(3):
        place_of_escape = starts[block]
        for place, bits in enumerate(bits_of(weight)[block * 1024 : (block + 1) * 1024].tolist()):
            code = sum((codes[block][bit][place // 8] >> place % 8 & 1) << bit for bit in range(3))
            exponent = escapes[place_of_escape] if code == 7 else exponents[code]
            place_of_escape += code == 7
            mantissa = mantissas[block * 1024 + place]
            assert bits & 0xFFFF == (mantissa & 0x80) << 8 | exponent << 7 | mantissa & 0x7F
    assert place_of_escape == len(plain.close(bits_of(weight)).escapes)


@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_a_block_is_opened_alone(way: str, compiled: host.Library) -> None:
    weight = escaping()["some"][:7001]
    closed, bits = Closed(*FORM.close(weight)), bits_of(weight)
    for block in range(7):
        numbers = slice(block * 1024, (block + 1) * 1024)
        alone = Closed(
            closed.mantissas[numbers], closed.codes[block : block + 1], closed.starts[block : block + 1], *closed[3:]
        )
        out = torch.empty_like(bits[numbers])
        (plain.open_ if way == "plain" else compiled.open_)(alone, out)
        assert torch.equal(out, bits[numbers])


@pytest.mark.parametrize("shape", [(4096, 1024), (576, 1536), (128, 2048), (50_000, 64)], ids=str)
@pytest.mark.parametrize("kind", ["normal", "uniform", "ones and noise"])
def test_weights_take_at_most_72_percent(shape: tuple[int, int], kind: str) -> None:
    if kind == "uniform":
        weight = nn.Linear(shape[1], shape[0], dtype=torch.bfloat16).weight.detach()
    else:
        weight = weights(shape) if kind == "normal" else 1 + weights(shape)
    pieces = FORM.close(weight)
    assert sum(piece.nbytes for piece in pieces) <= 0.72 * weight.nbytes
    assert same(opened(pieces, shape), weight)


# -- stacks -----------------------------------------------------------------------------------------------------------


def test_weights_of_experts_are_stacked() -> None:
    experts = [weights((48, 100), 0.02 * (1 + i)) for i in range(4)]
    experts[2].view(-1)[:500] = every_pattern()[:500]
    closed = [FORM.close(expert) for expert in experts]
    assert len({len(Closed(*pieces).escapes) for pieces in closed}) > 1
    stacked = FORM.stack(closed)
    for i, expert in enumerate(experts):
        assert same(opened(tuple(piece[i] for piece in stacked), (48, 100)), expert)


# -- without numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_shapes_are_known_without_numbers(where: str) -> None:
    with FakeTensorMode() if where == "fake" else torch.device("meta"):
        weight = torch.empty(100, 3000, dtype=torch.bfloat16)
        pieces = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in FORM.layout((100, 3000)))
        assert 0.70 < sum(piece.nbytes for piece in pieces) / weight.nbytes < 0.71
        out = opened(pieces, (100, 3000))
        directly = torch.empty(300_000, dtype=torch.int16)
        plain.open_(Closed(*pieces), directly)
    assert (out.shape, out.dtype) == ((100, 3000), torch.bfloat16)
    assert {type(piece) for piece in pieces} == {type(weight), type(out)}
    assert layout_of(FORM.close(weights((100, 3000)))) == FORM.layout((100, 3000))


# -- around -----------------------------------------------------------------------------------------------------------


def test_numbers_that_do_not_shrink_come_back() -> None:
    for weight in (every_pattern(), torch.ones(16, dtype=torch.bfloat16), torch.empty(0, 3, dtype=torch.bfloat16)):
        assert same(opened(FORM.close(weight), weight.shape), weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_opened_and_not_closed(dtype: torch.dtype) -> None:
    assert FORM.refuses((64, 64), dtype)
    weight = weights((48, 100))
    assert torch.equal(opened(FORM.close(weight), (48, 100), dtype), weight.to(dtype))


def test_room_for_escapes_makes_the_layout_that_of_the_shape() -> None:
    for weight in (weights((96, 500)), torch.zeros(96, 500, dtype=torch.bfloat16)):
        assert layout_of(FORM.close(weight)) == FORM.layout(weight.shape)
    patterns = every_pattern()[:48_000].view(96, 500)
    assert len(Closed(*FORM.close(patterns)).escapes) > FORM.layout((96, 500))[3][0][0]


def test_weights_that_are_not_contiguous_are_closed_in_their_order() -> None:
    for weight in (weights((96, 64)).t(), weights((4096, 3))[:, 1], weights((64, 2, 64))[:, 0]):
        assert same(opened(FORM.close(weight), weight.shape), weight)


def test_memory_that_a_graph_has_saved_is_not_opened_to_unnoticed() -> None:
    pieces = FORM.close(weights((64, 64)))
    out = opened(pieces, (64, 64))
    inputs = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
    product = (inputs @ out).sum()
    open_into(pieces, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        assert same(opened(pieces, (64, 64)), out)


@pytest.mark.slow
def test_code_that_opens_can_be_compiled() -> None:
    weight = weights((64, 64))
    pieces = FORM.close(weight)

    def product(inputs: Tensor, out: Tensor) -> Tensor:
        open_into(pieces, out)
        return inputs @ out + opened(pieces, (64, 64))

    inputs, out = weights((64, 64), 1), torch.zeros_like(weight)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert same(compiled(inputs, out), inputs @ weight + weight)
    assert same(out, weight)


def test_without_a_compiler_torch_opens(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Path:
        raise FileNotFoundError("there is no C++ compiler here")

    monkeypatch.setattr(native, "build", fail)
    weight = weights((100, 100))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert same(opened(FORM.close(weight), weight.shape), weight)
    [record] = caplog.records
    assert record.message.endswith("no compiled code, as there is no C++ compiler here")


def test_compiled_code_with_other_bits_is_not_used(
    compiled: host.Library, fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plain, "sample", lambda _: bits_of(weights((3000,))))
    monkeypatch.setattr(host.Library, "open_", lambda *_: None)
    assert host.library() is None
    assert "its bits are not those of torch's operations" in caplog.text


def test_the_kernel_for_gpus_gives_the_same_bits() -> None:
    """In Triton's interpreter, which takes tensors on the host."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", IN_THE_INTERPRETER]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert ran.stdout == "equal\n", ran.stderr
