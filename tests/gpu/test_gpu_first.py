"""The first minute on a GPU: where its memory goes while training begins, and what page-locking host memory costs."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lt_offload
from lt_offload.machine import driver
from lt_offload.machine import zero_copy as mapped
from lt_offload.schema.profile import Profile
from tests.gpu.machine import between
from tests.gpu.target import Target, used_by_all
from tests.gpu.worker import WARM_UP, call

Found = Callable[..., None]

pytestmark = [pytest.mark.only("cuda", "cpu"), pytest.mark.no_cover]


@pytest.mark.quick
def test_where_device_memory_goes(target: Target, found: Found, tmp_path: Path) -> None:
    """Driver and NVML before and after installation, retries of the allocator, what was predicted and what came."""
    size, steps = ("large", 5) if target.real else ("small", 2)
    file = tmp_path / "profile.json"
    measured = call("profile", kind=target.kind, size=size, file=str(file))
    profile = Profile.load(file)
    plan = lt_offload.solve(profile, memory=between(profile, 0.5))
    saved = plan.save(tmp_path / "plan.json")
    before = used_by_all() if target.cuda else 0
    seen = call("train", kind=target.kind, size=size, plan=str(saved), steps=steps, before=before)
    predicted = plan.predicted
    found(
        stages=seen["stages"],
        retries=[one["retries"] for one in seen["allocator"]],
        frees=[one["frees"] for one in seen["allocator"]],
        budget=plan.budget_bytes,
        device_peak={"predicted": predicted.device_peak_bytes, "measured": seen["peak"], "by": seen["peak_source"]},
        host={"predicted": predicted.host_peak_bytes, "measured": seen["host_bytes"]},
        iteration_s={"predicted": predicted.iteration_s, "measured": seen["iteration_s"]},
        context={"planned": plan.context_bytes, "page_tables": profile.page_table_bytes},
        slack={"measured": profile.slack_bytes, "share": profile.slack_share},
        install_s=seen["install_s"],
        **measured,
    )
    assert list(seen["stages"])[-4:] == ["opened", "installed", "first iteration", "last iteration"]
    assert len(seen["allocator"]) == WARM_UP + steps
    assert seen["peak"] <= plan.budget_bytes


PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
SHARED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS


@pytest.mark.quick
@pytest.mark.parametrize("huge", [False, True], ids=["shared, as the engine", "private, huge pages"])
def test_registering_host_memory(huge: bool, target: Target, found: Found) -> None:
    """Seconds per GiB to touch, lock and unlock it, and the device memory that its page tables take.

    The engine maps shared memory, which children of the process see as it is. Private memory could have huge pages, but
    would have to be kept from children: they would copy it at the next write while the GPU went on with the old pages.
    """
    nbytes = (2 << 30) if target.real else (16 << 20)
    memory = mmap.mmap(-1, nbytes, flags=PRIVATE if huge else SHARED)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(mmap.MADV_DONTFORK)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - start
        return result

    timed("touch_s", tensor.zero_)
    if not target.cuda:  # there is nobody to register it with
        found(nbytes=nbytes, **seconds)
        assert not tensor.any()
        return
    place = target.torch_device
    before, exact = driver.beside_bytes(place)
    locked = timed("register_s", lambda: mapped.register(tensor.data_ptr(), nbytes))
    after, _ = driver.beside_bytes(place)
    unlocked = timed("unregister_s", lambda: mapped.unregister(tensor.data_ptr()))
    tables = driver.page_table_bytes(nbytes)
    found(nbytes=nbytes, grown=after - before, expected=tables, exact=exact, **seconds)
    assert (locked, unlocked) == (0, 0)
    if exact and not huge:
        assert after - before <= tables + (8 << 20)
