"""Hands an open file without a name to other processes of the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

from lt_offload.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFile:
    """A file that a process of this machine has open, as it tells others."""

    process: int
    descriptor: int
    identity: tuple[int, int, int]
    """Device, inode and bytes: a process of another container may have the same number."""

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """Return what this process tells of its own."""
        return cls(process=os.getpid(), descriptor=descriptor, identity=_identity(descriptor))

    def open(self) -> int:
        """Return a descriptor of this process, to be closed.

        Raises:
            ConfigError: if the system does not allow that, or the processes do not see each other.
        """
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        why = "it is another file there: the processes have process numbers of their own (containers)"
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if _identity(opened) == self.identity:
                return opened
            os.close(opened)
        except OSError as error:
            why = str(error)
        raise ConfigError(
            f"devices: the processes of this machine share memory, and {path} cannot be opened: {why}; start all of "
            "them by the same user, in one container, with /proc mounted, or set devices=1"
        )


def _identity(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size
