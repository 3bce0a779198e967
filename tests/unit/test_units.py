from __future__ import annotations

import pytest

from lt_offload.errors import ConfigError
from lt_offload.units import format_bytes, format_seconds, parse_bytes, round_up


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("12GB", 12 * 10**9),
        ("12GiB", 12 * 2**30),
        ("12 gb", 12 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("1e3k", 10**6),
        ("7T", 7 * 10**12),
        ("640", 640),
        ("512B", 512),
        (4096, 4096),
        (2.5e9, 2_500_000_000),
    ],
)
def test_parse_bytes(value: str | float, expected: int) -> None:
    assert parse_bytes(value) == expected


@pytest.mark.parametrize("value", ["", "GB", "12XB", "12 G B", "-1GB", "0", 0, -5, "nan", "1,5GB", True, None])
def test_parse_bytes_refuses(value: object) -> None:
    with pytest.raises(ConfigError, match="host_memory=.*is not a size.*10GB"):
        parse_bytes(value, setting="host_memory")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("0.8", '0.8 bytes; did you mean "0.8GB"?'),
        (0.8, 'did you mean "0.8GB"?'),
        ("12", '12 bytes; did you mean "12GB"?'),
        (24, 'did you mean "24GB"?'),
        ("511", 'did you mean "511GB"?'),
        ("80%", 'but a share; did you mean "12GB"?'),
        ("12.5 %", "but a share"),
        ("0.4B", "less than a byte"),
        ("1,5GB", 'did you mean "1.5GB"?'),
        ("1e400GB", "too large"),
        ("9e30", "too large"),
        ("12XB", 'write "10GB"'),
    ],
)
def test_parse_bytes_says_what_was_meant(value: str | float, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_bytes(value)
    assert str(refused.value).startswith(f"memory={value!r} is not a size")
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (9_870_000_000, "9.87 GB"),
        (12_000_000_000, "12 GB"),
        (128_400_000_000, "128 GB"),
        (999_600, "1 MB"),
        (2.5e13, "25 TB"),
    ],
)
def test_format_bytes(count: float, expected: str) -> None:
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (2e-6, "2 us"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (1.849, "1.85 s"),
        (119, "119 s"),
        (150, "2 min 30 s"),
    ],
)
def test_format_seconds(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize("count", [1, 517, 12_345, 10**9, 3 * 2**30, 123_456_789_012])
def test_format_then_parse_is_close(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(("count", "rounded"), [(0, 0), (1, 8), (8, 8), (9, 16), (2**40 + 1, 2**40 + 8)])
def test_rounding_up(count: int, rounded: int) -> None:
    assert round_up(count, 8) == rounded
