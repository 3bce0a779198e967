"""Bytes and times of one block that runs alone, under one activation option after the other."""

from __future__ import annotations

import logging
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from lt_offload.compat.torch import address_of, skip_in_dynamo
from lt_offload.machine.accounting import storage_bytes, tensors_in
from lt_offload.machine.dispatch import OperationLog
from lt_offload.model.calls import Call, bit_sums, has_values, numbers_of
from lt_offload.model.compiled import gradients_aside
from lt_offload.model.parts import Joint
from lt_offload.model.saving import CacheCostly, ReplayCostly, SparseParts, travels
from lt_offload.model.snapshot import version
from lt_offload.profiling.meters import AHEAD, Lap, Meter, Watch, fastest, scatter
from lt_offload.schema.profile import RECORDED, OptionName, OptionProfile

_log = logging.getLogger(__name__)

_FEW_DRAWS, _MOST_DRAWS = 3, 16
"""Three runs show whether a block leaves modules out at random; if it does, the fullest of sixteen is measured."""

_LAUNCHES = 2
"""Times that launches are measured."""

Option = Literal["keep", "recompute", "mixed"]
"""The options that are run; ``offload`` computes what ``keep`` computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """The cost of one block on its own."""

    input_bytes: int
    output_bytes: int
    launch_s: float
    options: tuple[OptionProfile, ...]
    slack_bytes: int = 0
    """Device memory that torch's allocator has held beyond what it has allocated, at most."""
    scatter: float = 0.0
    """The scatter of its repeated measurements; see ``Profile.scatter``."""
    travelling: int = 0
    """Bytes that its first option saves and that may travel: there all of them stay on the device."""
    input_travels: bool = False


def measure_block(call: Call, meter: Meter, *, once: bool = False) -> BlockCost:
    """Run ``call`` under every option that can pay and return its cost; ``once``: only options that run it once."""
    call.rehearsed = _fullest(call)
    measured = [_measure(call, "keep", meter, timed=True)]
    cost, (keep, *_) = measured[0], measured[0].options
    input_bytes = cost.input_bytes
    profiles = [keep]
    if call.has_backward and keep.saved_bytes and not once:
        # Not timed: it takes what ``keep`` takes, and its forward once more.
        measured.append(_measure(call, "recompute", meter, timed=False))
        recompute = replace(
            measured[-1].options[0],
            forward_s=keep.forward_s,
            backward_s=keep.forward_s + keep.backward_s,
            saved_bytes=0,
            keeps_input=True,
        )
        profiles.append(recompute)
        moving = storage_bytes(tensor for tensor in call.inputs if travels(tensor))
        if moving:  # the same with an input that travels
            staying = input_bytes - moving
            profiles.append(
                replace(recompute, name="reload", saved_bytes=staying, keeps_input=False, offload_bytes=moving)
            )
    if call.has_backward and (cost.travelling or cost.input_travels):
        # Nothing to run: it computes what ``keep`` computes, and the figures say how much of that may travel.
        moves = cost.input_travels
        offload = _travelling("offload", cost, input_bytes if moves else 0)
        profiles.append(replace(offload, keeps_input=keep.keeps_input and not moves))
    # No operation of compiled code can be left out, and none runs without its graph.
    if call.has_backward and keep.saved_bytes and not call.graphed and not once:
        try:
            measured.append(_measure(call, "mixed", meter, timed=True))
            profiles.append(replace(_travelling("mixed", measured[-1], input_bytes), keeps_input=False))
        except _OtherOperations as error:  # the block trains without this option
            _log.info("%s has no option mixed: %s", type(call.module).__name__, error)
    return replace(
        cost,
        options=tuple(option if option.name in RECORDED else _remembering(option, call) for option in profiles),
        slack_bytes=max(of_option.slack_bytes for of_option in measured),
        scatter=max(of_option.scatter for of_option in measured),
    )


