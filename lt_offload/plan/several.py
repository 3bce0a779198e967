"""Several cards, in one machine or several, planned as one of them, with its part of what all share.

A machine whose cards are alike needs no planner of its own. One process's profile has its part of what they share: the
root port, the bandwidth of the host's memory, cores and RAM. The plan for it is everybody's. Machines that are alike
share the network only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lt_offload.errors import ConfigError
from lt_offload.plan.iteration.durations import durations, exchange_s, gathered, network_s, with_faster_link
from lt_offload.schema.lanes import LaneName
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import OptimizerProfile, Profile
from lt_offload.units import format_bytes, format_rate, format_seconds

MOST_CARDS = 64
MOST_MACHINES = 64
_WELL = 0.9
"""Cards that give this part of their number are worth their price."""


def check_cards(devices: int, nodes: int = 1) -> None:
    """Raise ``ConfigError`` for numbers of cards and machines that cannot be planned."""
    if not 1 <= devices <= MOST_CARDS:
        raise ConfigError(f"devices={devices} must be from 1 to {MOST_CARDS}: cards of one machine")
    if not 1 <= nodes <= MOST_MACHINES:
        raise ConfigError(f"nodes={nodes} must be from 1 to {MOST_MACHINES}: machines that are alike")


def one_of(profile: Profile, devices: int, nodes: int = 1) -> Profile:
    """Return the profile of one of ``devices`` processes on each of ``nodes`` machines, each process with a card.

    Each may take its part of the RAM, of what all have in common, too: one copy of weights and states, of which each
    updates its part.

    Args:
        profile: what the model and the machine with one card cost.
        devices: how many cards each machine has.
        nodes: how many machines like that of ``profile`` there are.
    """
    if nodes > 1:
        one = one_of(profile, devices)
        hardware = replace(one.hardware, name=f"{nodes} x {one.hardware.name}")
        return replace(one, machines=nodes, common_updates=True, hardware=hardware)
    if devices == 1:
        return profile
    machine, shares = profile.hardware, profile.contention
    root = machine.root_bytes_per_s / devices
    link = {"h2d": machine.h2d_bytes_per_s, "d2h": machine.d2h_bytes_per_s}
    slower = {name: min(1.0, root / speed) if root else 1.0 for name, speed in link.items()}
    # A lane that would take more of the host's memory than its process's part of it is as fast as that part.
    for name in slower:
        share = devices * shares.of("h2d" if name == "h2d" else "d2h") * slower[name]
        slower[name] /= max(1.0, share)
    optimizer, host_share = _updates(profile, devices)
    # What computations read in host memory crosses the same link.
    one = with_faster_link(profile, slower["h2d"])
    hardware = replace(
        machine,
        name=f"{devices} x {machine.name}",
        host_bytes=machine.host_bytes // devices,
        pinnable_bytes=machine.pinnable_bytes // devices,
        h2d_bytes_per_s=machine.h2d_bytes_per_s * slower["h2d"],
        d2h_bytes_per_s=machine.d2h_bytes_per_s * slower["d2h"],
        h2d_alone_bytes_per_s=machine.h2d_alone_bytes_per_s * slower["h2d"],
        d2h_alone_bytes_per_s=machine.d2h_alone_bytes_per_s * slower["d2h"],
    )
    contention = replace(
        shares,
        compute=min(1.0, devices * shares.compute),
        h2d=min(1.0, devices * shares.h2d * slower["h2d"]),
        d2h=min(1.0, devices * shares.d2h * slower["d2h"]),
        host=host_share,
    )
    changed = replace(one, hardware=hardware, optimizer=optimizer, contention=contention)
    return replace(changed, processes=devices, common_updates=True)


def _updates(profile: Profile, devices: int) -> tuple[OptimizerProfile, float]:
    """Return the speed of updates on the host by one of several processes, and its share of the memory meanwhile."""
    before, share = profile.optimizer, profile.contention.host
    part = before.host_threads / devices
    threads = max(1, int(part))
    most = before.host_bytes_per_s / max(1.0, devices * share)
    alone = before.host_speeds.get(threads, before.host_bytes_per_s)
    # Threads are those that are enough for the memory: what division leaves over is not idle.
    speed = min(alone * max(1.0, part / threads), most)
    # It updates one of so many parts of what the plan lists.
    speeds = {n: devices * min(fewer, most) for n, fewer in before.host_speeds.items() if n < threads}
    speeds |= {threads: devices * speed} if before.host_speeds else {}
    optimizer = replace(
        before,
        host_bytes_per_s=devices * speed,
        host_speeds=speeds,
        host_threads=threads if before.host_threads else 0,
    )
    return optimizer, min(1.0, devices * share * speed / before.host_bytes_per_s)


# -- what more cards buy ---------------------------------------------------------------------------------------------

_NAMES: dict[LaneName, str] = {
    "compute": "computations",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
    "host": "updates on the host",
}
"""The lanes of each process, in words."""
_NETWORK, _MEMORY = "copies between machines", "the host's memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class CardsGain:
    """The gain by several cards over one of them; times in seconds per update."""

    devices: int
    """Cards of all machines."""
    machines: int
    iteration_s: float
    tokens_per_s: float
    """Tokens per second of all cards."""
    times_one: float
    """The same, divided by that of one card."""
    busy_s: dict[str, float]
    """Seconds of one process's work, each kind alone, ``adding gradients`` and ``copies between machines``."""
    limit: str
    """The longest of them, or ``the host's memory`` if all of them have it busy for longer."""
    ram_bytes: int
    """RAM that all processes of a machine take together."""

    def sentence(self) -> str:
        """Return it in words."""
        parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.busy_s.items() if seconds)
        well = self.times_one >= _WELL * self.devices
        verdict = "they add up well" if well else f"each more buys little: {self.limit} limits{self._way_out()}"
        of_machine = " of a machine" if self.machines > 1 else ""
        cards = f"{self.devices} cards" + (f" in {self.machines} machines" if self.machines > 1 else "")
        return (
            f"{cards} train {format_rate(self.tokens_per_s)} tokens per second, {self.times_one:.2f} "
            f"times one card; {verdict}. Of an update's {format_seconds(self.iteration_s)} one card's work takes, each "
            f"kind alone: {parts}. All processes{of_machine} take {format_bytes(self.ram_bytes)} of RAM"
        )

    def _way_out(self) -> str:
        if self.limit not in (_MEMORY, _NETWORK):
            return ""
        what = "card takes weights from it and brings gradients" if self.limit == _MEMORY else "machine sends gradients"
        return (
            f", as each {what} once per update, however few samples that has: fewer may be as fast (--sweep shows it), "
            "and an update of more samples moves no more (accumulate_grad_batches)"
        )


