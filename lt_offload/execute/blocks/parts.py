"""A block that takes its batch in parts of samples: one frame per part, and together they are as one.

The block has one node in the outer graph. Forward and backward of the parts follow each other within one step of the
plan, so that the weights are there once for all of them; in the backward the last part comes first, as in autograd.
Whatever a part makes, computes again or works with is free before the next one begins. What travels between forward and
backward travels for all parts together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lt_offload.execute.blocks.run import TRAVELLING, Frame
from lt_offload.execute.blocks.shared_inputs import RunningTotal
from lt_offload.execute.device.base import Device
from lt_offload.execute.memory.activations import ActivationOffloader, HostPool
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.model.parts import Cut, Cutter, Outputs, Rows, check_rows, check_same, other_outputs
from lt_offload.schema.plan import Save
from lt_offload.schema.profile import OptionName

MakeFrame = Callable[..., Frame]
Between = Callable[[Sequence[Weight]], None]


def between(gradients: Gradients) -> Between:
    """Return what happens when one part of a batch has given its gradients and the backward of the next begins."""

    def begin_next(weights: Sequence[Weight]) -> None:
        gradients.end_block(weights)
        gradients.begin_block(weights)

    return begin_next


class Parts:
    """What one forward of a block leaves behind, part by part; used as a :class:`Frame` is.

    Args:
        cutter: of the block.
        cut: the call's arguments.
        make: makes the frame of one part from ``args``, ``kwargs`` and ``offloader``.
        device: where blocks run.
        pool: host memory of activations.
        index: of the block.
        option: what becomes of its activations.
        uses: by block, how often it uses each of its inputs.
        between: is called between the backwards of two parts, with the weights: each part has given its gradients.
    """

    def __init__(
        self,
        cutter: Cutter,
        cut: Cut,
        make: MakeFrame,
        *,
        device: Device,
        pool: HostPool,
        index: int,
        option: OptionName,
        uses: dict[int, Counter[int]],
        between: Between,
    ) -> None:
        self.name, self.index, self.option = cutter.name, index, option
        self.offloader = ActivationOffloader(device, pool, str(index)) if option in TRAVELLING else None
        self.totals: list[RunningTotal | None] = []
        """By input, the gradient of what other blocks may use, too."""
        self.forgotten = False
        """Another forward has begun, for which it was closed."""
        self._cutter, self._uses, self._between = cutter, uses, between
        self._sizes, self._ranges = cut.sizes, [(sum(cut.sizes[:part]), size) for part, size in enumerate(cut.sizes)]
        self._frames = [make(args=args, kwargs=kwargs, offloader=self.offloader) for args, kwargs in cut.calls()]
        slots = self._frames[0].slots
        self._inputs: list[Tensor] = [cut.leaves[slot] for slot in slots]
        self._cut = [slot in cut.rows for slot in slots]
        """Per activation input: whether it has a row per sample; others are given to every part."""

    @property
    def runs(self) -> int:
        """How often the block runs forward."""
        return len(self._frames)

    @property
    def needs_backward(self) -> bool:
        """Whether a gradient can reach the block's weights or inputs."""
        return self._frames[0].needs_backward

    @property
    def recomputed(self) -> bool:
        """Whether the plan recomputes the block before its backward."""
        return self._frames[0].recomputed

    @property
    def done(self) -> bool:
        """Whether the backward is over, or will not come."""
        return all(frame.done for frame in self._frames)

    @property
    def sources(self) -> tuple[int, ...] | None:
        """Per activation input, which output of the previous block it is."""
        return self._frames[0].sources

    @sources.setter
    def sources(self, sources: tuple[int, ...] | None) -> None:
        for frame in self._frames:
            frame.sources = sources

    @property
    def inputs(self) -> list[Tensor]:
        """The activation inputs of the whole batch, until they have been taken."""
        return self._inputs

    def take_inputs(self) -> list[Tensor]:
        """Return the activation inputs and forget them."""
        for frame in self._frames:
            frame.take_inputs()
        inputs, self._inputs = self._inputs, []
        return inputs

    def run(self, anchor: Tensor, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward of each part. Return the outputs, and those among them that no gradient can reach."""
        rows: list[Rows] = []
        reached: set[int] = set()
        for part, frame in enumerate(self._frames):
            out, unreached = frame.run(anchor, self._of_part(part, inputs))
            self._put(rows, part, out)
            dead = {id(tensor) for tensor in unreached}
            reached |= {at for at, tensor in enumerate(out) if id(tensor) not in dead}
            del out, unreached
        self._check_alike()
        whole = _results(rows)
        return whole, [tensor for at, tensor in enumerate(whole) if at not in reached]

    def run_frozen(self) -> Any:
        """Run the forward of a block that no gradient can reach; return its output."""
        self._inputs = []
        outputs = Outputs(self._cutter, self._sizes)
        for part, frame in enumerate(self._frames):
            outputs.put(part, frame.run_frozen())
        return outputs.result()

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return the block's output structure with ``tensors`` in place."""
        return self._frames[0].unflatten(tensors)

    def can_recompute(self, outputs: Sequence[Tensor] | None) -> bool:
        """Return whether its input is at hand."""
        return self._frames[0].can_recompute(outputs)

    def recompute(self, anchor: Tensor, outputs: list[Tensor] | None, save: Save) -> list[Tensor]:
        """Run the forward of each part as it ran first; see :meth:`Frame.recompute`."""
        given = None if outputs is None else list(outputs)
        if outputs is not None:
            outputs.clear()
        rows: list[Rows] = []
        for part, frame in enumerate(self._frames):
            self._put(rows, part, frame.recompute(anchor, self._given(part, given), save))
        if self.offloader is not None:
            self.offloader.close()
        return _results(rows)

    def backward(self, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward of each part, the last one first; return the gradients of the activation inputs."""
        if self.index not in self._uses:
            # One gradient per use of an input in plain PyTorch: of all rows, or of each part.
            shared = [at for at, cut in enumerate(self._cut) if not cut]
            self._uses[self.index] = Counter(dict.fromkeys(shared, self.runs))
        rows = [Rows(self._sizes) for _ in self._cut]
        # What every part is given gets its gradients use by use, as several blocks would give them.
        sums = [None if cut else RunningTotal(-1, users=2) for cut in self._cut]
        outer = [None if total is None or total.users == 1 else total for total in self.totals]
        for inner, total in zip(sums, outer, strict=True):
            if inner is not None and total is not None:
                inner.gradient, total.gradient = total.gradient, None
        weights = self._frames[0].weights
        for part in reversed(range(self.runs)):
            start, size = self._ranges[part]
            mine = [None if grad is None else grad.narrow(0, start, size) for grad in grads]
            self._frames[part].totals = [*sums]
            for row, grad in zip(rows, self._frames[part].backward(anchor, mine), strict=True):
                if grad is not None:
                    row.put(part, grad)
            if part:
                self._between(weights)
        self.close()
        pairs = zip(rows, sums, strict=True)
        found = [row.result() if inner is None else inner.gradient for row, inner in pairs]
        for at, total in enumerate(outer):
            if total is not None:
                found[at] = _sum(total.gradient, found[at])
                total.gradient = None
                if total.first != self.index:
                    total.gradient, found[at] = found[at], None
        return found

    def close(self) -> None:
        """Let go of everything that was saved."""
        for frame in self._frames:
            frame.close()
        if self.offloader is not None:
            self.offloader.close()

    def _of_part(self, part: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        start, size = self._ranges[part]
        return [x.narrow(0, start, size) if cut else x for x, cut in zip(inputs, self._cut, strict=True)]

    def _given(self, part: int, outputs: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Return what the previous block has given this part."""
        if outputs is None:
            return None
        given = list(outputs)
        for position, tensor in zip(self.sources or (), self._of_part(part, self._chosen(outputs)), strict=True):
            given[position] = tensor
        return given

    def _chosen(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [outputs[position] for position in self.sources or ()]

    def _put(self, rows: list[Rows], part: int, out: Sequence[Tensor]) -> None:
        if part == 0:
            rows += [Rows(self._sizes) for _ in out]
        if len(rows) != len(out):
            raise other_outputs(self._cutter)
        for row, tensor in zip(rows, out, strict=True):
            check_rows(self._cutter, tensor, self._sizes[part])
            row.put(part, tensor.detach())

    def _check_alike(self) -> None:
        """Compare what is no tensor among the outputs, of which the first part's are returned."""
        outs = [frame.other_outputs() for frame in self._frames]
        if any(spec != outs[0][1] for _, spec in outs):
            raise other_outputs(self._cutter)
        for values in zip(*(leaves for leaves, _ in outs), strict=True):
            check_same(self._cutter, values)


def _sum(before: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if before is None else before if gradient is None else before + gradient


def _results(rows: Sequence[Rows]) -> list[Tensor]:
    return [whole for row in rows if (whole := row.result()) is not None]
