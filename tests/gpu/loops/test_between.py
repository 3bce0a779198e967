"""What loops do between steps: read, write, save, load, evaluate, generate; and what models have in them."""

from __future__ import annotations

import copy
import io
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
def test_weights_are_read_and_written(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for batch in here.batches:
            trained(here, batch, losses)
            weights = here.model.named_parameters()
            here.seen[f"weights {len(losses)}"] = {name: weight.detach().cpu().clone() for name, weight in weights}
            with torch.no_grad():
                for parameter in here.model.parameters():
                    parameter.clamp_(-0.05, 0.05)
        return losses

    assert bench.compare(way, loop) == []


@in_both_ways
def test_weights_are_saved_and_loaded(way: str, bench: Bench) -> None:
    """The best so far is kept in memory, the last in a file; one is loaded in the middle."""

    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for number, batch in enumerate(here.batches):
            trained(here, batch, losses)
            file = io.BytesIO()
            torch.save({"model": here.model.state_dict(), "optimizer": here.optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, map_location="cpu")
            seen = copy.deepcopy(saved)  # what is loaded becomes the optimizer's own, if it is there already
            here.seen[f"saved {number}"] = {"model": seen["model"], "states": seen["optimizer"]["state"]}
            if number == 0:
                best = copy.deepcopy(here.model.state_dict())
            if number == 1:
                here.model.load_state_dict(best)
            if number == 2:
                here.optimizer.load_state_dict(saved["optimizer"])
        return losses

    assert bench.compare(way, loop) == []


@in_both_ways
def test_an_average_of_the_weights(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        average: dict[str, torch.Tensor] = {}
        for batch in here.batches:
            trained(here, batch, losses)
            for name, parameter in here.model.named_parameters():
                new = parameter.detach().cpu()
                average[name] = average.get(name, new).mul(0.9).add(new, alpha=0.1)
        here.seen["average"] = average
        return losses

    assert bench.compare(way, loop) == []


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
def test_torchs_averaged_model(way: str, bench: Bench) -> None:
    """Where the model is: on the device in plain PyTorch, on the host within a session."""

    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        average = torch.optim.swa_utils.AveragedModel(here.model, multi_avg_fn=latest)
        for batch in here.batches:
            trained(here, batch, losses)
            average.update_parameters(here.model)
        here.seen["average"] = {name: value.cpu() for name, value in average.module.state_dict().items()}
        return losses

    assert bench.compare(way, loop) == []


def latest(averages: Any, weights: Any, _: Any) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(weight)


@in_both_ways
def test_states_are_read_and_written(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for batch in here.batches:
            trained(here, batch, losses)
            for state in here.optimizer.state.values():
                state["exp_avg"].mul_(0.5)
            here.seen[f"states {len(losses)}"] = [
                state["exp_avg_sq"].cpu().clone() for state in here.optimizer.state.values()
            ]
        return losses

    assert bench.compare(way, loop) == []


@in_both_ways
def test_evaluation_between_steps(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for number, batch in enumerate(here.batches):
            trained(here, batch, losses)
            here.model.eval()
            with torch.inference_mode() if number % 2 else torch.no_grad():
                output = here.model(**here.batches[0])
            here.seen[f"loss {number}"], here.seen[f"logits {number}"] = output.loss.clone(), output.logits.clone()
            here.model.train()
        return losses

    assert bench.compare(way, loop, dropout=0.1) == []


@in_both_ways
def test_generation_between_steps(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        prompt = torch.arange(3, 9, device=here.device)[None]
        for number, batch in enumerate(here.batches[:2]):
            trained(here, batch, losses)
            here.model.eval()
            tokens: Any = here.model.generate(prompt, max_new_tokens=4, do_sample=number == 1)  # type: ignore[operator]
            here.seen[f"tokens {number}"] = tokens
            here.model.train()
        return losses

    assert bench.compare(way, loop) == []


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
def test_checkpointing_in_the_model(way: str, bench: Bench) -> None:
    """What is stored is the plan's business then; the numbers are the same."""

    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for batch in here.batches:
            trained(here, batch, losses)
        return losses

    assert bench.compare(way, loop, dropout=0.1, checkpointed=True) == []


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


@in_both_ways
def test_gradients_are_looked_at(way: str, bench: Bench) -> None:
    def loop(here: Here) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for number, batch in enumerate(here.batches):
            loss = here.model(**batch).loss
            loss.backward()
            here.seen[f"gradients {number}"] = [
                p.grad.detach().cpu().clone() for p in here.model.parameters() if p.grad is not None
            ]
            here.step()
            losses.append(loss.detach().clone())
        return losses

    assert bench.compare(way, loop, delayed=True) == []
