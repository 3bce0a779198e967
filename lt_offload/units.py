"""Sizes and durations as people write them. Knows nothing of devices or plans."""

from __future__ import annotations

import re

from lt_offload.errors import ConfigError

_FACTORS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: str | int | float, *, setting: str = "memory") -> int:
    """Return ``value`` in bytes: ``"12GB"`` is 12e9, ``"12GiB"`` is 12 * 2**30, a number is bytes already.

    Args:
        value: the size; units are case-insensitive (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB).
        setting: name of the setting, for the error.

    Raises:
        ConfigError: if ``value`` is not a positive size.
    """
    match = _SIZE.fullmatch(str(value)) if not isinstance(value, bool) else None
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None or float(match[1]) <= 0:
        raise ConfigError(f'{setting}={value!r} is not a size; write "10GB", "10GiB" or a positive number of bytes')
    return int(float(match[1]) * factor)


def format_bytes(count: float) -> str:
    """Return ``count`` bytes in decimal units with three significant digits, e.g. ``"9.87 GB"``."""
    size, units = float(count), ["TB", "GB", "MB", "kB", "B"]
    unit = units.pop()
    while units and abs(size) >= 999.5:
        size, unit = size / 1000, units.pop()
    return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 99.95 else f"{size:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration with a fitting unit, e.g. ``"12.3 ms"`` or ``"1.85 s"``."""
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if abs(seconds) * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 120 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
