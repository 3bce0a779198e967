"""Every way to carry out an AdamW update gives the same bits, and a missing kernel is no more than slow."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_offload import compiling
from lt_offload.optim import native, plain
from lt_offload.optim.plain import Entry, Options, converted, piece, with_moments

SIZES = [1, 7, 15, 16, 17, 63, 64, 1013, 16384, 16400, (300, 77), 3 * 16384 + 5]
SPECIAL = [0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, float("inf"), -float("inf"), float("nan"), 1e-20, 1.0]


@pytest.fixture(scope="module")
def kernel() -> native.Kernel:
    found = native.kernel()
    if found is None:
        assert not shutil.which("g++"), "there is a compiler, and no kernel"
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture
def fresh() -> Iterator[None]:
    """Let the kernel be looked for anew, within the test and after it."""
    native.kernel.cache_clear()
    yield
    native.kernel.cache_clear()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def entries(
    dtype: torch.dtype,
    *,
    seed: int = 0,
    special: bool = False,
    noise: bool = False,
    moments: torch.dtype = torch.float32,
) -> list[Entry]:
    """One of each size, of numbers of many magnitudes; ``noise`` rounds instead of masters."""
    torch.manual_seed(seed)

    def numbers(size: Any) -> Tensor:
        found = torch.randn(size) * torch.randn(size).mul_(4).exp_()
        if special:
            found.view(-1)[:: max(1, found.numel() // 40)] = SPECIAL[int(torch.randint(len(SPECIAL), ()))]
        return found

    made = []
    for i, size in enumerate(SIZES):
        master = None if dtype == torch.float32 else numbers(size)
        param, grad = (numbers(size).to(dtype) for _ in range(2))
        found = Entry(param, grad, master, numbers(size), numbers(size).abs_(), float(1 + i * 5))
        found = found._replace(moment_seed=(1 << 32) - 5 * i - 1)
        made.append(found._replace(master=None, seed=(1 << 32) - 7 * i - 1) if noise else found)
    return [with_moments(found, moments) for found in made]


def copies(found: list[Entry]) -> list[Entry]:
    return [converted(entry, Tensor.clone) for entry in found]


def options(**changes: Any) -> Options:
    return Options(**{"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1} | changes)


def same(left: list[Entry], right: list[Entry]) -> bool:
    """Equal bits; one that is not a number is as good as another."""
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x.tensors, y.tensors, strict=True)]
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(_bits(a)[~a.isnan()], _bits(b)[~b.isnan()])
        for a, b in pairs
        if a is not None and b is not None
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


KINDS: dict[str, dict[str, Any]] = {
    "full": {"dtype": torch.float32},
    "masters": {"dtype": torch.bfloat16},
    "noise": {"dtype": torch.bfloat16, "noise": True},
}
KINDS |= {f"{name}, half": kind | {"moments": torch.bfloat16} for name, kind in KINDS.items()} | {
    f"{name}, bytes": kind | {"moments": torch.uint8} for name, kind in KINDS.items()
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [False, True], ids=["numbers", "special"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_decay": 0.0},
        {"maximize": True},
        {"beta1": 0.3, "beta2": 0.5},
        {"lr": torch.tensor(3e-3), "eps": 0.0},
        {"grad_scale": 0.37},
        {"grad_scale": torch.tensor(-1.7), "maximize": True},
    ],
    ids=["plain", "no decay", "maximize", "low betas", "lr tensor", "scale", "scale tensor"],
)
def test_kernel_equals_torch(kernel: native.Kernel, kind: str, special: bool, changes: dict[str, Any]) -> None:
    for seed in range(4):
        left = entries(**KINDS[kind], seed=seed, special=special)
        right, before = copies(left), copies(left)
        for _ in range(2):
            kernel.update(left, options(**changes))
            plain.update(right, options(**changes))
        assert same(left, right)
        assert not same(left, before)
        assert all(torch.equal(_bits(a.grad), _bits(b.grad)) for a, b in zip(left, before, strict=True))


@pytest.mark.parametrize("way", ["kernel", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_splits_change_nothing(
    kernel: native.Kernel, kind: str, way: str, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = kernel.update if way == "kernel" else plain.update
    whole = entries(**KINDS[kind])
    many, split, small = copies(whole), copies(whole), copies(whole)
    torch.set_num_threads(1)
    update(whole, options())
    torch.set_num_threads(3)
    update(many, options())
    assert same(whole, many)
    for entry in split:
        for start in range(0, entry.param.numel(), 768):
            update([piece(entry, start, min(start + 768, entry.param.numel()))], options())
    assert same(whole, split)
    monkeypatch.setattr(plain, "_HOST_PIECE", 256)
    update(small, options())
    assert same(whole, small)


def test_every_bfloat16_rounding(kernel: native.Kernel) -> None:
    """To nearest, ties to even, for every upper half of an fp32 number."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = upper | lower
        master = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
        zeros = torch.zeros_like(master)
        low = Entry(zeros.bfloat16(), zeros.bfloat16(), master.clone(), zeros.clone(), zeros.clone(), 1.0)
        kernel.update([low], options(weight_decay=0.0))
        expected = master.bfloat16()
        assert torch.equal(low.param.isnan(), expected.isnan())
        assert torch.equal(_bits(low.param)[~expected.isnan()], _bits(expected)[~expected.isnan()])


