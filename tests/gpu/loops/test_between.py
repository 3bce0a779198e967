"""What loops do between steps: read, write, save, load, evaluate, generate; and what models have in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gpu.loops.bench import LOOPS, Bench, Here, in_both_ways

pytestmark = LOOPS


def trained(here: Here, batch: dict[str, torch.Tensor], losses: list[torch.Tensor]) -> None:
    """One step, as always."""
    loss = here.model(**batch).loss
    loss.backward()
    here.step()
    losses.append(loss.detach().clone())


@in_both_ways
def test_averages_that_are_kept_on_the_device(way: str, bench: Bench) -> None:
    """As TRL's reference model is, and torch's own averages; there the weights' host copies meet tensors of a GPU."""

    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        weights = list(here.model.parameters())
        one, other = ([torch.ones_like(weight, device=here.device) for weight in weights] for _ in range(2))
        for batch in here.batches:
            trained(here, batch, losses)
            for average, weight in zip(one, weights, strict=True):
                average.data.mul_(0.4).add_(weight.data, alpha=0.6)
            with torch.no_grad():
                torch._foreach_lerp_(other, weights, 0.1)
                here.seen[f"product {len(losses)}"] = other[-1] @ weights[-1].t()
        here.seen["averages"] = [average.cpu() for average in (*one, *other)]
        return losses

    weights = sum(weight.nbytes for weight in bench.fresh()[0].parameters())
    assert bench.compare(way, loop, beside=4 * weights) == []


@in_both_ways
def test_a_loop_asks_the_model_where_it_is(way: str, bench: Bench) -> None:
    """``batch.to(model.device)``, as many do with Hugging Face's models."""

    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for batch in here.batches:
            where: Any = here.model.device
            trained(here, {name: value.cpu().to(where) for name, value in batch.items()}, losses)
            here.seen["where"] = str(where)
        return losses

    assert bench.compare(way, loop) == []


@in_both_ways
def test_hooks_on_blocks(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        norms: list[torch.Tensor] = []

        def forward(module: nn.Module, args: Any, output: Any) -> None:
            norms.append((output[0] if isinstance(output, tuple) else output).detach().float().abs().amax())

        def backward(module: nn.Module, inner: Any, outer: Any) -> None:
            norms.append(outer[0].detach().float().abs().amax())

        layers = here.model.get_submodule("model.layers")
        handles = [layers[1].register_forward_hook(forward), layers[2].register_full_backward_hook(backward)]  # type: ignore[index]
        losses: list[torch.Tensor] = []
        for batch in here.batches:
            trained(here, batch, losses)
        for handle in handles:
            handle.remove()
        trained(here, here.batches[0], losses)
        here.seen["norms"] = [norm.clone() for norm in norms]
        return losses

    assert bench.compare(way, loop) == []
