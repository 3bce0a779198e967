"""Saved plans, and their check against the present model, batch and memory.

A plan is in a file of its own, or in the checkpoint of the run that goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lt_offload.errors import ConfigError, PlanError
from lt_offload.execute.memory.common import check_beside
from lt_offload.model.batch import Size
from lt_offload.model.tiles import check_tiles
from lt_offload.plan import Settings, check
from lt_offload.profiling.hardware import measured_before
from lt_offload.schema.explain import KERNELS
from lt_offload.schema.files import from_json, to_json
from lt_offload.schema.plan import PLAN_SCHEMA, Plan
from lt_offload.schema.profile import PROFILE_SCHEMA, Profile
from lt_offload.suggest import some

ONE_BATCH = Settings()
"""One micro-batch per update, no clipping by norm."""
KEY = "lt_offload"
"""The strategy's key in a checkpoint."""


def load_plan(
    path: str | Path,
    memory: int,
    settings: Settings = ONE_BATCH,
    *,
    micro_batches: int | Literal["auto"] = "auto",
    processes: int = 1,
    machines: int = 1,
) -> Plan:
    """Return the saved plan at ``path``, checked as far as that goes without a model.

    Raises ``PlanError`` if it is no plan, needs more than ``memory`` bytes, has no room for the sums of gradients that
    ``settings`` need, updates before the norm is known by which the run clips, takes batches in another number of parts
    than ``micro_batches``, or updates where the gradients of all ``processes``, on so many ``machines``, are not there.
    """
    plan = Plan.load(path)
    if micro_batches not in ("auto", plan.parts):
        raise PlanError(
            f"plan={str(path)!r} has micro_batches={plan.parts}, which decides about the order of sums, and "
            f"micro_batches={micro_batches} is set; set micro_batches={plan.parts} or 'auto', or plan again"
        )
    if not plan.adds_up and settings.accumulate > 1:
        raise PlanError(
            f"plan={str(path)!r} is for 1 micro-batch per update, and accumulate_grad_batches={settings.accumulate} "
            "needs room for sums of gradients; plan again, or set accumulate_grad_batches=1"
        )
    if settings.delayed and not plan.delayed:
        raise PlanError(
            f"plan={str(path)!r} updates weights before the norm of all gradients is known, by which gradient_clip_val "
            "clips, before precision='16-mixed' knows that none is infinite, and before on_after_backward and "
            "on_before_optimizer_step, where hooks look at them; plan again, or set gradient_clip_algorithm='value' "
            "and another precision, and leave such hooks out"
        )
    if processes > 1 and not plan.delayed:
        try:
            check_beside(plan, machines=machines)
        except PlanError as error:
            raise PlanError(f"plan={str(path)!r} is not one for devices={processes // machines}: {error}") from None
    if plan.budget_bytes > memory:
        raise PlanError(
            f"plan={str(path)!r} needs memory={plan.budget_bytes}, there are {memory} bytes; raise memory or plan again"
        )
    return plan


def replay(path: str | Path, profile: Profile, memory: int) -> Plan:
    """Return the saved plan at ``path``; raises ``PlanError`` if it does not fit today's model, batch or memory."""
    plan = load_plan(path, memory)
    if plan.fingerprint != profile.fingerprint:
        raise PlanError(
            f"plan={str(path)!r} was made for another model ({plan.model}, {len(plan.options)} blocks) or for other "
            f"shapes, dtypes or frozen weights; this is {profile.model} with {len(profile.blocks)} blocks; plan again"
        )
    check_tiles(plan.tile_tokens, profile.tile_tokens)
    violations = check(plan, profile)
    if violations:
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise PlanError(f"plan={str(path)!r} cannot be carried out: {violations[0]}{more}; plan again")
    return plan


# -- in checkpoints ---------------------------------------------------------------------------------------------------


def record(
    module: nn.Module, profile: Profile | None, plan: Plan, settings: Settings, shown: Iterable[Size]
) -> dict[str, Any]:
    """Return the record of a run for its checkpoint: trained weights, batches, settings, profile and plan.

    The profile is in it because measuring machine and optimizer again takes RAM that the states need by then.
    """
    return {
        "batch_size": (profile or plan).batch_size,
        "micro_batches": (profile or plan).parts,
        "tile_tokens": (profile or plan).tile_tokens,
        "trained": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
        "settings": settings.values(),
        "profile": None if profile is None else to_json(profile),
        "plan": to_json(plan),
        "shown": [astuple(size) for size in shown],
    }