def test_noise_rounds_to_either_neighbour(kernel: native.Kernel) -> None:
    """Every upper half of an fp32 number: what bfloat16 has stays, the rest becomes a neighbour and nothing else."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    for lower in (0, 1, 0x8000, 0xFFFF):
        bits = upper | lower
        values = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
        rounded = plain.stochastic(values, 5)
        number = ~values.isnan()
        assert torch.equal(rounded.isnan(), values.isnan())
        assert torch.equal(rounded[values.isinf()].float(), values[values.isinf()])
        steps = (_bits(rounded).int() & 0xFFFF)[number] - (upper[number] >> 16)
        assert set(steps.tolist()) <= ({0, 1} if lower else {0})


def test_noise_is_right_on_average() -> None:
    """The hash has no chance in it: whoever runs this gets the same means."""
    count, steps = 1 << 16, 16
    for share in (1 / 256, 1 / 3, 0.5, 0.9):
        values = torch.full((count,), 1 + share / 128)
        ups = torch.stack([(plain.stochastic(values, 1000 + step) > 1).double() for step in range(steps)])
        exact = round(share * (1 << 16)) / (1 << 16)
        sigma = (exact * (1 - exact)) ** 0.5
        assert abs(ups.mean() - exact) < 4 * sigma / (count * steps) ** 0.5
        assert (ups.mean(1) - exact).abs().max() < 5 * sigma / count**0.5, "some step is biased"
        expected = sigma / steps**0.5
        assert abs(ups.mean(0).std() / expected - 1) < 0.02, "steps of one element are not drawn apart"
        pairs = torch.corrcoef(ups)[~torch.eye(steps, dtype=torch.bool)]
        assert pairs.abs().max() < 6 / count**0.5, "steps are correlated"


def test_layouts_and_dtypes_that_the_kernel_does_not_take_are_updated_all_the_same() -> None:
    table = entries(torch.float32)[10]
    turned = converted(table, lambda t: t.t().contiguous().t())
    plain.update([table], options())
    assert native.update([turned], options()) == [turned]
    plain.update([turned], options())
    assert same([table], [converted(turned, Tensor.contiguous)])
    for kind in KINDS:
        if kind == "full":
            continue
        mixed = entries(**KINDS[kind])[10]
        strided = mixed._replace(grad=mixed.grad.t().contiguous().t())
        expected = copies([mixed])
        plain.update(expected, options())
        plain.update(native.update([strided], options()), options())
        assert same(expected, [strided])
    values = table.param
    assert torch.equal(plain.stochastic(values.t().contiguous().t(), 3), plain.stochastic(values, 3))


def test_kernels_that_others_could_have_written_are_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tiny.cpp").write_text("int tiny() { return 3; }")
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)

    def build() -> Path:
        return compiling.build(tmp_path / "tiny.cpp", folder)

    library = build()
    right = library.read_bytes()
    assert [path.stat().st_mode & 0o777 for path in (folder, library)] == [0o700, 0o700]
    library.write_bytes(b"of somebody else")
    library.chmod(0o722)
    assert build() == library
    assert library.read_bytes() == right
    assert not caplog.records
    library.write_bytes(b"of somebody else")
    monkeypatch.setattr("os.geteuid", lambda: library.stat().st_uid + 1)
    other = build()
    assert (other.read_bytes(), other.parent == folder) == (right, False)
    assert f"others may write to {folder}" in caplog.text


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("false", "'false', '--version'"), ("no-such-compiler-anywhere", "No such file or directory")],
)
def test_without_a_kernel_the_log_says_why_and_numbers_are_the_same(
    compiler: str, reason: str, fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    left = entries(torch.bfloat16)
    right = copies(left)
    with caplog.at_level(logging.WARNING):
        assert native.update(left, options()) == left
        assert native.update(left, options()) == left
    [record] = caplog.records
    assert "no compiled kernel, as" in record.message
    assert reason in record.message
    plain.update(native.update(left, options()), options())
    plain.update(right, options())
    assert same(left, right)


def test_no_compiler_at_all(fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert native.kernel() is None
    assert "install g++" in caplog.text


def test_a_source_that_does_not_compile_names_the_error(
    kernel: native.Kernel,
    fresh: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "bad.cpp").write_text("int main( {")
    monkeypatch.setattr(native, "_SOURCE", tmp_path / "bad.cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.kernel() is None
    assert "bad.cpp:1" in caplog.text
    assert not list((tmp_path / "lt_offload" / "kernels").iterdir())


@pytest.mark.slow
def test_a_kernel_that_rounds_in_another_way_is_not_used(
    kernel: native.Kernel,
    fresh: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = native._SOURCE.read_text()
    changed = source.replace("fma(o.weight2 * g, g, round(second * o.beta2))", "o.weight2 * g * g + second * o.beta2")
    assert changed != source
    (tmp_path / "other.cpp").write_text(changed)
    monkeypatch.setattr(native, "_SOURCE", tmp_path / "other.cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.kernel() is None
    assert "its numbers are not those of torch's kernel" in caplog.text


@pytest.mark.slow
def test_a_library_of_the_wheel_comes_first_and_one_that_does_not_load_is_compiled(
    kernel: native.Kernel, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "optim" / "adamw.cpp"
    brought = compiling.shipped(source, torch.backends.cpu.get_cpu_capability())
    brought.parent.mkdir(parents=True)
    brought.write_bytes(b"of another system")
    source.write_bytes(native._SOURCE.read_bytes())
    monkeypatch.setattr(native, "_SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = native.kernel()
    assert found is not None
    assert found.library.parent == tmp_path / "lt_offload" / "kernels"
    brought.unlink()
    compiling.build_for_wheel(native._SOURCE, brought.parent)
    native.kernel.cache_clear()
    found = native.kernel()
    assert found is not None
    assert found.library == brought
