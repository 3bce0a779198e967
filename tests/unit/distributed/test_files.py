"""A file without a name, opened by what another process tells of it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from lt_offload.distributed.files import OpenFile
from lt_offload.errors import ConfigError


def opened() -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, b"some bytes")
    return descriptor


def test_it_is_the_same_file() -> None:
    first = opened()
    second = OpenFile.of(first).open()
    assert first != second
    assert os.pread(second, 4, 5) == b"byte"
    os.close(first)
    os.pwrite(second, b"B", 5)  # it is there as long as somebody has it
    assert os.pread(second, 4, 5) == b"Byte"
    os.close(second)


def test_what_cannot_be_opened_is_said() -> None:
    told = OpenFile.of(opened())
    for wrong in (replace(told, descriptor=told.descriptor + 1000), replace(told, identity=(0, 0, 0))):
        with pytest.raises(ConfigError, match=f"/proc/{os.getpid()}/fd/.* cannot be opened: .*in one container"):
            wrong.open()
    os.close(told.descriptor)
