"""How batches come to the device: pinned, late, on a stream of one's own, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from tests.gpu.loops.bench import LOOPS, Bench, Here, in_both_ways

pytestmark = [*LOOPS, pytest.mark.only("cuda", "fake")]


def on_host(here: Here) -> list[dict[str, torch.Tensor]]:
    return [{name: value.cpu() for name, value in batch.items()} for batch in here.batches]


def steps(here: Here, batches: Iterable[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        loss = here.model(**batch).loss
        loss.backward()
        here.step()
        losses.append(loss.detach().clone())
    return losses


class Prefetcher:
    """Copies the next batch on a stream of its own, as in NVIDIA's examples (apex, DeepLearningExamples)."""

    def __init__(self, batches: Iterable[dict[str, torch.Tensor]]) -> None:
        self.batches = iter(batches)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.preload()

    def preload(self) -> None:
        try:
            batch = next(self.batches)
        except StopIteration:
            self.next: dict[str, torch.Tensor] | None = None
            return
        with torch.cuda.stream(self.stream):
            self.next = {name: value.cuda(non_blocking=True) for name, value in batch.items()}
            self.next["labels"] = torch.where(self.next["attention_mask"] == 0, -100, self.next["labels"])

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.next is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.next
            for value in batch.values():
                value.record_stream(torch.cuda.current_stream())
            self.preload()
            yield batch


@in_both_ways
def test_a_prefetcher_with_a_stream(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        pinned = [{name: value.pin_memory() for name, value in batch.items()} for batch in on_host(here)]
        return steps(here, Prefetcher(pinned))

    assert bench.compare(way, loop) == []


@in_both_ways
def test_the_sample_on_the_host(way: str, bench: Bench) -> None:
    """A loop that asks for the first batch of its loader has not put it anywhere yet."""
    expected, _ = bench.plainly(lambda here: steps(here, here.batches))
    model, optimizer = bench.fresh()
    here = Here(model=model, optimizer=optimizer, batches=bench.batches(on_device=False), device=bench.device)
    with bench.within(way, here):
        torch.manual_seed(1)
        losses = steps(here, bench.batches())
    assert all(map(torch.equal, expected.losses, (loss.cpu() for loss in losses)))
