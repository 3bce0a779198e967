"""How long a sequence takes if every copy moves a whole buffer: its memory comes and goes at once.

The dynamic program of POFO (NeurIPS 2021) lets memory be given back and taken byte by byte; for its experiments the
paper turns such solutions into ones like these. Knows one link in each direction; chooses nothing but when to fetch.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.planners.pofo.copies import Travel, fetch_earlier, latest_fetches
from lt_offload.plan.planners.pofo.sequence import SequenceWalk, memory


def simulated_s(walked: SequenceWalk, memory_bytes: int, bytes_per_s: float) -> float:
    """Return the time of a sequence within ``memory_bytes``; infinity if it does not fit.

    Copies queue per direction: offloads as their data are made, prefetches in the order of need. A computation waits
    until what it reads is there and what is on its way out has left enough room.
    """
    free = memory_bytes - np.array(memory(walked), dtype=np.int64)
    if free.min() < 0:
        return inf
    travels = [
        Travel(index=at, bytes=item.bytes, release_after=item.departs, needed=item.returns, fetch=item.returns)
        for at, item in enumerate(walked.items)
        if item.departs is not None and item.returns is not None and item.returns > item.departs + 1
    ]
    if travels:
        starts = np.concatenate([[0.0], np.cumsum(walked.seconds)])
        latest = latest_fetches(travels, starts, bytes_per_s)
        for slack in (0, 1):
            fetch_earlier(travels, free, [begin - slack for begin in latest], first=0)
    return _run(walked, travels, free, bytes_per_s)


def _run(walked: SequenceWalk, travels: list[Travel], free: NDArray[np.int64], bytes_per_s: float) -> float:
    """Compute one after the other; ``free`` is what each computation leaves when all that may be gone is gone."""
    made: dict[int, list[Travel]] = {}
    fetched: dict[int, list[Travel]] = {}
    for travel in sorted(travels, key=lambda travel: (travel.needed, -travel.index)):
        made.setdefault(walked.items[travel.index].uses[0], []).append(travel)
        fetched.setdefault(travel.fetch, []).append(travel)
    now = out = back = 0.0
    gone: dict[int, float] = {}
    """By item: when its offload has ended."""
    there: dict[int, float] = {}
    for at, seconds in enumerate(walked.seconds):
        leaving = sorted(
            (gone[t.index], t.bytes) for t in travels if t.release_after < at < t.fetch and gone[t.index] > now
        )
        held = sum(nbytes for _, nbytes in leaving)
        for ends, nbytes in leaving:
            if held <= free[at]:
                break
            now, held = ends, held - nbytes
        for travel in fetched.get(at, ()):
            back = max(back, now, gone[travel.index]) + travel.bytes / bytes_per_s
            there[travel.index] = back
        now = max([now, *(there[t.index] for t in travels if t.needed == at)]) + seconds
        for travel in made.get(at, ()):
            out = max(out, now) + travel.bytes / bytes_per_s
            gone[travel.index] = out
    return now
