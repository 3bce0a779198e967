"""Replacement of the engine between iterations: when it is needed or allowed, and what a begun window leaves."""

from __future__ import annotations

from torch.optim import Optimizer

from lt_offload import limits
from lt_offload.execute.memory.streaming import room
from lt_offload.execute.program import Program, repeated
from lt_offload.execute.training.parts import EngineParts
from lt_offload.execute.updates.window import CarriedWindow
from lt_offload.execute.user_code.checks import may_repeat
from lt_offload.schema.plan import Plan


class Handover:
    """One engine's part in a replacement: as the one that leaves, or as the one that goes on.

    ``staying``: somebody held memory of a weight when the engine was installed.
    """

    def __init__(self, parts: EngineParts, program: Program | None, *, staying: bool) -> None:
        self._structure, self._weights, self._blocks = parts.structure, parts.weights, parts.blocks
        self._recorder, self._residency, self._program = parts.recorder, parts.residency, program
        self._iteration, self._window = parts.iteration, parts.iteration.window
        self._guard, self._setup, self._view, self.staying = parts.guard, parts.setup, parts.view, staying

    def changed(self, optimizer: Optimizer) -> str | None:
        """Return what has changed since the installation that only another plan can follow; None: nothing."""
        with self._guard.suspended:
            return self._setup.changed(optimizer)

    def leave_window(self, optimizer: Optimizer) -> CarriedWindow:
        """Return what the micro-batches of the present window have left, for another engine; to be closed afterwards.

        Raises ``UnsupportedError`` if plain PyTorch would update a weight with it that is frozen now.
        """
        self._iteration.check_leave("another plan was to go on")
        added = self._window.added
        with self._guard.suspended:
            cleared = self._view.cleared
            if added:
                self._view.use_shown_sums()
            self._residency.complete_host()
            sums = self._view.used  # what the last updates have used, where it is kept
            if added:
                totals = [weight.total for weight in self._weights if weight.total is not None]
                sums = {total.weight.param: total.host for total in totals if total.filled}
            sums = {param: total.clone() for param, total in sums.items()}
            members = {param for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
            gone = sums.keys() - members if added else ()
            for frozen in (weight for weight in self._weights if weight.param in gone):
                raise limits.FROZEN_HALFWAY.error(f"{frozen.label} was frozen after {added} micro-batches")
            rest = {param: param.grad.cpu() for _, param in self._structure.rest if param.grad is not None}
            self._view.drop()  # the other engine puts its own there
            for param in rest:
                param.grad = None
        return CarriedWindow(added=added, cleared=cleared, sums=sums, rest=rest)

    def enter_window(self, begun: CarriedWindow) -> None:
        """Go on in a window that another engine has begun."""
        with self._guard.suspended:
            for weight in self._weights:
                if weight.param in begun.sums and weight.total is not None:
                    weight.total.host.copy_(begun.sums[weight.param])
                    weight.total.fill() if begun.added else weight.total.use_up()
            if begun.sums and not begun.added:
                self._view.use(begun.sums)
            for param, grad in begun.rest.items():
                param.grad = grad.to(param.device)
            self._window.added = begun.added
            self._iteration.carry()
            if not begun.cleared:
                self._view.leave()
        if begun.added:
            self._recorder.begin()

    def may_be_replaced(self) -> bool:
        """Return whether another engine may go on now, between two iterations, unnoticed by users.

        It has other memory for weights and states: whoever holds some of this engine's would not see it trained. Raises
        ``UnsupportedError`` if something was changed since the last iteration that cannot be, as the next would.
        """
        with self._guard.suspended:
            self._guard.check_thread()
            self._setup.check()
            self._guard.begin()  # what was assigned to parameters is in the host copies from now on
        return not self._iteration.under_way and not self.staying and not self._guard.held

    def take_in(self) -> None:
        """Let host copies be what users have assigned to parameters: the engine is about to be closed."""
        with self._guard.suspended:
            self._guard.begin()

    def may_run(self, plan: Plan) -> bool:
        """Return whether ``plan`` can do what users do beside training.

        That is: their hooks allow that it runs other blocks a second time, and its arena is large enough for forwards
        without gradients (validation), or not smaller than it was. Beside a GPU, whose updates differ from the host's
        in the last bits, it also has to leave every update where it was: numbers do not depend on clocks.
        """
        present = self._program
        assert present is not None
        hosted, hosted_next = (
            [place == "host" for place in places] for places in (present.update_places, plan.update_places)
        )
        if self._recorder.device.torch_device.type != "cpu" and hosted != hosted_next:
            return False
        arena = min(room(self._blocks, 0), present.arena_bytes)
        return plan.arena_bytes >= arena and may_repeat(self._structure, repeated(plan))