def _fullest(call: Call) -> list[Tensor]:
    """Return the generators' states for a trial; none if the block draws nothing.

    Some blocks leave modules out at random, in some steps all that have weights to train. A plan has to be large enough
    for any step, so that it is made for the one of a few draws with the most operations.
    """
    if not has_values(call) or call.compiled or not call.has_backward:
        return []
    runs: list[tuple[int, list[Tensor]]] = []
    draws = call.draws()
    while len(runs) < _MOST_DRAWS:
        call.draw_from(draws)
        with OperationLog() as operations:
            _Trial(call, "keep").forward()
        runs.append((len(operations.called), draws))
        after = call.draws()
        # It draws nothing, so that no run differs from another.
        if all(map(torch.equal, draws, after)):
            return []
        if len(runs) == _FEW_DRAWS and len({count for count, _ in runs}) == 1:
            break
        draws = after
    return max(runs, key=lambda pair: pair[0])[1]


def measure_with_loss(call: Call, name: OptionName, chunk_tokens: int, meter: Meter) -> BlockCost:
    """Run ``call``, of the last block and the loss together, and return its cost under its only option."""
    cost = _measure(call, "keep", meter, timed=True)
    # Gradients of weights that the forward has made count as those of the backward, which follows at once.
    made = sum(p.nbytes for p in call.module.parameters() if p.requires_grad) if chunk_tokens else 0
    # The loss stays until the backward has begun with a gradient of its size.
    loss = cost.output_bytes
    plain = replace(cost.options[0], name=name, chunk_tokens=chunk_tokens).more(saved=loss, backward=loss)
    option = replace(
        plain.more(saved=-made, forward=made, backward=made), backward_peak_bytes=plain.backward_peak_bytes
    )
    return replace(cost, output_bytes=0, options=(option,))


def _remembering(option: OptionProfile, call: Call) -> OptionProfile:
    """Return the figures of an option under which the block runs twice, with its modules' state for the second run."""
    cut = call.cut()
    runs = 1 if cut is None else len(cut.sizes)
    # Every part of a batch keeps its own until its backward, but copies within a run are one part's at a time. The
    # second run has copies of the copies, and of what there is then.
    held = runs * call.held_bytes
    return option.more(saved=held, forward=call.copied_bytes, backward=held + call.held_bytes)


def _travelling(name: OptionName, cost: BlockCost, input_bytes: int) -> OptionProfile:
    """Return an option that holds what it saves, and so much of its input, until its copies have ended."""
    moving = cost.travelling
    option = replace(cost.options[0], name=name).more(saved=-moving, forward=moving, backward=moving)
    return replace(option, offload_bytes=moving + input_bytes)


def discard(cost: BlockCost) -> OptionProfile | None:
    """Return the option of saving nothing; None if ``keep`` saves nothing either.

    Before the backward something runs the forward again and saves what ``keep`` saves.
    """
    options = {option.name: option for option in cost.options}
    keep, recompute = options["keep"], options.get("recompute")
    saved = keep.saved_bytes
    if not (saved or keep.keeps_input):
        return None
    return replace(
        keep.more(backward=saved),
        name="discard",
        # What a second run needs of the modules' state (``_remembering``); nothing else is saved under ``recompute``.
        saved_bytes=0 if recompute is None else recompute.saved_bytes,
        keeps_input=False,
        forward_peak_bytes=(recompute or keep).forward_peak_bytes,
    )


def _measure(call: Call, option: Option, meter: Meter, *, timed: bool) -> BlockCost:
    """Run ``call`` once for its bytes, which warms up, and then for its times.

    On a GPU the launches are timed first, and then how long it computes while the host is ahead of it.
    """
    if call.compiled:
        _timed(call, option, meter)  # compiles
    cost, first = _counted(call, option, meter)
    launches, ahead = [first], (0.0, 0.0)
    if timed and meter.lags:
        launches = [_timed(call, option, meter) for _ in range(_LAUNCHES)]
        ahead = AHEAD * _launch(launches, 0), AHEAD * _launch(launches, 1)
    laps: list[tuple[Lap, Lap]] = []
    while timed and not meter.enough([_seconds(run) for run in laps]):
        laps.append(_timed(call, option, meter, ahead))
    counted = sorted(laps, key=_seconds)[: len(fastest([_seconds(run) for run in laps]))] or launches
    forward, backward = (statistics.mean(run[which].seconds for run in counted) for which in (0, 1))
    seen = launches if meter.lags else counted
    return replace(
        cost,
        options=(replace(cost.options[0], forward_s=forward, backward_s=backward),),
        launch_s=max(_launch(seen, 0), _launch(seen, 1)),
        scatter=scatter([_seconds(run) for run in laps]) if laps else 0.0,
    )


