"""Sums of several machines: partial sums go from one machine to the next, and the whole comes back.

One process that takes the batches of all ranks in turn adds ``((r0 + r1) + r2) + r3``. Two sums of machines, added to
each other, are ``(r0 + r1) + (r2 + r3)``, which is another number. So machine 0 sends the sum of its ranks to machine
1, which adds its own to that, one by one, and so on; the last machine has the sum of all, which goes the same way
back. Machines in the middle send and receive twice as many bytes as there are, the first and the last one once as many:
with two machines as many as a ring all-reduce, with many not much more. Parts of a megabyte follow each other, so that
all machines are at work at the same time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_offload.errors import PlanError

PART_BYTES = 1 << 20
"""Bytes that are sent at once."""
_AHEAD = 4
"""So many parts, for each machine on the way to the last one, are sent before the sum of the first one is awaited."""


class MachineChain:
    """The way from one machine to the next, for one process of each.

    Args:
        ranks: their numbers, in the order of machines.
        group: theirs, of ``torch.distributed``, for tensors in host memory; nobody else uses it.
    """

    def __init__(self, ranks: Sequence[int], group: Any) -> None:
        self._group = group
        place = ranks.index(dist.get_rank())
        self._before = ranks[place - 1] if place > 0 else None
        self._after = ranks[place + 1] if place + 1 < len(ranks) else None
        self._lag = _AHEAD * (len(ranks) - 1 - place)

    def add_up(self, rows: Sequence[Sequence[Tensor]], *, number: int = 0) -> None:
        """Let the first tensor of each of ``rows`` be the sum of all, on all machines, in the order of ranks.

        Waits for the other machines, however long that takes.

        Args:
            rows: flat, in host memory; each has what the processes of this machine have, in their order.
            number: what this is, alike on all machines.

        Raises:
            PlanError: if the machine before this one adds up something else.
        """
        parts = list(_parts(rows))
        with torch.no_grad():
            told = self._agree(number)
            before = self._from_before(parts) if self._before is not None else None
            ups: deque[Any] = deque()
            downs: list[Any] = []
            for turn in range(len(parts) + self._lag):
                if turn < len(parts):
                    self._add(parts[turn], None if before is None else next(before))
                    self._pass_on(parts[turn][0], ups, downs)
                if self._after is not None and turn >= self._lag:
                    total = parts[turn - self._lag][0]
                    ups.popleft().wait()  # what was sent is overwritten
                    self._receive(total, self._after).wait()
                    if self._before is not None:
                        downs.append(self._send(total, self._before))
            for work in (*told, *downs):
                work.wait()

    def _agree(self, number: int) -> list[Any]:
        """Check that the machine before this one is at the same thing; return what tells the next one."""
        # First this: nothing may be on its way to a machine that will not take it when there is an error.
        if self._before is not None:
            received = torch.empty(1, dtype=torch.int64)
            self._receive(received, self._before).wait()
            if int(received) != number:
                raise PlanError(
                    f"machines add up in different orders: process {self._before} is at {int(received)}, process "
                    f"{dist.get_rank()} at {number}"
                )
        return [self._send(torch.tensor([number]), self._after)] if self._after is not None else []

    def _pass_on(self, total: Tensor, ups: deque[Any], downs: list[Any]) -> None:
        """Send what has been added so far; from the last machine it goes back."""
        if self._after is not None:
            ups.append(self._send(total, self._after))
        elif self._before is not None:
            downs.append(self._send(total, self._before))

    def _from_before(self, parts: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
        """Yield the sum of each part on the machines before this one; it is there until the next one is asked for."""
        assert self._before is not None
        coming: deque[tuple[Tensor, Any]] = deque()
        for first, *_ in parts:
            room = torch.empty_like(first)
            coming.append((room, self._receive(room, self._before)))
            if len(coming) > 1:
                yield _arrived(coming.popleft())
        while coming:
            yield _arrived(coming.popleft())

    @staticmethod
    def _add(part: Sequence[Tensor], before: Tensor | None) -> None:
        first, *others = part
        if before is not None:
            first.add_(before)  # the sum of two does not depend on which one comes first
        for other in others:
            first.add_(other)

    def _send(self, tensor: Tensor, to: int) -> Any:
        return dist.isend(tensor.view(torch.uint8), to, group=self._group)

    def _receive(self, tensor: Tensor, source: int) -> Any:
        return dist.irecv(tensor.view(torch.uint8), source, group=self._group)


def _arrived(coming: tuple[Tensor, Any]) -> Tensor:
    tensor, work = coming
    work.wait()
    return tensor


def _parts(rows: Sequence[Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
    """Yield what is sent at once, of each of ``rows`` after the one before."""
    for row in rows:
        most = max(1, PART_BYTES // row[0].element_size())
        if row[0].numel():
            yield from zip(*(torch.split(tensor, most) for tensor in row), strict=True)


class Aside:
    """Work that cannot be interrupted, in a thread of its own, so that the thread that waits for it can give it up.

    Args:
        work: is begun.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        # A daemon: a receive from a machine that is gone never returns, and would keep this process from ending.
        self._thread = threading.Thread(target=self._run, name="lt_offload-network", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return not self._thread.is_alive()

    def ends_within(self, seconds: float) -> bool:
        """Wait so long, or until it has ended; return whether it has."""
        self._thread.join(seconds)
        return self.is_completed()

    def wait(self) -> None:
        """Wait for its end; raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
