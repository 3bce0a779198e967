"""What several cards, and several machines, buy, simulated: plans for one of the cards while the others do the same.

    python -m scripts.cards [--model llama2-7b] [--seconds 20] [--batch 8] [--parts 1] [--machine NAME ...]

A model is planned for 1, 2, 4 and 8 cards with as many tokens per update in all, with one host copy of weights and
states for all processes, as training has it: twice, as updates may wait for the gradients of all processes. The plan
in which they do is also simulated with a copy for each process.

Then 4 cards are planned for 2 machines, whose sums go over a network beside the backward. That plan is simulated for up
to 64 machines, each of which trains as many tokens per update as one alone, with networks of 10 and 100 Gbit/s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lt_offload import Plan, Profile, profile_config
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.planners.priced import priced
from lt_offload.plan.several import gain, one_of
from scripts.common import arguments, save

MACHINES = {
    "desktop, RTX 4090": "rtx-4090,ram=1024GB",
    "the same, cards behind one root port": "rtx-4090,host=pcie4-x16-shared,ram=1024GB",
    "server, 8 channels of DDR4, RTX 4090": "rtx-4090,host=server-ddr4-512gb,ram=1024GB",
    "desktop, RTX 4060 Ti": "rtx-4060ti-16gb,ram=1024GB",
    "4 channels of DDR5, RTX 4090": "rtx-4090,host=hedt-ddr5-256gb,ram=1024GB",
    "8 channels of DDR5, RTX 4090": "rtx-4090,host=workstation-ddr5-512gb,ram=1024GB",
}
"""RAM is no limit here: what the plans take is in the table."""
CARDS = (1, 2, 4, 8)
TOKENS = 1 << 16
"""Per update: of all cards, or of each machine."""
LENGTH = 2048
BATCH = 8
"""Samples, or as many as an update has of each card; where it has more, batches follow each other."""
NODES = (1, 2, 4, 8, 16, 32, 64)
OF_EACH = 4
"""Cards of a machine, where there are several machines."""
NETWORKS = {"10 Gbit/s": 1.1e9, "100 Gbit/s": 11e9}
"""Bytes per second, a tenth of the bits: what is left after headers and acknowledgements."""


class Found(NamedTuple):
    """A plan, and what it was made for."""

    plan: Plan
    profile: Profile


class Machine:
    """Plans for one kind of machine.

    Args:
        name: as ``--hardware`` has it.
        model: a shipped configuration.
        seconds: time limit of each plan.
        batch: samples of a card's batch at most.
        parts: in how many a batch goes through each layer.
    """

    def __init__(self, name: str, model: str, seconds: float, batch: int, parts: int) -> None:
        self.name, self.model, self.seconds = name, model, seconds
        self.batch, self.parts = batch, parts
        self._profiles: dict[int, Profile] = {}

    def profile(self, batch: int) -> Profile:
        """Return the profile of the machine with one card."""
        if batch not in self._profiles:
            self._profiles[batch] = profile_config(
                self.model,
                batch_size=batch,
                sequence_length=LENGTH,
                dtype="bfloat16",
                hardware=self.name,
                micro_batches=self.parts,
            )
        return self._profiles[batch]

    def planned(self, cards: int, nodes: int = 1, *, waits: bool = False) -> Found:
        """Return the plan of one of so many cards of each machine, with one host copy; ``waits``: its updates do."""
        batch = min(self.batch, TOKENS // (cards * LENGTH))
        profile = one_of(self.profile(batch), cards, nodes)
        window = TOKENS // (cards * batch * LENGTH)
        settings = Settings(accumulate=window, delayed=waits, time_limit=self.seconds)
        return Found(make_plan(profile, settings), profile)

    def beside(self, waiting: Found) -> Found:
        """Return the plan for the same whose updates do not wait, if it is faster than ``waiting``."""
        settings = Settings(accumulate=waiting.plan.accumulate, hosted=True, time_limit=self.seconds)
        found = Found(make_plan(waiting.profile, settings), waiting.profile)
        return min(found, waiting, key=lambda one: one.plan.predicted.iteration_s)

    def own_copies(self, like: Plan, cards: int) -> Found:
        """Return the plan ``like`` with a copy in each process."""
        profile = one_of(self.profile(like.batch_size), cards, one_host_copy=False)
        return Found(priced(replace(like, host_budget_bytes=profile.hardware.host_bytes), profile), profile)


def of_cards(machine: Machine) -> tuple[list[dict[str, Any]], Found, Plan]:
    """Return the rows of a machine, what was found for the cards of each of several machines, and for one card."""
    rows: list[dict[str, Any]] = []
    alone: Plan | None = None
    several: Found | None = None
    for cards in CARDS:
        common = waiting = machine.planned(cards, waits=cards > 1)
        if cards > 1:
            common = machine.beside(waiting)
        alone = alone or common.plan
        if cards == OF_EACH:
            several = common
        bound = min(found.plan.predicted.lower_bound_s for found in (common, waiting))
        least = {"least_s": bound, "waits_s": waiting.plan.predicted.iteration_s if cards > 1 else None}
        rows.append({"cards": cards, "one_host_copy": True} | _row(common, alone) | least)
        if cards > 1:
            own = machine.own_copies(waiting.plan, cards)
            rows.append({"cards": cards, "one_host_copy": False} | _row(own, alone))
        print(machine.name, *rows[-2 if cards > 1 else -1 :], sep="\n", flush=True)
    assert alone is not None
    assert several is not None
    return rows, several, alone


def of_machines(one: Found, several: Found, alone: Plan) -> list[dict[str, Any]]:
    """Return the rows of one machine with its cards, and of more that carry out the plan of ``several``."""
    rows = []
    for network, speed in NETWORKS.items():
        for nodes in NODES:
            found = several if nodes > 1 else one
            hardware = replace(found.profile.hardware, network_bytes_per_s=speed)
            profile = replace(found.profile, machines=nodes, hardware=hardware)
            again = priced(replace(found.plan, processes=nodes * profile.processes), profile)
            row = _row(Found(again, profile), alone)
            rows.append({"machines": nodes, "network": network} | row)
    return rows


def _row(found: Found, alone: Plan) -> dict[str, Any]:
    plan = found.plan
    bought = gain(plan, found.profile, alone)
    return {
        "iteration_s": bought.iteration_s,
        "tokens_per_s": bought.tokens_per_s,
        "times_one": bought.times_one,
        "busy_s": bought.busy_s,
        "limit": bought.limit,
        "batch": plan.batch_size,
        "parts": plan.parts,
        "window": plan.accumulate,
        "ram_bytes": bought.ram_bytes,
    }


def main() -> None:
    """Plan all of it."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of each plan")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples of a card's batch at most")
    parser.add_argument("--parts", type=int, default=1, help="in how many a batch goes through each layer")
    parser.add_argument("--machine", nargs="*", help="of these kinds only, by name")
    args = parser.parse_args()
    folder: Path = args.results
    for number, (name, text) in enumerate(MACHINES.items()):
        if args.machine and name not in args.machine:
            continue
        machine = Machine(text, args.model, args.seconds, args.batch, args.parts)
        rows, several, alone = of_cards(machine)
        settings = {
            "machine": name,
            "number": number,
            "hardware": text,
            "model": args.model,
            "seconds": args.seconds,
            "batch": args.batch,
            "parts": args.parts,
            "tokens": TOKENS,
            "length": LENGTH,
            "cards_of_each": OF_EACH,
        }
        figures = {"cards": rows, "machines": of_machines(several, machine.planned(OF_EACH, 2), alone)}
        print(save(f"bench-cards-{number}", "bench-cards", settings, figures, folder))


if __name__ == "__main__":
    main()