def _launch(runs: Sequence[tuple[Lap, Lap]], which: Literal[0, 1]) -> float:
    return min(run[which].launch_s for run in runs)


def _seconds(run: tuple[Lap, Lap]) -> float:
    return sum(lap.seconds for lap in run)


def _timed(call: Call, option: Option, meter: Meter, ahead: tuple[float, float] = (0.0, 0.0)) -> tuple[Lap, Lap]:
    """Run forward and backward, ``ahead`` of the device by so many seconds; return their times."""
    trial = _Trial(call, option)
    # Starts the clock: what lies before is not the forward's.
    meter.lap(ahead[0])
    trial.forward()
    forward = meter.lap()
    if not call.has_backward:
        return forward, Lap()
    gradients = trial.incoming_gradients()
    meter.lap(ahead[1])
    trial.backward(gradients)
    return forward, meter.lap()


def _counted(call: Call, option: Option, meter: Meter) -> tuple[BlockCost, tuple[Lap, Lap]]:
    """Run forward and backward; return their bytes, counting which costs time, and their times."""
    trial = _Trial(call, option)
    watch = Watch(next((leaf.device for leaf in call.leaves if isinstance(leaf, Tensor)), torch.device("cpu")))
    meter.lap()
    with watch:
        trial.forward()
    forward = meter.lap()
    live, output_bytes = watch.current, trial.output_bytes
    # A peak is what comes on top: plans count themselves what stays, outputs, and gradients of inputs.
    forward_peak = max(0, watch.peak() - live - output_bytes)
    travelling, saves_input, input_travels = trial.travelling()
    backward, streamed, held, passing = Lap(), 0, 0, 0
    if call.has_backward:
        gradients = trial.incoming_gradients()
        meter.lap()
        with watch:
            trial.backward(gradients, watch.leave_out)
        backward = meter.lap()
        # Plans count the gradient of the first output only.
        beside = sum(gradient.nbytes for slot, gradient in gradients.items() if slot)
        outgoing = sum(x.nbytes for x, need in zip(call.inputs, call.needs_grad, strict=True) if need) - beside
        # Compiled code makes all gradients before the first one is used, and parts add theirs up: they count.
        together = call.compiled or trial.cut is not None
        peaks = watch.whole_peak() - call.passing_bytes if together else watch.peak(), watch.held_peak()
        streamed, held, passing = (max(0, peak - live - outgoing) for peak in (*peaks, watch.whole_peak()))
    profile = OptionProfile(
        name=option,
        forward_s=0.0,
        backward_s=0.0,
        saved_bytes=live,
        keeps_input=saves_input,
        offload_bytes=0,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=streamed,
        held_peak_bytes=held,
        passing_peak_bytes=passing,
    )
    cost = BlockCost(
        input_bytes=storage_bytes(call.inputs),
        output_bytes=output_bytes,
        launch_s=0.0,
        options=(profile,),
        slack_bytes=watch.slack,
        travelling=travelling,
        input_travels=input_travels,
    )
    return cost, (forward, backward)