def gain(plan: Plan, profile: Profile, one: Plan) -> CardsGain:
    """Return the gain by the cards of ``profile`` with ``plan``, over the plan of ``one`` card."""
    devices = profile.processes * profile.machines
    rate = plan.samples_per_s * plan.sequence_length
    alone = one.samples_per_s * one.sequence_length
    profile = profile.with_host_threads(plan.host_threads)
    lanes = dict.fromkeys(_NAMES, 0.0)
    reduced = 0.0
    for op, seconds, count in zip(plan.ops, durations(plan, profile), plan.counts, strict=True):
        if op.lane in lanes:
            lanes[op.lane] += seconds * count
        reduced += seconds if op.lane == "network" else 0.0
    memory = sum(seconds * profile.contention.of(lane) for lane, seconds in lanes.items())
    network, gathering = network_s(plan, profile), _gathering_s(plan, profile)
    between = exchange_s(plan, profile) + reduced
    lanes["host"] -= gathering
    busy = {_NAMES[lane]: seconds for lane, seconds in lanes.items()}
    adding = between - network + gathering
    if memory:
        busy[f"{_MEMORY}, with all of these"] = memory
    busy |= {"adding gradients": adding, _NETWORK: network}
    limit = max(busy, key=busy.__getitem__).partition(",")[0]
    return CardsGain(
        devices=devices,
        machines=profile.machines,
        iteration_s=plan.predicted.iteration_s,
        tokens_per_s=rate,
        times_one=rate / alone if alone else 0.0,
        busy_s=busy,
        limit=limit,
        ram_bytes=profile.processes * plan.predicted.host_peak_bytes,
    )


def _gathering_s(plan: Plan, profile: Profile) -> float:
    places = zip(profile.tensors, plan.update_places, strict=True)
    return sum(gathered(t, profile) for t, place in places if place == "host") / profile.optimizer.host_bytes_per_s
