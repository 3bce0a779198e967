"""Forwards that wait for others before their backward: pairs, two losses, a reference forward in between.

A plan is made for passes: a forward and its backward, which nothing comes between. So a forward that others follow runs
twice. First with the weights streamed through, as without gradients, saving what its blocks cannot have from each
other. Then once more, when its backward begins: as the pass that this backward belongs to, whose gradients are added to
those of the passes before. Autograd goes through the later forward first, so that they are added in the order of plain
PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lt_offload.execute.blocks.run import BlockRun
from lt_offload.execute.blocks.runs import BlockRuns
from lt_offload.execute.blocks.shared_inputs import SharedInputs
from lt_offload.execute.memory.streaming import Streaming
from lt_offload.model.calls import BlockOutput
from lt_offload.schema.profile import RECORDED, OptionName

Again = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], tuple[BlockRun, list[Tensor]]]
"""Runs a block, given its forward and arguments, as a part of the present pass; returns its run and its outputs."""


class DeferredForward:
    """One such forward. It lives as long as the outer graph: one whose loss is dropped leaves nothing behind."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = options
        self.runs: list[BlockRun] = []
        """The first run of each block."""
        self.originals: list[Callable[..., Any]] = []
        """The forward of each block."""
        self.passed: list[BlockRun] = []
        """The second run of each block, once the backward has begun."""
        self.last_output: BlockOutput | None = None
        self.shared = SharedInputs()

    def run_again(self, run: Again) -> None:
        """Run all blocks once more by ``run``, under the options of the plan."""
        outputs: list[Tensor] = []
        for waiting, original, option in zip(self.runs, self.originals, self._options, strict=True):
            # A run that waits is always of the whole batch; the second one may be in slices.
            (whole,), (inputs,) = waiting.slices, waiting.take_again(outputs)
            with waiting.repeated(inputs, graph=option in RECORDED) as (args, kwargs):
                del inputs
                outputs.clear()  # nobody holds what the block does not need
                passed, outputs = run(waiting.index, original, args, kwargs)
                whole.check_outputs(outputs)
            self.passed.append(passed)

    def close(self) -> None:
        """Drop what it has saved."""
        for run in (*self.runs, *self.passed):
            run.close()


class DeferredForwards:
    """The deferred forwards of an engine, ``count`` at a time at most, until they have had their backward."""

    def __init__(
        self,
        count: int,
        options: Sequence[OptionName],
        runs: BlockRuns,
        streaming: Streaming,
        watch: Callable[[int, Sequence[Tensor]], None],
    ) -> None:
        self._count, self._options = count, options
        self._runs, self._streaming = runs, streaming
        self._watch = watch
        # Weakly: a loss that is dropped takes the outer graph with it, and with that what the forward has saved.
        self._known: list[weakref.ref[DeferredForward]] = []
        self._present: DeferredForward | None = None

    @property
    def waiting(self) -> int:
        """Forwards that wait for their backward."""
        return sum(not forward.passed for forward in self._alive())

    @property
    def due(self) -> bool:
        """True if a forward that begins now is to wait for others."""
        return self.waiting < self._count

    @property
    def running(self) -> bool:
        """True if one has begun and not come to its last block."""
        return self._present is not None

    def begin(self) -> None:
        """Begin one."""
        self._present = DeferredForward(self._options)
        self._known.append(weakref.ref(self._present))

    def awaits(self, index: int) -> bool:
        """Return whether this block is the next one."""
        return self._present is not None and len(self._present.runs) == index

    def forward(
        self,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        anchor: Tensor,
        backward: Callable[[DeferredForward, BlockRun, Tensor, Any], list[Tensor | None]],
    ) -> Any:
        """Run one block for the first time."""
        present = self._present
        assert present is not None

        def stream(*args: Any, **kwargs: Any) -> Any:
            return self._streaming.forward(index, forward, args, kwargs)

        waiting = self._runs.make_waiting(index, stream, args, kwargs, present.last_output)
        del args, kwargs
        present.runs.append(waiting)
        present.originals.append(forward)
        if waiting.needs_backward:
            waiting.totals = present.shared.note(index, waiting.inputs)
            out = waiting.in_graph(anchor, partial(backward, present), self._watch)
        else:
            out = waiting.run_frozen(save=waiting.sources is None)
        present.last_output = BlockOutput(out)
        if index == len(self._options) - 1:
            self._present = None  # the graph holds it from here on
        return out

    def close(self) -> None:
        """Drop all of them."""
        for forward in self._alive():
            forward.close()
        self._known, self._present = [], None

    def _alive(self) -> list[DeferredForward]:
        forwards = [forward for ref in self._known if (forward := ref()) is not None]
        self._known = [weakref.ref(forward) for forward in forwards]
        return forwards