class _Trial:
    """One forward and backward of a block, of one part of its batch after the other, as the engine runs them."""

    def __init__(self, call: Call, option: Option) -> None:
        self.call, self.cut = call, call.cut()
        self.output_bytes = 0
        self._parts = [_PartTrial(part, option) for part in ([call] if self.cut is None else call.parts(self.cut))]
        self._outputs: list[tuple[torch.Size, torch.dtype, torch.device]] = []

    def forward(self) -> list[Tensor]:
        joint = Joint([1] if self.cut is None else self.cut.sizes)
        for part, trial in enumerate(self._parts):
            joint.put(part, trial.forward())
        outputs = joint.results()
        self.output_bytes = outputs[0].untyped_storage().nbytes()
        self._outputs = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs

    def incoming_gradients(self) -> dict[int, Tensor]:
        reached = {slot: self._outputs[slot] for slot in sorted(self.call.reached) if slot < len(self._outputs)}
        return {
            slot: torch.zeros(shape, dtype=dtype, device=device) for slot, (shape, dtype, device) in reached.items()
        }

    def backward(self, gradients: dict[int, Tensor], seen: Callable[[Tensor], None] | None = None) -> None:
        """Run the backward; gradients of parameters are shown to ``seen`` and dropped as soon as they are complete."""
        complete, cut = False, self.cut
        joint = None if cut is None else Joint(cut.sizes)
        with _dropping_gradients(self.call.module, seen, lambda: complete):
            for part in reversed(range(len(self._parts))):
                complete = part == 0  # as in autograd, the first part's comes last and completes the sums
                mine = gradients if cut is None else {slot: cut.of(part, whole) for slot, whole in gradients.items()}
                grads = self._parts[part].differentiate(mine)
                if cut is not None and joint is not None:
                    slots = self.call.slots
                    joint.put(part, [x if at in cut.rows else None for at, x in zip(slots, grads, strict=True)])
                del grads, mine
            if joint is not None:
                joint.results()  # beside what the parts have given

    def travelling(self) -> tuple[int, bool, bool]:
        """Return the number of saved bytes that may travel, whether the input is saved, and whether it may travel."""
        saved = {key: value for part in self._parts for key, value in part.saved.items()}
        call = self.call
        inputs = {address_of(tensor.untyped_storage()) for tensor in call.inputs}
        standing = [*call.leaves, *call.module.parameters(), *call.module.buffers()]
        # Their memory is not the block's to give back: copies of it to the host would free nothing.
        others = {address_of(part.untyped_storage()) for part in tensors_in(standing)}
        moving = [nbytes for key, (nbytes, moves) in saved.items() if moves and key not in others]
        saved_inputs = [saved[key][1] for key in inputs if key in saved]
        return sum(moving), bool(saved_inputs), any(saved_inputs)


class _PartTrial:
    """One forward and backward of one part, which may be all of the batch."""

    def __init__(self, call: Call, option: Option) -> None:
        self.call = call
        self.option = option
        self._inputs: list[Tensor] = []
        self._roots: dict[int, GradientEdge] = {}
        """The edge of each output: its graph stays until the backward, whether or not the loss uses it."""
        self._noted: list[_Noted] = []
        """Per saved tensor: a weak reference to it, the key of its storage, its bytes, and whether it may travel."""
        self._kept: list[tuple[Tensor, object]] = []
        """Results that a second run is to be given, each with the value of ``_written`` for it."""
        # Not a method: in a cycle this object and all that it holds would wait for Python's collector.
        self._cache = CacheCostly(partial(_keep_costly, self._noted, self._kept, call))

    def forward(self) -> list[Tensor]:
        self._rewind()
        if self.option == "keep":
            self._inputs = self._enter()
            # Not a method: this object holds the graph, which would hold it, a cycle through C++.
            with torch.enable_grad(), saved_tensors_hooks(partial(_pack, self._noted), _unpack):
                outputs = numbers_of(self.call.run(self._inputs))
        elif self.option == "mixed":
            with torch.no_grad(), self._cache:
                outputs = numbers_of(self.call.run(self.call.inputs))
            if any(_written(self.call, result) != known for result, known in self._kept):
                raise _OtherOperations  # an operation in place has written to one, which the engine would refuse
            self._kept.clear()
        else:
            graphed = self.call.graphed
            with torch.set_grad_enabled(graphed):
                outputs = numbers_of(self.call.run(self._enter() if graphed else self.call.inputs))
                outputs = [output.detach() for output in outputs]
        self._roots = _edges(outputs)
        return [output.detach() for output in outputs]

    def differentiate(self, gradients: dict[int, Tensor]) -> list[Tensor | None]:
        """Run the backward; return the gradients of the activations."""
        roots, self._roots = self._roots, {}
        if self.option != "keep":
            self._inputs = self._enter()
            self._rewind()
            mixed = self.option == "mixed"
            replay = ReplayCostly(self._cache, _unpack, _OtherOperations) if mixed else nullcontext()
            with torch.enable_grad(), replay:
                roots = _edges(numbers_of(self.call.run(self._inputs)))
        reached = [slot for slot in gradients if slot in roots]
        if reached:  # a run that has skipped all weights, at random, has no graph
            torch.autograd.backward([roots[slot] for slot in reached], [gradients[slot] for slot in reached])
        inputs, self._inputs = self._inputs, []
        return [tensor.grad for tensor in inputs]

    @property
    def saved(self) -> dict[int, tuple[int, bool]]:
        """Bytes of each saved storage, and whether it may travel."""
        storages: dict[int, tuple[int, bool]] = {}
        for held, key, nbytes, moves in self._noted:
            # A part of the graph that nothing needs is gone already, and with it what was saved for it.
            if held() is not None:
                storages[key] = nbytes, moves or storages.get(key, (0, False))[1]
        return storages

    def _rewind(self) -> None:
        """Let every run draw the same, as the second one of a step does."""
        if self.call.rehearsed:
            self.call.draw_from(self.call.rehearsed)

    def _enter(self) -> list[Tensor]:
        needs = zip(self.call.inputs, self.call.needs_grad, strict=True)
        return [tensor.detach().requires_grad_(need) for tensor, need in needs]