def _say(sentence: str) -> None:
    rank_zero_info(f"offmate: {sentence}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """The record of a run in its checkpoint; fields are None where the checkpoint lacks them, or there is none."""

    batch_size: int | None = None
    micro_batches: int | None = None
    tile_tokens: int | None = None
    trained: frozenset[str] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    profile: str | None = None
    plan: str | None = None
    shown: tuple[Size, ...] = ()
    """Sizes of the batches whose steps were profiled."""
    say: Callable[[str], None] = _say

    @classmethod
    def of(cls, noted: Mapping[str, Any] | None, say: Callable[[str], None] = _say) -> Before:
        """Return the record that :func:`record` has ``noted`` in a checkpoint."""
        if noted is None:
            return cls(say=say)
        trained = noted.get("trained")
        return cls(
            batch_size=noted["batch_size"],
            micro_batches=int(noted.get("micro_batches", 1)),
            tile_tokens=int(noted.get("tile_tokens", 0)),
            trained=None if trained is None else frozenset(trained),
            settings=noted.get("settings", {}),
            profile=noted.get("profile"),
            plan=noted.get("plan"),
            shown=tuple(Size(*size) for size in noted.get("shown", ())),
            say=say,
        )

    def train_as_before(self, module: nn.Module, optimizers: Iterable[Optimizer], way_out: str) -> None:
        """Freeze and unfreeze weights as in the checkpoint; ``ConfigError`` if no optimizer has one that trained."""
        trained = self.trained
        if trained is None:
            return
        held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        parameters = dict(module.named_parameters())
        if lost := [name for name, p in parameters.items() if name in trained and p not in held]:
            what = "trained weights that no optimizer of this run holds"
            raise ConfigError(f"the run of the checkpoint {what}: {some(lost)}; {way_out}")
        for trains in (True, False):
            changed = [n for n, p in parameters.items() if p.requires_grad != trains and (n in trained) == trains]
            for name in changed:
                parameters[name].requires_grad_(trains)
                owner: Any = module.get_submodule(name.rpartition(".")[0])
                if trains and getattr(owner, "running_mean", None) is not None:
                    owner.track_running_stats = True  # of a batch norm, for which BaseFinetuning switches it off
            if changed:
                how = "trained" if trains else "frozen"
                self.say(f"as in the run of the checkpoint, from now on {how}: {some(changed)}")

    def warn_of_frozen(self, module: nn.Module) -> None:
        """Warn of weights that trained in the run before and do not now, because a hook has frozen them."""
        trained = self.trained or ()
        if frozen := [name for name, p in module.named_parameters() if name in trained and not p.requires_grad]:
            rank_zero_warn(
                f"offmate: trained in the run of the checkpoint, and frozen now by a hook of this one: {some(frozen)}; "
                "if they are to train on, let that hook see that the run is resumed"
            )

    def warn_of_changes(self, profile: Profile) -> None:
        """Warn if what decides about numbers was something else in the run before."""
        sums = "sums of gradients are in another order, so that last bits change"
        for name, now, effect in (
            ("batch_size", profile.batch_size, "the order of the data and the number of steps change"),
            ("micro_batches", profile.parts, sums),
            ("tile_tokens", profile.tile_tokens, sums),
        ):
            before = getattr(self, name)
            if before not in (None, now):
                way = before or None if name == "tile_tokens" else "'auto'"
                rank_zero_warn(
                    f"offmate: the run of the checkpoint had {name}={before or None}, this one has {now or None}: "
                    f"{effect}; {name}={way} keeps what it was"
                )

    def measured(self, device: torch.device, *, processes: int, machines: int) -> Profile | None:
        """Return the profile of the run before, if that had as many ``machines`` with such a ``device``.

        The process's own memory is that of the earlier run: memory left over from reading the checkpoint is used again.
        ``processes``: of each machine.
        """
        if self.profile is None:
            return None
        try:
            profile = from_json(Profile, self.profile, source="the checkpoint's profile", schema=PROFILE_SCHEMA)
        except PlanError as error:
            self.say(f"the machine is measured again: {error}")
            return None
        machine = measured_before(profile.hardware, device)
        # Processes of one machine share its links and its RAM.
        if machine is None or (profile.processes, profile.machines) != (processes, machines):
            return None
        return replace(profile, hardware=machine)

    def own_plan(self, profile: Profile, settings: Settings, budget: int) -> Plan | None:
        """Return the plan of the run before, None if there is none or it cannot be carried out here."""
        if self.plan is None:
            return None
        try:
            plan = from_json(Plan, self.plan, source="the checkpoint's plan", schema=PLAN_SCHEMA)
        except PlanError as error:
            self.say(f"the run is planned again: {error}")
            return None
        host = min(plan.host_budget_bytes, settings.host_budget(profile.hardware))
        plan = replace(plan, budget_bytes=min(plan.budget_bytes, budget), host_budget_bytes=host)
        why = next(self._misfits(plan, profile, settings), None)
        if why is not None:
            self.say(f"the checkpoint's plan does not serve here, and the run is planned again: {why}")
            return None
        self.say("the plan is that of the checkpoint's run")
        return plan

    def _misfits(self, plan: Plan, profile: Profile, settings: Settings) -> Iterator[str]:
        if bool(profile.kernels) != any(note.startswith(KERNELS) for note in plan.notes):
            yield "layers compute with other kernels"
        present = settings.values()
        changed = [name for name in present if name != "solver_time_limit" and present[name] != self.settings.get(name)]
        if changed:
            yield f"{', '.join(changed)} changed"
        processes = profile.processes * profile.machines
        if plan.processes != processes:
            yield f"it is for {plan.processes} processes, and there are {processes}"
        if plan.parts != profile.parts:
            yield f"it has micro_batches={plan.parts}"
        if plan.tile_tokens != profile.tile_tokens:
            yield f"it has tile_tokens={plan.tile_tokens or None}"
        yield from check(plan, profile)


def as_measured(known: Profile | None, optimizer: Optimizer) -> dict[str, Any]:
    """Return earlier measurements as arguments of :func:`lt_offload.profile`."""
    if known is None:
        return {}
    same = known.optimizer.name == type(optimizer).__name__
    return {"hardware": known.hardware, "updates": known.optimizer if same else None}
