"""The blocks of a step that no plan was made for yet: each runs once, and what its graph saves waits on the host.

The plan is made when the backward comes to the first of them, and its engine carries that backward out.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lt_offload import limits
from lt_offload.compat.torch import buffers_of, functorch_level
from lt_offload.execute.blocks.repeats import Repeats
from lt_offload.execute.blocks.run import BlockRun
from lt_offload.execute.blocks.shared_inputs import SharedInputs
from lt_offload.execute.blocks.slices import PlannedBlock
from lt_offload.execute.device.base import NO_BYTES, Device
from lt_offload.execute.memory.activations import HostPool
from lt_offload.execute.memory.tensors import Weight
from lt_offload.execute.training.passes import Lookup, Passes, SurveyedForward
from lt_offload.execute.user_code.checks import Backward, OwnParameters
from lt_offload.execute.user_code.guard import GuardModes, Suspended
from lt_offload.model.blocks import Structure
from lt_offload.model.compiled import called, intercept, is_compiled
from lt_offload.model.parts import Cutter
from lt_offload.model.state.effects import Effects


class Survey:
    """The forwards of one step, before there is a plan.

    ``plan`` is called when the backward comes to the first block; it returns the passes of an engine with these
    weights. ``room``: bytes of RAM that activations may take.
    """

    def __init__(self, structure: Structure, device: Device, plan: Callable[[], Passes], room: int) -> None:
        self.device = device
        self._structure, self._room, self._used = structure, room, 0
        self._saved: defaultdict[type[nn.Module], int] = defaultdict(int)
        """By class of blocks: bytes that one has saved at most."""
        self.modes = GuardModes()
        """Modes of the guard to come."""
        self.modes.place()
        self._suspended = Suspended(self.modes)  # compiled code is not entered within them
        self._weights = {param: Weight(i, name, param) for i, (name, param) in enumerate(structure.tensors)}
        for weight in self._weights.values():
            weight.host = NO_BYTES  # or it would seem that somebody holds the memory, when the engine takes it over
        self._looked_up: list[Lookup] = []
        """Rows that the present run of a block looks up."""
        self._lookups: dict[BlockRun, list[Lookup]] = {}
        self.anchor = torch.zeros((), requires_grad=True)
        self.shared = SharedInputs()
        self.runs: list[BlockRun | None] = []
        """Runs of the calls of blocks in turn; None where no gradient can reach it."""
        tensors = [param for _, param in structure.tensors]
        self._blocks = [
            PlannedBlock(
                index=index,
                name=block.name,
                device=device,
                weights=[self._weights[tensors[t]] for t in block.tensors],
                option="offload",
                graphed=is_compiled(block.module),
                effects=Effects(block.module),
                repeats=Repeats(device),
                held=[buffers_of(module) for module in block.module.modules()],
            )
            for index, block in enumerate(structure.blocks)
        ]
        self._own = [OwnParameters(block.name, block.module) for block in structure.blocks]
        self._pool = HostPool(device)
        self.unplanned = False
        """The step has called other layers: it is carried out without a plan."""
        self._backward = Backward(self.anchor)
        self._plan = plan
        self._passes: Passes | None = None
        self._forwards: WeakKeyDictionary[BlockRun, SurveyedForward] = WeakKeyDictionary()

    def weight(self, index: int, name: str, param: nn.Parameter) -> Weight:
        """Return a weight for the plan's engine: what graphs have saved refers to the same object."""
        known = self._weights.get(param)
        return Weight(index, name, param) if known is None else known.called(index, name)

    def forward(
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
        """Run a block, whose weights are on the device; return its output as a part of the outer graph.

        It keeps its graph, and what that saves goes to the host. Where RAM does not suffice it runs again instead.
        ``body`` runs it, called with these arguments as a part of the block's private graph, or with those of each part
        that ``cutter`` makes of the batch. ``again`` runs it a second time; None if it must run once. ``reached`` is
        told which outputs gradients will come to.
        """
        block = self._blocks[index]
        if functorch_level() is not None:
            raise limits.TRANSFORMED.error(f"block {block.name} was called in a transform")
        self._own[index].check()
        kind = type(self._structure.blocks[index].module)
        keeps = again is None or self._used + self._saved[kind] <= self._room
        block = replace(block, option="offload" if keeps else "reload", recomputed=not keeps, cutter=cutter)
        run = BlockRun(block, body, args, kwargs, pool=self._pool, uses={}, gradients=None)
        del args, kwargs
        run.reached = reached
        assert run.offloader is not None
        run.offloader.everything = True
        with self._suspended, _present(run.weights):
            if not run.needs_backward:
                self.runs.append(None)
                return run.run_frozen()
            run.totals = self.shared.note(index, run.inputs)
            out = run.in_graph(self.anchor, self._run_backward)
        run.body = again or _over  # its own holds what it was called with
        if run.offloader.leave(-1) is not None:
            run.offloader.released()
        self._used += run.offloader.nbytes
        if keeps:
            self._saved[kind] = max(self._saved[kind], run.offloader.nbytes)
        self.runs.append(run)
        self._lookups[run], self._looked_up = self._looked_up, []
        return out

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within the context, note which rows of tied tables the blocks look up, which holds their numbers."""
        uses: Counter[Tensor] = Counter(weight.param for block in self._blocks for weight in block.weights)
        with ExitStack() as stack:
            for block in (block for block in self._structure.blocks if not is_compiled(block.module)):
                layers = [module for module in block.module.modules() if isinstance(module, nn.Embedding)]
                layers = [layer for layer in layers if uses[layer.weight] > 1]
                for layer in layers:
                    stack.callback(intercept(layer, self._noted(layer, called(layer))))
                if layers:
                    stack.callback(intercept(block.module, self._from_nothing(called(block.module))))
            yield

    def _noted(self, layer: nn.Embedding, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            # Embeddings of positions may be called with a length alone.
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            self._looked_up += [(layer.weight, ids.detach()) for ids in tensors[:1]]
            return forward(*args, **kwargs)

        return noted

    def _from_nothing(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward`` of a block, of whose runs the last one counts."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._looked_up = []
            return forward(*args, **kwargs)

        return run

    def planned(self, order: Mapping[int, int], forwards: Sequence[Sequence[int]], passes: Passes) -> None:
        """Be carried out by the plan that was made.

        ``order`` has the block of the plan by the index that its calls had here; other blocks are not in the plan.
        ``forwards`` has the calls of each forward of the model, as positions among all calls.
        """
        others = {index: -1 - index for index in range(len(self._blocks))} | dict(order)
        totals = {id(total): total for run in self.runs if run is not None for total in run.totals if total is not None}
        for total in totals.values():
            total.first = others[total.first]
        for run in (run for run in self.runs if run is not None):
            run.planned_as(others[run.index], passes.uses, passes.gradients)
        for calls in forwards:
            present = [known for at in calls if (known := self.runs[at]) is not None]
            runs = {run.index: weakref.ref(run) for run in present}
            forward = SurveyedForward(runs, [lookup for run in present[:1] for lookup in self._lookups[run]])
            for known in present:
                self._forwards[known] = forward
        passes.take_survey(self.shared, list(dict.fromkeys(self._forwards.values())))
        self.runs, self._lookups = [], {}

    def close(self) -> None:
        """End, where no engine has taken over."""
        self.modes.remove()

    def _run_backward(self, run: BlockRun, anchor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        self._backward.check(run)
        if self._passes is None and not self.unplanned:
            self._passes = self._plan()
        forward = self._forwards.get(run)
        if forward is not None and self._passes is not None:
            return self._passes.run_surveyed(forward, run, anchor, grads)
        # It has no place in the plan: its weights stay on the device.
        assert run.offloader is not None
        run.offloader.fetch(-1)
        with _present(run.weights):
            return run.backward(anchor, grads)


@contextmanager
def _present(weights: Sequence[Weight]) -> Iterator[None]:
    """Let what a graph saves of ``weights``, which are on the device, refer to them."""
    for weight in weights:
        weight.present = weight.param.data
    try:
        yield
    finally:
        for weight in weights:
            weight.present = None


def _over(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a surveyed block runs once")
