"""Sizes, counts, dtypes and durations as people write them, budgets of memory, and sizes rounded up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lt_offload.errors import ConfigError

_FACTORS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("", 1000), ("IB", 1024))
}
FEW_BYTES = 512
"""Settings of fewer bytes than this need a unit."""
_MOST = 10**18
"""More bytes than any machine has."""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: str | int | float, *, setting: str = "memory", least: int = FEW_BYTES) -> int:
    """Return ``value`` in bytes: ``"12GB"`` is 12e9, ``"12GiB"`` is 12 * 2**30, a number is bytes already.

    Args:
        value: the size; units are case-insensitive (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB).
        setting: name of the setting, for the error.
        least: smaller numbers need a unit: in a setting nobody means so few bytes, and ``memory: 12`` is a slip.

    Raises:
        ConfigError: if ``value`` is not a positive size; says what may have been meant.
    """
    match = _SIZE.fullmatch(str(value)) if not isinstance(value, bool) else None
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is not None and factor is not None:
        count = float(match[1]) * factor
        if (1 if match[2] else least) <= count <= _MOST:
            return int(count)
    raise ConfigError(f"{setting}={value!r} is not a size{_meant(str(value), match, least)}")


def _meant(text: str, match: re.Match[str] | None, least: int) -> str:
    """Return the correction of ``text`` as the rest of a sentence."""
    if match is not None and not match[2] and 0 < float(match[1]) < least:
        return f' but {text.strip()} bytes; did you mean "{match[1]}GB"? (else "10GB", "10GiB" or a number of bytes)'
    if match is not None and match[2].upper() in _FACTORS and float(match[1]) > 0:
        few = float(match[1]) * _FACTORS[match[2].upper()] < 1
        return f' of any memory: it is {"less than a byte" if few else "too large"}; write "10GB" or "10GiB"'
    if (match is not None and float(match[1]) == 0) or text.lstrip().startswith("-"):
        return ' that anything fits into; write "10GB" or "10GiB", or leave it out for all that is free'
    if re.fullmatch(r"\s*[0-9.]+\s*%\s*", text):
        return ' but a share; did you mean "12GB"? Write "10GB", "10GiB" or a number of bytes, or leave it out for all'
    comma = _SIZE.fullmatch(text.replace(",", "."))
    near = f'; did you mean "{comma[1]}{comma[2]}"? Write' if comma and comma[2].upper() in _FACTORS else "; write"
    return f'{near} "10GB", "10GiB" or a positive number of bytes'


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory that may be taken: so many bytes, or all that there is where it is asked for.

    Made once, of what a user wrote (:meth:`of`), and resolved once, against a machine (:meth:`resolved`).
    """

    nbytes: int | None = None
    """None: all that there is."""

    @classmethod
    def of(cls, value: Memory, *, setting: str = "memory", least: int = FEW_BYTES) -> Budget:
        """Return the budget that ``value`` names, as :func:`parse_bytes` reads it; None: all that there is.

        Raises:
            ConfigError: if ``value`` is no size.
        """
        if isinstance(value, Budget):
            return value
        return cls(None if value is None else parse_bytes(value, setting=setting, least=least))

    def resolved(self, there_is: Callable[[], int]) -> int:
        """Return the bytes that may be taken where ``there_is`` tells what there is; it is asked if that matters."""
        return there_is() if self.nbytes is None else self.nbytes

    def less(self, nbytes: int) -> Budget:
        """Return the budget beside ``nbytes`` that are taken; one byte at least."""
        return self if self.nbytes is None else Budget(max(1, self.nbytes - nbytes))


def is_count(value: object) -> bool:
    """Return whether ``value`` is a whole number of at least 1; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype that is written as PyTorch has it or as text: both ``torch.float16`` and its name."""
    return str(dtype).removeprefix("torch.")


Memory = Budget | str | int | float | None
"""A budget, or what people write for one."""


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``count``."""
    return -(-count // multiple) * multiple


def format_bytes(count: float) -> str:
    """Return ``count`` bytes in decimal units with three significant digits, e.g. ``"9.87 GB"``."""
    size, units = float(count), ["TB", "GB", "MB", "kB", "B"]
    unit = units.pop()
    while units and abs(size) >= 999.5:
        size, unit = size / 1000, units.pop()
    return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 99.95 else f"{size:.3g} {unit}"


def format_rate(per_s: float) -> str:
    """Return something per second with at least three digits."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def format_seconds(seconds: float) -> str:
    """Return a duration with a fitting unit, e.g. ``"12.3 ms"`` or ``"1.85 s"``."""
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if abs(seconds) * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 120 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
