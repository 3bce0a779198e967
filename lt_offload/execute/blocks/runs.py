"""The runs of blocks in the present iteration: made in the forward, found again in the backward and to recompute."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lt_offload.compat.torch import buffers_of
from lt_offload.errors import PlanError
from lt_offload.execute.blocks.repeats import Repeats
from lt_offload.execute.blocks.run import BlockRun
from lt_offload.execute.blocks.shared_inputs import SharedInputs
from lt_offload.execute.blocks.slices import PlannedBlock
from lt_offload.execute.device.base import Device
from lt_offload.execute.memory.activations import HostPool
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.program import Program
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.model.blocks import Structure
from lt_offload.model.calls import BlockOutput
from lt_offload.model.compiled import is_compiled
from lt_offload.model.parts import cutters
from lt_offload.model.state.effects import Effects
from lt_offload.schema.plan import Op


class BlockRuns:
    """Makes and finds the runs of blocks, and sees which are called with what the previous block returned.

    ``blocks`` are the weights of each. ``gradients`` is told between the backwards of two parts of a batch.
    """

    def __init__(
        self,
        device: Device,
        pool: HostPool,
        structure: Structure,
        program: Program,
        blocks: Sequence[Sequence[Weight]],
        gradients: Gradients,
    ) -> None:
        self._pool, self._gradients = pool, gradients
        self._repeats = Repeats(device)
        self._blocks = planned_blocks(structure, program, blocks, device, self._repeats)
        self.uses: dict[int, Counter[int]] = {}
        """By block, how often it uses each of its inputs; counted in its first backward."""
        self._recomputes = any(block.recomputed for block in self._blocks)
        self._runs: dict[int, weakref.ref[BlockRun]] = {}
        """They live as long as the outer graph: a forward whose loss is dropped leaves nothing behind."""
        self._frozen: dict[int, BlockRun] = {}
        """Runs of frozen blocks that are recomputed; these blocks are not in that graph."""
        self._last_output: BlockOutput | None = None
        self._shared = SharedInputs()
        self.surveyed = False
        """They ran before the plan was made, each with a graph that is kept."""

    def __len__(self) -> int:
        return len(self._runs) + len(self._frozen)

    @property
    def open(self) -> bool:
        """True if a backward is still to come."""
        runs = [ref() for ref in self._runs.values()]
        return any(run is not None and not run.done for run in runs)

    def make(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> BlockRun:
        """Return the run of a block that is about to run first; ``PlanError`` if its input could not be had again."""
        run = self._make(self._blocks[index], forward, args, kwargs)
        if self._last_output is not None:
            run.sources = self._last_output.sources(run.inputs)
        if index == 0:
            self._shared.begin()
        if run.needs_backward:
            run.totals = self._shared.note(index, run.inputs)
        else:
            if run.block.recomputed:
                self._frozen[index] = run
            return run
        self._runs[index] = weakref.ref(run)
        if run.option == "discard" and run.sources is None:
            raise PlanError(
                f"the plan discards the input of block {run.name} (option 'discard'), but the block is not called with "
                f"what block {self._blocks[index - 1].name} returned; plan it as 'recompute' or 'reload'"
            )
        return run

    def make_waiting(
        self,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        previous: BlockOutput | None,
    ) -> BlockRun:
        """Return the run of a block of a forward that will run again as a whole (``deferred.py``)."""
        block = replace(self._blocks[index], option="recompute", recomputed=True, cutter=None)
        run = self._make(block, forward, args, kwargs)
        if previous is not None:
            run.sources = previous.sources(run.inputs)
        if run.sources is not None:
            run.option = "discard"
        return run

    def _make(self, block: PlannedBlock, forward: Callable[..., Any], args: Any, kwargs: Any) -> BlockRun:
        if block.index == 0:
            self._repeats.begin()
        return BlockRun(block, forward, args, kwargs, pool=self._pool, uses=self.uses, gradients=self._gradients)

    def returned(self, out: Any) -> None:
        """Note what the block that ran last has returned."""
        if self._recomputes:
            self._last_output = BlockOutput(out)

    def find(self, index: int) -> BlockRun | None:
        """Return the run of a block that has run."""
        if index in self._frozen:
            return self._frozen[index]
        ref = self._runs.get(index)
        return None if ref is None else ref()

    def recompute(self, op: Op, anchor: Tensor, outputs: list[Tensor] | None) -> list[Tensor]:
        """Recompute a block and return its outputs; those of the previous block, ``outputs``, are emptied."""
        assert op.save is not None
        run = self.find(op.block)
        if run is None or not run.can_recompute(outputs):
            raise PlanError(
                f"op {op.id} runs block {self._blocks[op.block].name} again, whose input is neither saved nor the "
                "output of the op before; the plan has to save it (option 'recompute' or 'reload') or run the block "
                "before again"
            )
        if run.offloader is not None:
            # A prefetch op has done this as a rule. A plan without one pays here: nothing runs beside the copy.
            run.offloader.fetch(op.id)
        return run.recompute(anchor, outputs, op.save)

    def take_shared(self, shared: SharedInputs) -> None:
        """Take over what blocks of forwards that ran before the plan was made have in common."""
        self._shared = shared

    def take_surveyed(self, runs: Mapping[int, weakref.ref[BlockRun]]) -> None:
        """Take the runs of a forward that ran before the plan was made, for their backward."""
        self._runs = dict(runs)
        self.surveyed = True

    def check(self) -> None:
        """Raise ``UnsupportedError`` if a gradient of a block's input has gone nowhere, or a second run differed."""
        self._shared.check()
        self._repeats.check()

    def close(self) -> None:
        """Drop every run and what it has saved."""
        for run in (*self._frozen.values(), *(ref() for ref in self._runs.values())):
            if run is not None:
                # The outer graph may live on: a backward that comes all the same is told why there is nothing to run.
                run.forgotten = not run.done
                run.close()
        self.clear()

    def clear(self) -> None:
        """Forget the runs."""
        self.surveyed = False
        self._runs.clear()
        self._frozen.clear()
        self._last_output = None


def planned_blocks(
    structure: Structure, program: Program, blocks: Sequence[Sequence[Weight]], device: Device, repeats: Repeats
) -> list[PlannedBlock]:
    """Return how each of the blocks, which have these weights, runs by ``program``."""
    return [
        PlannedBlock(
            index=index,
            name=block.name,
            device=device,
            weights=weights,
            option=option,
            recomputed=index in program.recomputed,
            steady=index in program.steady,
            graphed=index in program.graphed or is_compiled(block.module),
            effects=Effects(block.module),
            repeats=repeats,
            held=[buffers_of(module) for module in block.module.modules()],
            cutter=cutter,
        )
        for index, (block, weights, option, cutter) in enumerate(
            zip(structure.blocks, blocks, program.options, cutters(structure, program.parts), strict=True)
        )
    ]
