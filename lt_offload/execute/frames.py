"""The frames of the running iteration: what each block's forward has left. Knows no weights and no steps."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lt_offload.errors import PlanError
from lt_offload.execute.block_graph import Frame
from lt_offload.execute.device.base import Device
from lt_offload.execute.pools import HostPool
from lt_offload.execute.tensors import Weight
from lt_offload.model.blocks import Structure
from lt_offload.model.chain import BlockOutput
from lt_offload.model.compiled import is_compiled
from lt_offload.model.effects import Effects
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import RECORDED


class Frames:
    """Makes and finds frames, and knows which block is called with what the block before returned.

    Frames live as long as the outer graph does, so that a forward whose loss is dropped leaves nothing behind; only
    those of frozen blocks that run again, which the graph does not reach, are held here.
    """

    def __init__(self, device: Device, pool: HostPool, structure: Structure, plan: Plan | None) -> None:
        self._device, self._pool, self._structure = device, pool, structure
        self._options = plan.options if plan is not None else ()
        self._again = {op.block for op in plan.ops if op.save is not None} if plan is not None else set()
        self.repeated = {at for at, option in enumerate(self._options) if option not in RECORDED} | self._again
        """Blocks that run a second time for their backward."""
        self.uses: dict[int, Counter[int]] = {}
        """How often a block uses each of its inputs, by its index; counted in its first backward."""
        self._steady = _steady(structure, plan) if plan is not None else set()
        self._effects = [Effects(block.module) for block in structure.blocks]
        self._frames: dict[int, weakref.ref[Frame]] = {}
        self._frozen: dict[int, Frame] = {}
        self._handed: BlockOutput | None = None

    def __len__(self) -> int:
        return len(self._frames) + len(self._frozen)

    @property
    def open(self) -> bool:
        """Whether a backward is still to come."""
        frames = [ref() for ref in self._frames.values()]
        return any(frame is not None and not frame.done for frame in frames)

    def make(
        self,
        index: int,
        forward: Callable[..., Any],
        weights: Sequence[Weight],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Frame:
        """Return the frame of a block that is about to run for the first time.

        Raises:
            PlanError: if the plan saves nothing of it, and running the block before again would not give its input.
        """
        frame = Frame(
            device=self._device,
            pool=self._pool,
            index=index,
            label=str(index),
            name=self._name(index),
            option=self._options[index],
            forward=forward,
            weights=weights,
            args=args,
            kwargs=kwargs,
            again=index in self._again,
            steady=index in self._steady,
            compiled=is_compiled(self._structure.blocks[index].module),
            effects=self._effects[index],
            uses=self.uses,
        )
        if self._handed is not None:
            frame.sources = self._handed.sources(frame.inputs)
        if not frame.needs_backward:
            if frame.again:
                self._frozen[index] = frame
            return frame
        self._frames[index] = weakref.ref(frame)
        if frame.option == "discard" and frame.sources is None:
            raise PlanError(
                f"the plan discards the input of block {self._name(index)} (option 'discard'), but the block is not "
                f"called with what block {self._name(index - 1)} returned; plan it as 'recompute' or 'reload'"
            )
        return frame

    def returned(self, out: Any) -> None:
        """Note what the block that ran last handed on."""
        if self._again:
            self._handed = BlockOutput(out)

    def find(self, index: int) -> Frame | None:
        """Return the frame of a block that has run."""
        if index in self._frozen:
            return self._frozen[index]
        ref = self._frames.get(index)
        return None if ref is None else ref()

    def run_again(self, op: Op, anchor: Tensor, handed: list[Tensor] | None) -> list[Tensor]:
        """Run a block again and return its outputs; ``handed``, what the block before returned just now, is emptied.

        Raises:
            PlanError: if its input is gone.
        """
        assert op.save is not None
        frame = self.find(op.block)
        if frame is None or not frame.can_run_again(handed):
            raise PlanError(
                f"op {op.id} runs block {self._name(op.block)} again, whose input is neither saved nor the output of "
                "the op before; the plan has to save it (option 'recompute' or 'reload') or run the block before again"
            )
        if frame.pager is not None:
            frame.pager.fetch(op.id)
        return frame.run_again(anchor, handed, op.save)

    def close(self) -> None:
        """Drop every frame and what it has saved."""
        for frame in (*self._frozen.values(), *(ref() for ref in self._frames.values())):
            if frame is not None:
                frame.close()
        self.clear()

    def clear(self) -> None:
        """Forget the frames."""
        self._frames.clear()
        self._frozen.clear()
        self._handed = None

    def _name(self, index: int) -> str:
        return self._structure.blocks[index].name


def _steady(structure: Structure, plan: Plan) -> set[int]:
    """Return the blocks whose weights stay where they are from the forward to the backward, by ``plan``."""
    moves = [op for op in plan.ops if op.payload == "weight" and (op.kind != "offload" or op.release_after is not None)]
    moving = {tensor for op in moves for tensor in plan.tensors(op)}
    zero_copy = {op.block for op in plan.ops if op.zero_copy}
    blocks = enumerate(structure.blocks)
    return {at for at, block in blocks if at not in zero_copy and moving.isdisjoint(block.tensors)}
