"""Whether forwards that run again find their inputs, and backwards what they need. Knows no memory and no order.

Of each block either nothing, the input or everything is saved. The input of a block that has saved nothing comes from
running the block before again right before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from lt_offload.plan.iteration.computations import SAVED
from lt_offload.plan.verify.ordering import describe
from lt_offload.schema.plan import Op, Plan, Save
from lt_offload.schema.profile import Profile


def broken_reruns(plan: Plan, profile: Profile) -> Iterator[str]:
    """Yield what is wrong with the forwards that run again, and with the backwards that need them."""
    walk = _Saved(plan, profile)
    for index, (block, option) in enumerate(zip(profile.blocks, plan.options, strict=True)):
        if block.has_backward and option == "discard" and not block.chained:
            yield f"block {block.name}: run again: option 'discard', {walk.lost(index)}"
    for op in plan.ops:
        if op.payload == "activation" and op.kind == "prefetch":
            walk.away.discard(op.block)
        elif op.save is not None:
            yield from walk.run_again(op)
        elif op.kind == "backward":
            yield from walk.backward(op)


class _Saved:
    """What is saved of each block, as the iteration goes on."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.blocks = profile.blocks
        self.saved: list[Save] = [
            SAVED[option] if block.has_backward else "nothing"
            for block, option in zip(profile.blocks, plan.options, strict=True)
        ]
        self.away = {
            index
            for index, block in enumerate(profile.blocks)
            if block.has_backward and block.option(plan.options[index]).offload_bytes
        }
        """Blocks whose saved tensors are on the host."""
        self.before: Op | None = None
        """The forward that ran again last."""

    def lost(self, index: int) -> str:
        """Return why a block may not be without a saved input."""
        name = self.blocks[index].name
        return f"but the input of {name} is not what the block before returns: it has to stay saved"

    def run_again(self, op: Op) -> Iterator[str]:
        """Yield what is wrong with a forward that runs again."""
        block, name = self.blocks[op.block], describe(op)
        before = self.before if self.before is not None and self.before.step == op.step else None
        if before is not None and before.block >= op.block:
            yield f"{name}: run again: block {before.block} has run again before it, and blocks ascend"
        if self.saved[op.block] == "all":
            yield f"{name}: run again: everything is saved of it already"
        elif self.saved[op.block] == "nothing" and op.block:
            if before is None or before.block != op.block - 1:
                yield f"{name}: run again: its input is not saved, nor has block {op.block - 1} run again right before"
            elif not block.chained:
                yield f"{name}: run again: its input is not saved, nor is it what the block before returns"
        if op.block in self.away:
            yield f"{name}: run again: its activations have not been fetched"
        offered = {option.name for option in block.options}
        if "keep" not in offered and (op.save == "all" or "recompute" not in offered):
            yield f"{name}: save: the block has no option 'keep', whose costs it would have"
        if not block.has_backward and (op.save == "all" or (op.save == "input" and op.block)):
            yield f"{name}: save: {op.save!r}, but the block has no backward"
        if op.save == "nothing" and op.block and block.has_backward and not block.chained:
            yield f"{name}: save: 'nothing', {self.lost(op.block)}"
        self.saved[op.block], self.before = op.save or "nothing", op

    def backward(self, op: Op) -> Iterator[str]:
        """Yield what is wrong with a backward; the first block always has its input."""
        if self.blocks[op.block].has_backward and self.saved[op.block] == "nothing" and op.block:
            yield f"{describe(op)}: run again: nothing is saved of the block"