_Noted = tuple[weakref.ref[Tensor], int, int, bool]


def _note(noted: list[_Noted], leaf: Any) -> Any:
    """Note a saved value, and return the object that the graph holds in its place."""
    if not isinstance(leaf, Tensor):
        return leaf
    kept = leaf.detach()  # a saved output would hold the node that holds it, a cycle through C++
    held = weakref.ref(kept)
    for storage in (part.untyped_storage() for part in tensors_in(leaf)):
        noted.append((held, address_of(storage), storage.nbytes(), travels(leaf)))
    return kept


def _pack(noted: list[_Noted], tensor: Tensor) -> Any:
    """Note a tensor that a graph saves; the parts of a sparse one travel one by one."""
    if tensor.layout is not torch.strided:
        return SparseParts(tensor, partial(_note, noted))
    return _note(noted, tensor)


def _unpack(saved: Any) -> Any:
    return saved.unpack(_unpack) if isinstance(saved, SparseParts) else saved


def _keep_costly(noted: list[_Noted], kept: list[tuple[Tensor, object]], call: Call, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        kept.append((leaf, _written(call, leaf)))
    return _note(noted, leaf)


def _written(call: Call, tensor: Tensor) -> object:
    """Return a value that a write to ``tensor`` changes, even one through a view with versions of its own."""
    return version(tensor), [int(total) for total in bit_sums([tensor])] if has_values(call) else []


class _OtherOperations(Exception):  # noqa: N818 - not an error of anybody's
    """The results that a first run of a block has kept are of no use to the second."""


def _edges(outputs: Sequence[Tensor]) -> dict[int, GradientEdge]:
    return {slot: get_gradient_edge(output) for slot, output in enumerate(outputs) if output.requires_grad}


@contextmanager
def _dropping_gradients(
    module: nn.Module, seen: Callable[[Tensor], None] | None, complete: Callable[[], bool]
) -> Iterator[None]:
    """Let no gradient of a parameter outlive its completion; gradients that were there are put back."""

    def drop(parameter: Tensor) -> None:
        if not complete():
            return
        if seen is not None and parameter.grad is not None:
            seen(parameter.grad)
        parameter.grad = None

    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    register: Callable[[Tensor, Callable[[Tensor], None]], Any] = Tensor.register_post_accumulate_grad_hook
    with gradients_aside(parameters), ExitStack() as hooks:
        for parameter in parameters:
            # After accumulation, as the engine's hook is: a weight that is used twice has one gradient by then.
            hooks.callback(register(parameter, drop).remove)
        yield


# Where a compiled block's graph breaks, operations run uncompiled, and torch would compile the hooks they call.
for _hook in (_pack, _unpack):
    skip_in_dynamo(_hook)
