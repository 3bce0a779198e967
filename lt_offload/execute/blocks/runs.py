"""The frames of the running iteration, by block: made in the forward, found again in the backward and to recompute."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lt_offload.errors import PlanError
from lt_offload.execute.blocks.parts import Parts, between
from lt_offload.execute.blocks.repeats import Repeats
from lt_offload.execute.blocks.run import Frame
from lt_offload.execute.blocks.shared_inputs import SharedInputs
from lt_offload.execute.device.base import Device
from lt_offload.execute.memory.activations import HostPool
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.model.blocks import Structure
from lt_offload.model.calls import BlockOutput
from lt_offload.model.compiled import is_compiled
from lt_offload.model.parts import cutters
from lt_offload.model.state.effects import Effects
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import RECORDED, OptionName

AnyFrame = Frame | Parts


def repeated(plan: Plan) -> set[int]:
    """Return the blocks that run a second time for their backward."""
    return {index for index, option in enumerate(plan.options) if option not in RECORDED} | _recomputed(plan)


def _recomputed(plan: Plan) -> set[int]:
    return {op.block for op in plan.ops if op.save is not None}


class Frames:
    """Makes and finds frames, and sees which blocks are called with what the previous block returned.

    A frame lives as long as the outer graph, so that a forward whose loss is dropped leaves nothing behind. Frozen
    blocks are not in that graph: the frames of those that are recomputed are held here.
    """

    def __init__(self, device: Device, pool: HostPool, structure: Structure, plan: Plan | None) -> None:
        self._device, self._pool, self._structure = device, pool, structure
        self._options = plan.options if plan is not None else ()
        self._recomputed = _recomputed(plan) if plan is not None else set()
        self.repeated = repeated(plan) if plan is not None else set()
        """Blocks that run a second time for their backward."""
        self.uses: dict[int, Counter[int]] = {}
        """By block, how often it uses each of its inputs; counted in its first backward."""
        self._steady = _steady(structure, plan) if plan is not None else set()
        compiled = {index for index, block in enumerate(structure.blocks) if is_compiled(block.module)}
        self._graphed = compiled.union(plan.graphed if plan is not None else ())
        self._effects = [Effects(block.module) for block in structure.blocks]
        self._buffers = [[module._buffers for module in block.module.modules()] for block in structure.blocks]
        self._frames: dict[int, weakref.ref[AnyFrame]] = {}
        self._frozen: dict[int, AnyFrame] = {}
        count = plan.parts if plan is not None else 1
        self.parted = count > 1
        """Blocks take a batch in parts."""
        self._cutters = cutters(structure, count)
        self.gradients: Gradients
        """Collects those of the parts."""
        self._last_output: BlockOutput | None = None
        self._shared = SharedInputs()
        self._repeats = Repeats(device)

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
    ) -> AnyFrame:
        """Return the frame of a block that is about to run for the first time.

        Raises:
            PlanError: if the plan saves nothing of it, and recomputing the previous block would not give its input.
        """
        if index == 0:
            self._repeats.begin()
        make = self._maker(index, forward, weights, self._options[index], recomputed=index in self._recomputed)
        frame = self._in_parts(index, make, args, kwargs) or make(args=args, kwargs=kwargs, uses=self.uses)
        if self._last_output is not None:
            frame.sources = self._last_output.sources(frame.inputs)
        if index == 0:
            self._shared.begin()
        if frame.needs_backward:
            frame.totals = self._shared.note(index, frame.inputs)
        else:
            if frame.recomputed:
                self._frozen[index] = frame
            return frame
        self._frames[index] = weakref.ref(frame)
        if frame.option == "discard" and frame.sources is None:
            raise PlanError(
                f"the plan discards the input of block {self._name(index)} (option 'discard'), but the block is not "
                f"called with what block {self._name(index - 1)} returned; plan it as 'recompute' or 'reload'"
            )
        return frame

    def make_waiting(
        self,
        index: int,
        forward: Callable[..., Any],
        weights: Sequence[Weight],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        previous: BlockOutput | None,
    ) -> Frame:
        """Return the frame of a block of a forward that will run again as a whole: see ``deferred.py``.

        Args:
            index: of the block.
            forward: runs it.
            weights: of the block.
            args: of the call.
            kwargs: of the call.
            previous: what the block before has returned in that forward.
        """
        if index == 0:
            self._repeats.begin()
        make = self._maker(index, forward, weights, "recompute", recomputed=True)
        frame = make(args=args, kwargs=kwargs, uses=self.uses)
        if previous is not None:
            frame.sources = previous.sources(frame.inputs)
        if frame.sources is not None:
            frame.option = "discard"
        return frame

    def _maker(
        self,
        index: int,
        forward: Callable[..., Any],
        weights: Sequence[Weight],
        option: OptionName,
        *,
        recomputed: bool,
    ) -> Callable[..., Frame]:
        """Return what makes frames of a block from ``args`` and ``kwargs``."""
        return partial(
            Frame,
            device=self._device,
            pool=self._pool,
            index=index,
            label=str(index),
            name=self._name(index),
            option=option,
            forward=forward,
            weights=weights,
            recomputed=recomputed,
            steady=index in self._steady,
            graphed=index in self._graphed,
            effects=self._effects[index],
            buffers=[x for held in self._buffers[index] for x in held.values() if x is not None],
            repeats=self._repeats,
        )

    def _in_parts(
        self, index: int, make: Callable[..., Frame], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Parts | None:
        cutter = self._cutters[index]
        cut = None if cutter is None else cutter.cut(args, kwargs)
        if cutter is None or cut is None:
            return None
        return Parts(
            cutter,
            cut,
            make,
            device=self._device,
            pool=self._pool,
            index=index,
            option=self._options[index],
            uses=self.uses,
            between=between(self.gradients),
        )

    def returned(self, out: Any) -> None:
        """Note what the block that ran last has returned."""
        if self._recomputed:
            self._last_output = BlockOutput(out)

    def find(self, index: int) -> AnyFrame | None:
        """Return the frame of a block that has run."""
        if index in self._frozen:
            return self._frozen[index]
        ref = self._frames.get(index)
        return None if ref is None else ref()

    def recompute(self, op: Op, anchor: Tensor, outputs: list[Tensor] | None) -> list[Tensor]:
        """Recompute a block and return its outputs; those of the previous block, ``outputs``, are emptied.

        Raises:
            PlanError: if its input is gone.
        """
        assert op.save is not None
        frame = self.find(op.block)
        if frame is None or not frame.can_recompute(outputs):
            raise PlanError(
                f"op {op.id} runs block {self._name(op.block)} again, whose input is neither saved nor the output of "
                "the op before; the plan has to save it (option 'recompute' or 'reload') or run the block before again"
            )
        if frame.offloader is not None:
            frame.offloader.fetch(op.id)
        return frame.recompute(anchor, outputs, op.save)

    def check(self) -> None:
        """Raise ``UnsupportedError`` if a gradient of a block's input has gone nowhere, or a second run differed."""
        self._shared.check()
        self._repeats.check()

    def close(self) -> None:
        """Drop every frame and what it has saved."""
        for frame in (*self._frozen.values(), *(ref() for ref in self._frames.values())):
            if frame is not None:
                frame.forgotten = not frame.done
                frame.close()
        self.clear()

    def clear(self) -> None:
        """Forget the frames."""
        self._frames.clear()
        self._frozen.clear()
        self._last_output = None

    def _name(self, index: int) -> str:
        return self._structure.blocks[index].name


def _steady(structure: Structure, plan: Plan) -> set[int]:
    """Return the blocks whose weights stay at one address from the forward to the backward, by ``plan``."""
    moves = [op for op in plan.ops if op.payload == "weight" and (op.kind != "offload" or op.release_after is not None)]
    moving = {tensor for op in moves for tensor in plan.tensors(op)}
    zero_copy = {op.block for op in plan.ops if op.zero_copy}
    blocks = enumerate(structure.blocks)
    return {index for index, block in blocks if index not in zero_copy and moving.isdisjoint(block.tensors)}
