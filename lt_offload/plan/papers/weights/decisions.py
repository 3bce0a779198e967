"""From a profile to the abstract problem of weight offloading, and from chosen gaps to decisions about tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lt_offload.plan.iteration.decisions import Decisions, TensorDecision, stays_between
from lt_offload.plan.iteration.memory import aligned, framework_bytes, state_room
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.plan.papers.weights.model import Gap, Phase, WeightChain
from lt_offload.schema.plan import UpdatePlace
from lt_offload.schema.profile import OptionName, Profile


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The decisions that come before gaps are chosen."""

    profile: Profile
    options: tuple[OptionName, ...]
    """Activation option per block."""
    host: bool
    """True if the host updates the layers whose weights leave."""

    @cached_property
    def tensors(self) -> tuple[tuple[int, ...], ...]:
        """Per block: the tensors that only it uses, which is what may leave."""
        of_blocks: list[list[int]] = [[] for _ in self.options]
        for index, tensor in enumerate(self.profile.tensors):
            if len(tensor.blocks) == 1:
                of_blocks[tensor.blocks[0]].append(index)
        return tuple(map(tuple, of_blocks))

    def place(self, tensor: int, *, leaves: bool) -> UpdatePlace:
        """Return where a tensor is updated whose layer's weight ``leaves`` in some gap, or never does.

        The first layer's next forward follows its update at once, so the host does not update it.
        """
        decided = self.profile.tensors[tensor]
        if not decided.trainable:
            return "none"
        if leaves and self.host and decided.blocks[0]:
            return "host"
        return "paged" if leaves and decided.state_bytes else "device"

    def chain(self, capacity_bytes: int) -> WeightChain:
        """Return the abstract problem: a layer per block, and ``capacity_bytes`` for everything that is decided."""
        profile, count = self.profile, len(self.options)
        tensors = profile.tensors
        places = (self.place(index, leaves=len(tensor.blocks) == 1) for index, tensor in enumerate(tensors))
        decisions = self._with(TensorDecision(place=place) for place in places)
        always = [index for index, tensor in enumerate(tensors) if len(tensor.blocks) != 1]
        fixed = sum(aligned(tensors[index].bytes) + state_room(tensors[index].state_bytes) for index in always)
        trained = [sum(tensors[index].bytes for index in owned if tensors[index].trainable) for owned in self.tensors]
        forward, backward = [], []
        for index, block in enumerate(profile.blocks):
            option = block.option(self.options[index])
            forward.append(option.forward_s)
            on_host = self.host and index > 0
            update = 0.0 if on_host else trained[index] / profile.optimizer.device_bytes_per_s
            backward.append((option.backward_s if block.has_backward else 0.0) + update)
        return WeightChain(
            weights=tuple(sum(aligned(tensors[index].bytes) for index in owned) for owned in self.tensors),
            compute_s=sum((*forward, *reversed(backward))),
            # What the framework frees in one step is not there for weights in that step: the arena has one extent.
            working=(int(framework_bytes(decisions.usage(profile), profile).max()) + fixed,) * (2 * count),
            memory=max(capacity_bytes, 1),
            changed=tuple(trained),
            states=tuple(sum(state_room(tensors[index].state_bytes) for index in owned) for owned in self.tensors),
            states_return=tuple(not self.host or index == 0 for index in range(count)),
        )

    def decisions(self, gaps: Iterable[Gap]) -> Decisions:
        """Return the decisions by which weights are absent in ``gaps``.

        Weights that the host updates are absent after their backward in any case: from then on the copy is of no use.
        """
        phases: dict[int, set[Phase]] = {}
        for gap in gaps:
            phases.setdefault(gap.layer, set()).add(gap.after)
        decided = [TensorDecision(place=self.place(index, leaves=False)) for index in range(len(self.profile.tensors))]
        for layer, gone in phases.items():
            # Once any of its weights leaves, a layer is updated on the host, after which the device's copy is stale.
            if self.host and layer and any(self.profile.tensors[index].trainable for index in self.tensors[layer]):
                gone.add("backward")
            for index in self.tensors[layer]:
                decided[index] = self._travelling(index, layer, gone)
        return self._with(decided)

    def _travelling(self, tensor: int, layer: int, gone: set[Phase]) -> TensorDecision:
        place, steps = self.place(tensor, leaves=True), timeline(self.profile)
        forward, backward = steps.forward(layer), steps.backward(layer)
        # A block without backward is not used between its forwards.
        uses = (forward, backward) if self.profile.blocks[layer].has_backward else (forward,)
        around = uses[-1], uses[0] + len(steps)
        gaps = {"backward": around, "forward": uses if len(uses) > 1 else around}
        stays = stays_between(list(dict.fromkeys(gap for after, gap in gaps.items() if after in gone)), len(steps))
        return TensorDecision(place=place, stays=stays, write_back=None if place in ("none", "host") else backward)

    def _with(self, tensors: Iterable[TensorDecision]) -> Decisions:
        return Decisions(tensors=tuple(tensors), options=self.options)
