"""Runs the user's own optimizer on some tensors at a time, on the device or on the host.

Any ``torch.optim.Optimizer`` that updates each tensor on its own works: a *sub-optimizer* is the same class with the
same attributes, whose only parameters are stand-ins ("proxies") for the tensors to be updated and whose state
dictionaries are the very dictionaries of the real optimizer. For torch's own Adam, AdamW and SGD the function that
their ``step`` calls in the end is called instead: ``step()`` over a few small tensors takes longer than their update.
Of Adam and AdamW on the host it is the compiled kernel, with the same bits (``optim/torch_adam.py``). With the same
lists and options the functions give the same numbers; whatever they do not cover is left to ``step``.

Group options are read when an update is queued, so a learning-rate scheduler may change them right afterwards. Tensors
are updated whole: a fused kernel rounds the elements behind its last full vector differently, so that a split tensor
would have other last bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from lt_offload import limits
from lt_offload.compat.torch import STEP_HOOKS, forget_step_hooks
from lt_offload.execute.device.lanes import plain_torch
from lt_offload.execute.memory.host_task import one_by_one
from lt_offload.execute.memory.live_group import LiveGroup
from lt_offload.execute.memory.snapshots import Snapshots
from lt_offload.execute.memory.tensors import Weight
from lt_offload.model.objects import same
from lt_offload.model.optimizers import (
    DrawWatch,
    StateAllocator,
    copied,
    is_known,
    managed,
    of_none,
    of_parameters,
    own_options,
    places_of,
    put,
    tensors_of,
    tried,
)
from lt_offload.optim.rows import RowUpdates
from lt_offload.optim.torch_adam import State, Update, adam_update


def updates_in_place(optimizer: Optimizer) -> bool:
    """Return whether updates write the states that are there, once there are any: no other object takes their place."""
    kind = type(optimizer)
    return kind in _RULES or f"{kind.__module__}.{kind.__qualname__}" == _OURS


def functional_update(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
) -> Update | None:
    """Return what updates ``params`` as ``optimizer.step()`` would, with the options of this moment.

    None where only ``step()`` knows: for other optimizers, for options that are tensors or need autograd, for states
    that are yet to be made.
    """
    make = _RULES.get(type(optimizer))
    # What a GradScaler leaves there for optimizers that unscale by themselves, or skip a step with infinities.
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    if make is None or group.get("differentiable") or scaled:
        return None
    if any(map(torch.is_complex, params)) or any(map(_is_sparse, grads)):
        return None
    return make(group, params, grads, states)


def _sgd(
    group: Mapping[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State]
) -> Update | None:
    buffers = [state.get("momentum_buffer") for state in states] if group["momentum"] != 0 else []
    if isinstance(group["lr"], Tensor) or any(buffer is None for buffer in buffers):
        return None
    return partial(
        sgd,
        list(params),
        list(grads),
        buffers,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        has_sparse_grad=False,
        foreach=group["foreach"],
        fused=group["fused"],
        grad_scale=None,
        found_inf=None,
    )


_RULES: dict[type[Optimizer], Callable[..., Update | None]] = {
    torch.optim.Adam: adam_update,
    torch.optim.AdamW: adam_update,
    torch.optim.SGD: _sgd,
}


_OURS = "lt_offload.optim.adamw.AdamW"
_is_sparse = attrgetter("is_sparse")

_OWN = {"param_groups", "state", *STEP_HOOKS}
_OWN |= {"step"}  # a scheduler's counting wrapper around the real optimizer's step
"""Attributes of an optimizer that those which stand for it have in another form."""


class Updates:
    """Access to one optimizer, tensor by tensor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.snapshots = Snapshots()
        """Snapshots of weights and states, which are set aside before they are updated on the host."""
        self._subs: dict[tuple[int, ...], Optimizer] = {}
        # By index, not by reference: ``load_state_dict`` replaces the dictionaries of groups and states, and an update
        # through an old one would use the learning rate from before.
        self._group_of: dict[nn.Parameter, int] = {}
        self._places: dict[nn.Parameter, tuple[int, int]] = {}
        self._indexed: list[list[int]] = []
        """By group: the identities of its parameters, as they were indexed."""
        self.generation = 0
        """Counts up when tensors of the optimizer's state are made or replaced, or given other memory."""
        self.states_move = False
        """A queued update may make, replace or move state tensors: whoever looks at them has to wait for it."""
        self.counts = False
        """Some states hold Python numbers: no operation shows when those are read."""
        self._replaces = False
        """The optimizer has replaced tensors in a state that existed, and may do so again."""
        self.without_gradients = tried(optimizer).without_gradients
        """Its step changes tensors without a gradient, too."""
        self._drawless = is_known(optimizer)
        """It never draws random numbers."""
        self._frozen: tuple[list[dict[str, Any]], dict[str, Any], dict[Any, Any]] | None = None
        """Options of the groups, attributes, and entries of no parameter, as the loop's own step began with them, until
        updates have used them."""
        self._updated: set[int] = set()
        """Indices of the weights whose update in this iteration is queued."""
        self._of_rows: dict[int, dict[str, Any]] = {}
        """By index of a weight that is updated in parts: its state as the iteration's first part found it."""
        self._known: set[Weight] = set()
        """Weights whose second update is queued: the first makes their state, the second would show a replacement."""
        self.index_groups()
        self.unshare(of_parameters(optimizer))

    def unshare(self, states: Iterable[dict[str, Any]]) -> None:
        """Give ``states`` tensors of their own, where an optimizer has several use one (a table of bitsandbytes')."""
        attributes = {name: value for name, value in vars(self.optimizer).items() if name not in _OWN}
        held = Counter(map(id, tensors_of(attributes).values()))
        held.update(id(value) for state in of_parameters(self.optimizer) for value in tensors_of(state).values())
        for state in states:
            for place, value in tensors_of(state).items():
                if held[id(value)] > 1:
                    with plain_torch():
                        put(state, place, value.clone())

    def index_groups(self) -> None:
        """Learn which group each parameter is in; call when groups may have been added."""
        members = [[*map(id, group["params"])] for group in self.optimizer.param_groups]
        if members == self._indexed:
            return
        self._indexed, self._places = members, places_of(self.optimizer)
        self._group_of = {param: group for param, (group, _) in self._places.items()}

    @property
    def members(self) -> set[nn.Parameter]:
        """The parameters of all groups."""
        return set(self._group_of)

    def freeze(self) -> None:
        """Let coming updates use options and attributes as they are now: the loop's own step may count them up."""
        groups = [copied(group) for group in self.optimizer.param_groups]
        self._frozen = groups, self._attributes(), of_none(self.optimizer)

    def end_iteration(self, weights: Iterable[Weight]) -> None:
        """Let updates use what there is then, again; refuses optimizers that change weights without a gradient."""
        self._frozen = None
        updated, self._updated = self._updated, set()
        for weight in weights if self.without_gradients and updated else ():
            if weight.index not in updated and weight.param.requires_grad:
                raise limits.WITHOUT_GRADIENT.error(f"{type(self.optimizer).__name__}, {weight.label}")

    def state(self, weight: Weight) -> dict[str, Any]:
        """Return the live state dictionary of ``weight``, or a new one that the optimizer does not know yet."""
        state: dict[str, Any] = self.optimizer.state.get(weight.param, {})
        return state

    def adopt(self, group: LiveGroup) -> None:
        """Let the host copies of ``group`` be the states that the optimizer has now, if it is one of states."""
        if not group.unchanged(self.state):
            self.generation += group.refresh(self.state)

    def bytes(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of the states of ``weights``."""
        return sum(value.nbytes for weight in weights for value in tensors_of(self.state(weight)).values())

    def order_states(self) -> None:
        """Put the states in the order of the parameters, as one step of all would have made them; none is made now."""
        state = self.optimizer.state
        ordered = [(param, state.pop(param)) for param in self._group_of if param in state]
        state.update(ordered)

    def leave_to_others(self, weights: Iterable[Weight]) -> None:
        """Note that other processes update ``weights`` in this iteration."""
        self._updated.update(weight.index for weight in weights)

    def prepare(self, weights: Sequence[Weight], grads: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that updates ``weights`` on the host, where ``grads`` are, with the present options."""
        self._updated.update([weight.index for weight in weights])
        self._bring_scalars_home(weights)
        update = self._by_function(weights, "host", grads) or self._by_step(weights, "host", grads)
        return partial(self._on_host, weights, update)

    def prepare_rows(
        self, weight: Weight, *, begins: bool
    ) -> Callable[[Tensor, Sequence[tuple[int, int]], bool], None]:
        """Return a function that updates rows of ``weight`` on the host, perhaps the first of an iteration."""
        self._updated.add(weight.index)
        self._bring_scalars_home([weight])
        if begins:
            # What there is now: by the time when this runs, somebody may have begun with others.
            self._of_rows[weight.index] = dict(self.state(weight))
        state = self._of_rows[weight.index]
        self.states_move = self.states_move or not state
        rows = RowUpdates(self.optimizer, weight.param, copied(self._live(self._group_of[weight.param])))

        def update(grad: Tensor, ranges: Sequence[tuple[int, int]], begins: bool) -> None:
            if not state:
                state.update(rows.new_state(weight.home))
                self.optimizer.state[weight.param] = dict(state)
                self.generation += 1
            self.snapshots.changing((weight.host, *tensors_of(state).values()))
            rows.run(weight.home, grad, state, ranges, begins=begins)

        return update

    def _on_host(self, weights: Sequence[Weight], update: Update) -> None:
        held = ((weight.host, *tensors_of(self.state(weight)).values()) for weight in weights)
        self.snapshots.changing(chain.from_iterable(held))  # which looks at none while there is no snapshot
        update()

    def _by_function(self, weights: Sequence[Weight], place: str, grads: Sequence[Tensor]) -> Callable[[], None] | None:
        """Return a function that updates ``weights`` without a sub-optimizer; None if only ``step`` can."""
        groups: defaultdict[int, tuple[list[Tensor], list[Tensor], list[Any]]] = defaultdict(lambda: ([], [], []))
        known = self.optimizer.state
        for weight, grad in zip(weights, grads, strict=True):
            params, gradients, states = groups[self._group_of[weight.param]]
            state = known.get(weight.param, {}) if weight.common_states is None else weight.common_states
            if place == "host":
                params.append(weight.host if weight.common is None else weight.common)
                states.append(state)
            else:
                assert weight.view is not None
                params.append(weight.view)
                states.append(state | weight.states.view)
            gradients.append(grad)
        updates = [functional_update(self.optimizer, self._live(index), *lists) for index, lists in groups.items()]
        made = [update for update in updates if update is not None]
        if len(made) < len(updates):
            return None
        return made[0] if len(made) == 1 else partial(one_by_one, made)

    def _by_step(self, weights: Sequence[Weight], place: str, grads: Sequence[Tensor]) -> Callable[[], None]:
        groups: dict[int, dict[str, Any]] = {}
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        alone: dict[Tensor, Mapping[str, Any]] = {}
        for weight, grad in zip(weights, grads, strict=True):
            data = weight.home if place == "host" else weight.view
            assert data is not None
            proxy = weight.proxy(place, data, grad)
            index = self._group_of[weight.param]
            if index not in groups:
                # Copied: a learning rate may be a tensor that a scheduler changes in place before this update runs.
                groups[index] = copied(self._live(index)) | {"params": []}
            groups[index]["params"].append(proxy)
            state[proxy] = self.state(weight) if weight.common_states is None else weight.common_states
            alone[proxy] = own_options(self.optimizer, weight.param, self._places[weight.param])
        sub = self._sub(tuple(weight.index for weight in weights))
        owned = list(zip(weights, state.items(), strict=True))
        held = (value for own in state.values() for value in own.values())
        self.counts = self.counts or any(not isinstance(value, (Tensor, NoneType)) for value in held)
        if self._replaces or not all(state.values()) or not self._known.issuperset(weights):
            self.states_move = True
            self._known.update(weight for weight, (_, own) in owned if own)

        # A dictionary with tensors is each update's own, frozen or not. bitsandbytes brings its tables to the device of
        # what it updates, where they become part of that one's state, and updates on the host run beside it.
        attributes = _with_own_tables(self._frozen[1] if self._frozen is not None else self._attributes())
        state.update(self._frozen[2] if self._frozen is not None else of_none(self.optimizer))
        if place == "host":
            # A GradScaler's are on the GPU, and change there before the host's lane would ask for them.
            attributes = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in attributes.items()}
        attributes = attributes | managed(self.optimizer, alone)

        drawn = partial(limits.RANDOM_UPDATE.error, f"optimizer {type(self.optimizer).__name__} draws random numbers")

        def run() -> None:
            vars(sub).update(attributes)
            sub.param_groups = list(groups.values())
            sub.state = state
            before = [[*tensors_of(own).values()] for _, (_, own) in owned]
            with nullcontext() if self._drawless else DrawWatch(self.optimizer, drawn):
                type(sub).step(sub)  # the class's method: hooks and wrappers of the real optimizer's step run once
            for weight, (proxy, own) in owned:
                proxy.grad = None
                if own and weight.common_states is None:
                    self.optimizer.state[weight.param] = own
            pairs = zip(before, owned, strict=True)
            changed = [known for known, (_, (_, own)) in pairs if not same(known, tensors_of(own).values())]
            self.generation += bool(changed)
            self._replaces |= any(changed)

        return run

    def update_on_device(self, weights: Sequence[Weight], grads: Sequence[Tensor]) -> None:
        """Update ``weights`` in their device copies now, states included; the caller has waited for all of them."""
        self._updated.update([weight.index for weight in weights])
        for weight in weights:
            states = weight.states
            if states.group is not None and not states.unchanged(state := self.state(weight)):
                self.generation += states.refresh(state)
        update = self._by_function(weights, "device", grads)
        if update is None:
            self._step_on_device(weights, grads)
            return
        with torch.no_grad():
            update()

    def _step_on_device(self, weights: Sequence[Weight], grads: Sequence[Tensor]) -> None:
        self._move_scalars(weights)
        run = self._by_step(weights, "device", grads)
        paged = [w.states for w in weights if w.states.group is not None and w.states.group.buffer is not None]
        newborn = [states for states in paged if not states.known]
        resident = [states for states in paged if states.known]
        places = [(states.weight.view, states.memory()) for states in newborn if states.weight.view is not None]
        for states in resident:
            states.enter()
        try:
            with torch.no_grad(), StateAllocator(places):
                run()
            # What an update has put in the place of a tensor, or added, goes into the arena, too.
            newborn += [states for states in resident if not states.unchanged(self.state(states.weight))]
            if newborn:
                self.unshare([self.state(states.weight) for states in newborn])
            for states in newborn:
                states.born(self.state(states.weight))
                self.generation += 1
        finally:
            for states in resident:
                states.leave()

    def _move_scalars(self, weights: Sequence[Weight]) -> None:
        """Move step counters to where a fused update wants them: ``load_state_dict`` leaves them on the host."""
        for weight in weights:
            state = self.state(weight)
            assert weight.view is not None
            for place, value in tensors_of(state).items():
                if value.numel() == 1 and self._counter_on_device(weight.param):
                    moved = value.to(weight.view.device)
                    put(state, place, moved)
                    self.generation += moved is not value

    def _bring_scalars_home(self, weights: Sequence[Weight]) -> None:
        """Move step counters back to the host: another plan had these weights updated on the device."""
        for weight in weights:
            state = self.state(weight)
            for value in state.values():
                if type(value) is not Tensor or not value.is_cpu:
                    break
            else:  # mostly
                continue
            for place, value in tensors_of(state).items():
                if value.numel() == 1 and value.device.type != "cpu":
                    put(state, place, value.cpu())
                    self.generation += 1

    def _counter_on_device(self, param: nn.Parameter) -> bool:
        group = self._live(self._group_of[param])
        return bool(group.get("fused") or group.get("capturable"))

    def _live(self, group: int) -> dict[str, Any]:
        live: dict[str, Any] = (self._frozen[0] if self._frozen is not None else self.optimizer.param_groups)[group]
        return live

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes that a step of tensors of its own may find: counters of steps, above all."""
        return _with_own_tables({name: value for name, value in vars(self.optimizer).items() if name not in _OWN})

    def move(self, params: Iterable[nn.Parameter], device: torch.device) -> None:
        """Bring the states of ``params`` to ``device``; counters of steps as ``Optimizer.load_state_dict`` does it."""
        for param in params:
            state = self.optimizer.state.get(param, {}) if param in self._group_of else {}
            for place, value in tensors_of(state).items():
                if value.device != device:
                    if place == "step" and not self._counter_on_device(param):
                        continue
                    put(state, place, value.to(device))
                    self.generation += 1

    def close(self) -> None:
        """Let go of what stood for the optimizer, and of the device copies that it has updated."""
        self._subs.clear()

    def _sub(self, key: tuple[int, ...]) -> Optimizer:
        sub = self._subs.get(key)
        if sub is None:
            # Not by its constructor, whose arguments nobody has kept; its attributes say all that a step asks for.
            sub = object.__new__(type(self.optimizer))
            vars(sub).update(self._attributes())
            forget_step_hooks(sub)
            self._subs[key] = sub
        return sub


def _with_own_tables(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: dict(value) if type(value) is dict and any(isinstance(part, Tensor) for part in value.values()) else value
        for name, value in attributes.items()
    }
