"""Costs of a model and a machine: frozen data, JSON both ways. Imports no torch, so plans can be made anywhere.

Sizes are bytes, times seconds, speeds bytes per second. Block ``i`` of ``L`` runs its forward at step ``i`` and its
backward at step ``2L - 1 - i`` of an iteration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

from lt_offload.schema.files import MOST_NUMBER, Strict, load_json, save_json
from lt_offload.schema.lanes import LaneName
from lt_offload.units import format_bytes

PROFILE_SCHEMA = 2

COLLECTED_BELOW = 16 << 20
"""Gradients smaller than this are collected before an update on the device uses them up."""

GATHERED_BELOW = 256 << 10
"""Gradients smaller than this are gathered on the device before they leave for the host."""

Size = Annotated[int, Ge(0)]
Count = Annotated[int, Gt(0)]
Amount = Annotated[float, Interval(ge=0, le=MOST_NUMBER)]
Speed = Annotated[float, Interval(gt=0, le=MOST_NUMBER)]
Share = Annotated[float, Interval(ge=0, le=1)]

OptionName = Literal["keep", "recompute", "offload", "mixed", "reload", "discard", "fused", "chunked"]
"""See :mod:`lt_offload.model.saving`."""
RECORDED: tuple[OptionName, ...] = ("keep", "offload", "fused", "chunked")
"""Options with which a block runs once, with a graph."""
WITH_LOSS: tuple[OptionName, ...] = ("fused", "chunked")
"""Options with which the last block computes the loss, too; its output is handed to nobody."""
BlockKind = Literal["embedding", "layer", "head", "other"]


def fingerprint(tensors: Sequence[tuple[tuple[int, ...], str, bool, tuple[int, ...]]], blocks: int) -> str:
    """Return the identity of a structure: (shape, dtype, trainable, blocks that use it) of its ``tensors``."""
    # Of built-in types alone, so that the text, and with it the identity, is the same on every machine.
    return hashlib.sha256(repr([*tensors, blocks]).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadProfile(Strict):
    """Cost of one block's reading one tensor in host memory instead of a device copy."""

    forward_s: float
    """Device seconds that its forward takes longer."""
    backward_s: float
    """Device seconds that its backward takes longer."""
    forward_bytes: Size
    """Bytes that cross the link to the device in its forward: for an embedding the rows of the batch only."""
    backward_bytes: Size
    """Bytes that cross the link to the device in its backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroCopyProfile(Strict):
    """Cost of computations' access to one tensor in host memory."""

    reads: tuple[ReadProfile, ...]
    """One per block that uses the tensor, in their order: of a tied table, the embedding's and the projection's."""
    grad_s: float
    """Device seconds that the backward takes longer if it writes the gradient to host memory itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorProfile(Strict):
    """One parameter tensor. Its index in :attr:`Profile.tensors` identifies it in plans."""

    name: str
    """Name in ``model.named_parameters()`` (the first one, if tied)."""
    shape: tuple[Size, ...]
    dtype: str
    """torch name without prefix, e.g. ``"float32"``."""
    bytes: Size
    """Size of the parameter; its gradient has the same size."""
    trainable: bool
    blocks: tuple[int, ...]
    """Indices of the blocks that use it, ascending; more than one if tied."""
    state_bytes: Size = 0
    """Optimizer state that is paged with it: all state tensors of more than one element."""
    sum_bytes: int = 0
    """Part of ``state_bytes`` that stands for a sum of gradients: of several processes each has one."""
    scratch_bytes: Size | None = None
    """Taken for a moment by its update on the device. None: as the largest tensor's (``OptimizerProfile``)."""
    zero_copy: ZeroCopyProfile | None = None
    """None: it cannot be accessed in host memory."""
    lookup_bytes: int = 0
    """Bytes of one batch's rows, one per token, of a table in which the first block only looks rows up and with which
    the last one multiplies. 0: no such table, or its optimizer cannot update rows by themselves."""

    def read(self, block: int) -> ReadProfile:
        """Return the cost of reading the tensor in host memory for ``block``, which uses it."""
        assert self.zero_copy is not None, f"{self.name} cannot be read in host memory"
        return self.zero_copy.reads[self.blocks.index(block)]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionProfile(Strict):
    """One way to handle a block's activations. ``saved`` excludes the block's input, see ``keeps_input``."""

    name: OptionName
    forward_s: Amount
    """Device time of the forward, without waits for copies."""
    backward_s: Amount
    """Device time of the backward including what is recomputed, without waits and without the optimizer."""
    saved_bytes: Size
    """Device bytes held from the end of the forward to the start of the backward."""
    keeps_input: bool
    """True: the block's input stays on the device between forward and backward."""
    offload_bytes: Size
    """Copied to the host in the forward and back in the backward; they stay allocated on the host."""
    forward_peak_bytes: Size
    """Peak above saved bytes, input and output while the forward runs."""
    backward_peak_bytes: Size
    """Peak above saved bytes, input, output and the gradient of the input while the backward runs, parameter gradients
    excluded; includes everything that is rebuilt or fetched back."""
    held_peak_bytes: int | None = None
    """The same with the gradients of all the block's parameters in it, from when each is complete to the end of the
    backward: less than the sum of both, as activations go while gradients come. None: not known, take the sum."""
    passing_peak_bytes: int | None = None
    """The same with each of these gradients in it only until it is complete, as when each leaves at once. None: not
    known, take ``backward_peak_bytes`` and the largest of them."""
    before_loss_bytes: int | None = None
    """``forward_peak_bytes`` of a last block without the loss that is computed behind it. At the end of its own forward
    copies of activations may give their memory back. None: not known, or there is no such loss."""
    chunk_tokens: int = 0
    """Tokens of which ``chunked`` has logits at a time; 0 for other options."""

    def more(self, *, saved: int = 0, forward: int = 0, backward: int = 0) -> OptionProfile:
        """Return the option with so many more bytes: saved ones, and at the peaks of its forward and its backward."""
        held, passing = self.held_peak_bytes, self.passing_peak_bytes
        return replace(
            self,
            saved_bytes=self.saved_bytes + saved,
            forward_peak_bytes=self.forward_peak_bytes + forward,
            backward_peak_bytes=self.backward_peak_bytes + backward,
            held_peak_bytes=None if held is None else held + backward,
            passing_peak_bytes=None if passing is None else passing + backward,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProfile(Strict):
    """One element of the block sequence."""

    name: str
    """Module path."""
    kind: BlockKind
    input_bytes: Size
    """Interface activation that arrives from the block before (0 for the first: token ids are not counted)."""
    output_bytes: Size
    """Interface activation handed on; 0 for the last block."""
    launch_s: Amount
    """Host time to launch the kernels of one forward or backward."""
    options: tuple[OptionProfile, ...]
    has_backward: bool = True
    """False for frozen blocks before the first trainable parameter."""
    graphed: bool = False
    """True: the block always runs with a graph, as torch would take other kernels without."""
    chained: bool = False
    """True: its activation inputs are untouched outputs of the block before; running that block again gives them."""

    def option(self, name: str) -> OptionProfile:
        """Return the option called ``name``; raises ``KeyError`` if the block does not offer it."""
        for option in self.options:
            if option.name == name:
                return option
        raise KeyError(f"block {self.name} has no option {name!r}; it offers {[o.name for o in self.options]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerProfile(Strict):
    """Cost of one update, for the optimizer and dtype that will really run."""

    name: str
    host_bytes_per_s: Speed
    """Parameter bytes updated per second by the host."""
    device_bytes_per_s: Speed
    """Parameter bytes updated per second by the device."""
    fused_bytes_per_s: float = 0.0
    """The same by a kernel that touches each byte once, as people with enough memory run it; 0: none is faster."""
    scratch_ratio: Amount = 0.0
    """Temporary bytes per parameter byte during a device update (foreach 1-2, fused 0), of the largest tensor."""
    host_threads: Size = 0
    """Threads with which the host was measured and shall update; 0: as many as torch uses."""
    host_speeds: dict[Count, Speed] = field(default_factory=dict)
    """The same speed by number of threads, where it is known: fewer take less of the host's memory from copies."""
    host_kernel: bool = False
    """True if the compiled kernel of AdamW updates on the host."""


EMULATED = "emulated"
"""The name of a machine whose device is emulated in RAM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile(Strict):
    """One machine: measured by ``profile.hardware``, or read from ``configs/hardware/*.yaml``."""

    name: str
    device_bytes: Count
    """Memory of the device."""
    host_bytes: Count
    """RAM that the process may take in all."""
    pinnable_bytes: Size
    """RAM that may be pinned; equals ``host_bytes`` where there is no limit. Memory that is taken first gets it."""
    h2d_bytes_per_s: Speed
    """Host to device: of a machine while the other direction is busy, too; in a profile that says how lanes slow each
    other down (``Profile.contention``) alone, or the other direction would count twice."""
    d2h_bytes_per_s: Speed
    """Device to host, likewise."""
    h2d_alone_bytes_per_s: Amount = 0.0
    """Host to device, while nothing else is copied; 0: not measured."""
    d2h_alone_bytes_per_s: Amount = 0.0
    """Device to host, likewise."""
    staged_bytes_per_s: Amount = 0.0
    """The slower direction while both are busy, for RAM that cannot be pinned; 0: not measured."""
    context_bytes: Size = 0
    """Device memory taken before the first tensor: context, kernels, library workspaces."""
    process_bytes: Size = 0
    """RAM that the process takes before the first tensor: Python, PyTorch, libraries, the host's side of CUDA."""
    flops_per_s: dict[str, Amount] = field(default_factory=dict)
    """Sustained matrix multiplication rate per dtype, for estimated profiles."""
    peak_flops_per_s: dict[str, Amount] = field(default_factory=dict)
    """The same as the card's vendor specifies it, without sparsity; a plan's rate is a share of it."""
    device_memory_bytes_per_s: Amount = 0.0
    """For estimated profiles."""
    host_memory_bytes_per_s: Amount = 0.0
    """For estimated profiles."""
    root_bytes_per_s: Amount = 0.0
    """Speed of copies of all cards of the machine together, in one direction; 0: each as fast as alone."""
    exchange_bytes_per_s: Amount = 0.0
    """Bytes of gradients in host memory that the processes add up per second; 0: not measured."""
    device_exchange_bytes_per_s: Amount = 0.0
    """The same of gradients on the devices."""
    network_bytes_per_s: Speed = 1.1e9
    """Between machines, in each direction. By default that of an Ethernet of 10 Gbit/s, of which about 94 % are data
    with frames of 1500 bytes (1448 of 1538 on the wire, IEEE 802.3, TCP with timestamps), 88 % assumed."""
    network_s: Amount = 5e-5
    """Latency of a message; assumed."""
    source: str = ""
    """Origin of the numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown(Strict):
    """Measured slowdown of one lane while others are busy all the time."""

    lane: LaneName
    beside: tuple[LaneName, ...]
    factor: float
    """Its time beside them by its time alone: 1 if they share nothing."""
    scatter: float = 0.0
    """Half the distance between the extremes of repeated measurements, relative to ``factor``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contention(Strict):
    """Shares of the lanes in the bandwidth of the host's memory; on the emulated device in the cores, too.

    A lane's share is the part of it that the lane takes while it runs alone, at full speed. Lanes whose shares add up
    to more than 1 slow each other down: each gets what it asks for or an equal part, whichever is less (max-min
    fairness). By default nothing is shared.
    """

    compute: Share = 0.0
    h2d: Share = 0.0
    d2h: Share = 0.0
    host: Share = 0.0
    """Share of updates on the host."""
    slowdowns: tuple[Slowdown, ...] = ()
    """The measurements that the shares come from; empty for an estimate."""

    def of(self, lane: LaneName) -> float:
        """Return the share of ``lane``; 0 for one that has no field here, such as ``none``."""
        share: float = getattr(self, lane, 0.0)
        return share


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Profile(Strict):
    """Everything the planner needs to know."""

    model: str
    """Class name or config name, for people."""
    dtype: str
    batch_size: Count
    sequence_length: Count
    tensors: tuple[TensorProfile, ...]
    blocks: tuple[BlockProfile, ...]
    optimizer: OptimizerProfile
    hardware: HardwareProfile
    shared_bytes: Size = 0
    """On the device during the whole iteration: masks, rotary tables, buffers, parameters outside the blocks."""
    page_table_bytes: int = 0
    """Device memory through which the device reaches the host copies, once they are page-locked."""
    slack_bytes: Size = 0
    """Device memory that the framework's allocator holds beyond what it has allocated: rounding, fragmentation."""
    slack_share: float = 0.0
    """At least this part of the device memory that a plan takes is added as slack, 0.02 being 2 %: blocks are measured
    one at a time, and an allocator that has come to its limit waits for the device each time it gives something back.
    """
    contention: Contention = Contention()
    """Slowdown of lanes by each other."""
    forwards: Count = 1
    """Calls of the model with gradients per micro-batch. Blocks are those of the largest one."""
    deferred_forwards: Size = 0
    """Number of them that another call follows before their backward; each of these runs a second time for it."""
    scatter: Amount = 0.0
    """Half the distance between the extremes of repeated measurements of the blocks, relative to what was taken of
    them, 0.02 being 2 %; more on a machine that is busy with something else."""
    estimated: bool = False
    """True if times are a roofline estimate and not a measurement."""
    iterations: tuple[int, ...] = ()
    """Iterations of the training, from 1, that measured and corrected it; empty: it was measured outside a training."""
    flops_per_token: Amount = 0.0
    """Operations that training takes per token, as :mod:`lt_offload.profiling.flops` counts them; 0: not known."""
    peak_flops_per_s: Amount = 0.0
    """The rate that the device is specified for, in the dtype in which products are computed; 0: not known."""
    parts: Count = 1
    """Parts of the batch that go through each block in turn: times, and what is saved, are of all of them, peaks those
    of one beside what the others hold."""
    tile_tokens: Size = 0
    """Tokens at a time in the parts of blocks that treat each token on its own; 0: all."""
    processes: Count = 1
    """Processes of the machine that train together. RAM is counted for one of them: common memory by its part."""
    machines: Count = 1
    """Machines like this one that train together, each with as many processes."""
    common_updates: bool = False
    """True: beside frozen weights, they have in common the weights that the host updates, and their states."""
    added_up_first: bool = False
    """True: all gradients of all processes are added up before the first update, as they or their norm are read."""
    kernels: str = ""
    """The kernels with which modules of the model compute instead of their own code, in words; empty: none."""
    schema: int = PROFILE_SCHEMA

    @property
    def fingerprint(self) -> str:
        """Identity of the model structure (not of names, sizes of batches or hardware), which a plan must match."""
        return fingerprint([(t.shape, t.dtype, t.trainable, t.blocks) for t in self.tensors], len(self.blocks))

    def scratch(self, index: int) -> int:
        """Return the bytes that an update of tensor ``index`` on the device takes for a moment."""
        tensor = self.tensors[index]
        measured = tensor.scratch_bytes
        return int(tensor.bytes * self.optimizer.scratch_ratio) if measured is None else measured

    def with_host_threads(self, threads: int) -> Profile:
        """Return the profile of updates with so many host threads; itself if no speed is known for that number."""
        speed = self.optimizer.host_speeds.get(threads)
        if speed is None or threads == self.optimizer.host_threads:
            return self
        # Slower updates take as much less of the memory's bandwidth.
        share = min(1.0, self.contention.host * speed / self.optimizer.host_bytes_per_s)
        optimizer = replace(self.optimizer, host_threads=threads, host_bytes_per_s=speed)
        return replace(self, optimizer=optimizer, contention=replace(self.contention, host=share))

    def __repr__(self) -> str:
        """Return one line; all of a profile is many pages."""
        from lt_offload.schema.explain import samples_of

        weights = format_bytes(sum(tensor.bytes for tensor in self.tensors))
        how = "estimated" if self.estimated else "measured"
        return (
            f"<Profile of {self.model}: {len(self.blocks)} blocks, {weights} in {len(self.tensors)} tensors, "
            f"batch {samples_of(self)}, {how} for {self.hardware.name}>"
        )

    def save(self, path: str | Path) -> Path:
        """Write JSON."""
        return save_json(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read JSON; raises ``PlanError`` if it is not a profile of this schema version."""
        return load_json(cls, path, schema=PROFILE_SCHEMA, problems=problems)


def problems(profile: Profile) -> Iterator[str]:
    """Yield the contradictions between values of ``profile``, one sentence each; nothing if it is sound."""
    if profile.deferred_forwards > profile.forwards:
        yield f"deferred_forwards is {profile.deferred_forwards} of {profile.forwards} forwards"
    if len(profile.blocks) < 2:
        yield f"it has {len(profile.blocks)} blocks, a model has two or more"
    backward = [block.has_backward for block in profile.blocks]
    # Blocks without a backward are those before the first trainable parameter, so none of them comes after one with.
    if any(before and not after for before, after in pairwise(backward)):
        yield "blocks: one without a backward comes after one with a backward"
    for at, block in enumerate(profile.blocks):
        names = [option.name for option in block.options]
        if not names or len(set(names)) < len(names):
            yield f"blocks.{at}: its options are {', '.join(names) or 'none'}; it needs one or more different ones"
    for at, tensor in enumerate(profile.tensors):
        yield from (f"tensors.{at}: {problem}" for problem in _of_tensor(tensor, backward))


def _of_tensor(tensor: TensorProfile, backward: list[bool]) -> Iterator[str]:
    # The order counts: the first block is the one that ops on the tensor name, and `zero_copy.reads` has one entry for
    # each.
    if not tensor.blocks or list(tensor.blocks) != sorted(set(tensor.blocks)):
        yield f"its blocks {tensor.blocks} are not one or more in ascending order"
    elif not 0 <= tensor.blocks[0] <= tensor.blocks[-1] < len(backward):
        yield f"its blocks {tensor.blocks} do not exist, there are {len(backward)}"
    # Its gradient would never be complete, and no op could update it.
    elif tensor.trainable and not any(backward[block] for block in tensor.blocks):
        yield "it is trainable, but no block that uses it has a backward"
    if tensor.zero_copy is not None and len(tensor.zero_copy.reads) != len(tensor.blocks):
        yield f"zero_copy.reads: {len(tensor.zero_copy.reads)} for {len(tensor.blocks)} blocks"
