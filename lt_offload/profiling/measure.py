"""Measurement of a model with its real weights on the device it will be trained on, one block at a time.

The device needs room for one block, its activations and one batch; the model may be larger than the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lt_offload import limits
from lt_offload.arguments import checked, shown
from lt_offload.compat.torch import reset_dynamo, tree_flatten, tree_leaves, tree_map, tree_unflatten
from lt_offload.errors import ConfigError
from lt_offload.machine.driver import current, find_device
from lt_offload.model.blocks import Structure, find_blocks
from lt_offload.model.calls import BlockNode, EntryNode, plainly
from lt_offload.model.compiled import gradients_aside, is_compiled, uncompiled
from lt_offload.model.location import located, staged
from lt_offload.model.parts import Cutter, check_micro_batches, in_parts
from lt_offload.model.snapshot import untouched
from lt_offload.model.state.contexts import ambient, within
from lt_offload.profiling.assemble import Progress
from lt_offload.profiling.machine import measure_machine
from lt_offload.profiling.optimizer import AnyOptimizer, build_optimizer
from lt_offload.profiling.step.first import FirstStep, LossWithBlock, Run, find_loss
from lt_offload.schema.profile import HardwareProfile, OptimizerProfile, Profile


@checked
def profile(
    model: nn.Module,
    sample_batch: Any,
    *,
    optimizer: AnyOptimizer,
    device: torch.device | str | None = None,
    hardware: HardwareProfile | None = None,
    updates: OptimizerProfile | None = None,
    run: Run | None = None,
    structure: Structure | None = None,
    blocks: str | None = None,
    micro_batches: int = 1,
    loss: Callable[[Structure], LossWithBlock | None] | None = None,
    on_progress: Progress | None = None,
) -> Profile:
    """Measure ``model`` on ``sample_batch``; neither weights, gradients, buffers nor random numbers change.

    If blocks are compiled, everything that ``torch.compile`` has compiled in this process is compiled again when it is
    called next, as in a process that starts.

    Args:
        model: with its weights, anywhere; its modules are measured in the mode (training or not) they are in.
        sample_batch: of the largest shape that training will see. A mapping is passed as keyword arguments, a tuple or
            list as positional ones.
        optimizer: the one that will be used, what makes it from a list of parameters, e.g. ``torch.optim.AdamW``, or
            a name, as of :func:`lt_offload.profile_config`.
        device: where blocks run; None: CUDA if there is any, otherwise the CPU (for the emulated device).
        hardware: the machine, if it has been measured before; how its lanes slow each other down is not measured then.
        updates: what updates by this optimizer cost, if that has been measured before on this machine.
        run: calls the model on a batch and returns the loss or something that holds it, which the caller may keep until
            the next batch; None: the model itself, whose result often holds the logits.
        structure: the model's blocks, if they have been found before.
        blocks: name of the ``nn.ModuleList`` or ``nn.Sequential`` that holds the layers, e.g. ``"h"``; None: they are
            found by structure.
        micro_batches: parts of the batch that go through each block in turn; see :mod:`lt_offload.model.parts`.
        loss: returns what computes the last block together with the loss, or None: the model does.
        on_progress: is told what is being measured.

    Raises:
        ModelError: if the model has no block sequence, or calls its blocks in another order or more than once.
        ConfigError: if there are fewer samples than ``micro_batches``, or there is no such ``optimizer`` or ``device``.
        UnsupportedError: if the model could not be trained exactly; names the block or weight.
        OverBudget: if a GPU has no memory for one block of the batch, or for its loss.
    """
    say = on_progress or (lambda message: None)
    check_micro_batches(micro_batches)
    if all(leaf is None or isinstance(leaf, int | float) for leaf in tree_leaves(sample_batch)):
        raise ConfigError(f"sample_batch={shown(sample_batch)} holds no tensor; give a batch as the model takes it")
    target = find_device(device)
    structure = structure or find_blocks(model, blocks)
    optimizer = build_optimizer(optimizer, [p for p in model.parameters() if p.requires_grad])
    limits.check("optimizer", limits.Setup(model=model, optimizers=[optimizer]))
    machine = measure_machine(model, optimizer, target, hardware=hardware, updates=updates, say=say)

    def made(structure: Structure) -> FirstStep:
        both = None if loss is None else loss(structure)
        return FirstStep(
            model, structure, optimizer, target, machine, parts=micro_batches, loss=both, code=uncompiled, say=say
        )

    with ExitStack() as stack:
        if any(map(is_compiled, model.modules())):
            stack.callback(reset_dynamo)  # training compiles for the shapes that it sees, not for the sample's
        trial = partial(_trial, model, sample_batch, target, optimizer=optimizer, run=run)
        say("running the model once")
        step = stack.enter_context(ran(made, structure, trial, run or call_with_batch(model)))
        return step.profile(micro_batches)


def check_use(
    model: nn.Module,
    sample_batch: Any,
    *,
    device: torch.device,
    optimizer: Optimizer,
    structure: Structure,
    run: Run | None = None,
    micro_batches: int = 1,
) -> Structure:
    """Run ``model`` once to refuse one that no plan trains exactly; return its blocks in the order of their calls."""
    made = partial(FirstStep, model, optimizer=optimizer, device=device, parts=micro_batches, code=uncompiled)
    trial = partial(_trial, model, sample_batch, device, optimizer=optimizer, run=run)
    with ran(made, structure, trial, run or call_with_batch(model)) as step:
        return step.structure


@contextmanager
def _trial(model: nn.Module, sample_batch: Any, device: torch.device, **others: Any) -> Iterator[Any]:
    """Enclose runs of ``model`` that leave no trace; yields the batch on ``device``."""
    devices = [device.index] if device.type == "cuda" else []
    # The batch as well: a step may write to it, and training has yet to see it.
    roots = {type(model).__name__: model, "sample_batch": sample_batch, **others}
    with current(device), untouched(devices=devices, **roots):
        yield tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, sample_batch)


@contextmanager
def ran(
    make: Callable[[Structure], FirstStep],
    structure: Structure,
    trial: Callable[[], AbstractContextManager[Any]],
    run: Run,
) -> Iterator[FirstStep]:
    """Run a step, whose blocks may be measured within the context: each ran apart, and nothing has trained.

    Another ``structure`` is tried where the step calls none of its layers, in another ``trial``, which encloses a run
    and yields its batch: a step may take out of that. What ``run`` returns is taken to stay.
    """
    step = make(structure)
    model, device = step.model, step.device
    staying = [*(parameter for _, parameter in structure.rest), *model.buffers()]
    with ExitStack() as stack:
        batch = stack.enter_context(trial())
        # The trial's backward would add to the gradients that a user has, in place.
        aside = gradients_aside([*model.parameters()])
        for context in (plainly(model), located(model, device), aside, staged(staying, device)):
            stack.enter_context(context)
        stack.enter_context(torch.enable_grad())
        stack.callback(step.let_go)
        with step.watching(batch, ApartRuns(step.reached)):
            result = run(batch)
            other = step.returned(result)
        if other is None:
            loss = find_loss(result)
            if loss is not None and loss.requires_grad:
                with step.in_backward():
                    torch.autograd.backward(loss)
            step.reached()
            yield step
            return
    with ran(make, other, trial, run) as step:
        yield step


def call_with_batch(model: nn.Module) -> Run:
    """Return a function that calls ``model`` on a batch."""

    def run(batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)

    return run


class ApartRuns:
    """Joins blocks to an outer graph whose backward ends at them, so that activations of one block at most are kept.

    ``first`` is called when the backward comes to the first block.
    """

    def __init__(self, first: Callable[[], object]) -> None:
        self._first = first
        self._anchor = torch.zeros((), requires_grad=True)

    def __call__(
        self,
        index: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        body: Callable[..., Any],
        *,
        cutter: Cutter | None,
        again: Callable[..., Any] | None,
        reached: Callable[[int], None],
    ) -> Any:
        """Run a block; the arguments are those of ``Survey.forward`` in ``execute/training/survey.py``."""
        leaves, spec = tree_flatten((args, kwargs))
        del args, kwargs
        entered = [self._enter(index, leaf) for leaf in leaves]
        leaves.clear()
        args, kwargs = tree_unflatten(entered, spec)
        entered.clear()
        with within(ambient()):  # no cast of a weight outlives its block
            out = (body if cutter is None else in_parts(body, cutter))(*args, **kwargs)
        del args, kwargs
        numbers = iter(range(1 << 30))

        def connect(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            number = next(numbers)
            if not leaf.requires_grad:
                return leaf.detach()
            # In a list, as a tensor that a function returns as it came would become a view of an argument.
            box = [leaf.detach()]
            return _Interface.apply(self._anchor, box, index, lambda _: reached(number), self._first)  # type: ignore[no-untyped-call]

        return tree_map(connect, out)

    def _enter(self, index: int, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return EntryNode.apply(self._anchor, leaf.detach(), index, 0, _ignored)  # type: ignore[no-untyped-call]
        return leaf


def _ignored(_gradient: Tensor) -> None:
    pass


class _Interface(BlockNode):
    """The node of a block in the outer graph: unlike a leaf, it does not hold the block's output."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        anchor: Tensor,
        box: list[Tensor],
        index: int,
        reached: Callable[[int], None],
        first: Callable[[], object],
    ) -> Tensor:
        ctx.index, ctx.reached, ctx.first = index, reached, first
        return box.pop()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        ctx.first()  # while the gradient is there with which the block's backward begins
        ctx.reached(0)
        return (None,) * 5
