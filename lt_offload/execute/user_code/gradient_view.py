"""The value of ``param.grad`` outside a backward: a stand-in, a sum that may be looked at and edited, or autograd's.

Between a backward and the step, and until it is cleared, it is what plain PyTorch would have there, as far as it is
kept: the sum so far in plans whose updates wait, what the updates have used if somebody asked to keep it, otherwise a
stand-in that says that it is gone (``param_grad.py``).

In plans whose updates wait, every sum is complete between the last backward and the updates, in a place of its own on
the host or on the device. ``param.grad`` shows that place on the host, without a second copy. The guard brings a newer
device copy home when it is read, and forgets it when it is written, so that the update uses what was written. A tensor
that was assigned is copied there; a gradient that was set to None is left out of the updates. The place belongs to the
next gradients afterwards. Code that has kept ``param.grad`` gets a copy, if nothing is to change it any more.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from lt_offload import limits
from lt_offload.compat.torch import storage_uses
from lt_offload.execute.memory.live_group import LiveGroup
from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.memory.tensors import Sum, Weight
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.execute.updates.window import Window
from lt_offload.execute.user_code.guard import GRADIENT, Guard, TrackedTensor
from lt_offload.execute.user_code.param_grad import ConsumedGradient

_OURS = 2
"""References to an object from a local variable and from the call that counts them."""


@dataclass(slots=True)
class _Shown:
    owned: TrackedTensor
    total: Sum
    tensor: Tensor | None
    """The value of ``param.grad``; None if there is no gradient."""
    users: int
    """Number of tensors that have that memory without it."""


class GradientView:
    """The gradients that the parameters of an engine show; ``clear`` forgets the sums of the window."""

    def __init__(
        self, weights: Sequence[Weight], guard: Guard, residency: Residency, window: Window, clear: Callable[[], None]
    ) -> None:
        self._stand_ins = [(w.param, ConsumedGradient.of(w), w.label) for w in weights if w.param.requires_grad]
        self._awaited = False
        """Stand-ins were put in place, and nobody has looked yet what has become of them."""
        self._sums = [weight.total for weight in weights if weight.total is not None]
        self._shown: list[_Shown] = []
        self._used: list[Sum] = []
        """The sums that the last updates have used."""
        self._guard, self._residency, self._window, self._clear = guard, residency, window, clear

    @property
    def cleared(self) -> bool:
        """True if what was left has been cleared since, as by ``zero_grad()``."""
        if self._shown:
            return all(shown.total.weight.param.grad is None for shown in self._shown)
        return all(param.grad is None for param, _, _ in self._stand_ins)

    @property
    def used(self) -> dict[nn.Parameter, Tensor]:
        """The gradients that the last updates have used, where they were kept and are not cleared."""
        return {} if self.cleared else {total.weight.param: total.host for total in self._used}

    def use(self, params: Collection[nn.Parameter]) -> None:
        """Take what stands where sums of ``params`` are for what the last updates have used."""
        self._used = [total for total in self._sums if total.weight.param in params]

    # -- an iteration ------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """An iteration begins: gradients are what others have made of them by now."""
        if self._window.added:
            self.use_shown_sums()
        elif self.cleared:
            self.forget_used()

    def begin_in_window(self) -> None:
        """A forward of a loop that is not ours begins, in plans whose updates wait."""
        if self._window.added:
            if self.cleared:
                self._clear()
                self.discard()
            self.use_shown_sums()

    def use_shown_sums(self) -> None:
        """Before sums cannot be written any more, as in a forward, adopt what was assigned to those shown."""
        if self._shown:
            self.adopt(final=False)
            self.show()

    def begin_backward(self, *, cleared: bool) -> None:
        """A backward begins: ``param.grad`` is nothing any more but what autograd makes it.

        ``cleared``: gradients that none are added to have to be gone. Raises ``UnsupportedError`` if there are some to
        add to that are gone, or others that were not cleared.
        """
        adding = self._window.added > 0
        if self._shown:
            self.adopt(final=False) if adding else self.forget_used()
            return
        if self._awaited and (adding or cleared):
            self.check(present=adding)
        self.drop_stand_ins()

    def begin_step(self) -> None:
        """The optimizer's own step begins within ours: there is nothing for it to use, also without a backward."""
        self.adopt() if self._window.added else self.discard()
        self.drop_stand_ins()

    def begin_step_of_loop(self, *, final: bool) -> None:
        """The step of a loop that is not ours begins, in plans whose updates wait; sums may have been cleared."""
        cleared = self.cleared
        if cleared:
            self._clear()
        if self._shown:
            self.discard() if cleared else self.adopt(final=final)
            return
        self.check(present=bool(self._window.added))
        self.drop_stand_ins()

    def leave(self) -> None:
        """Let ``param.grad`` be what a pass or the updates have left, as far as it is kept, until it is cleared."""
        if self._shown:
            return
        if self._window.delayed and self._window.added:
            self.show()
        elif self._used:
            self._show(self._used)
        else:
            self.put_stand_ins()

    # -- stand-ins ---------------------------------------------------------------------------------------------------

    def put_stand_ins(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Let every trainable weight have a stand-in; ``params``: those alone."""
        self._awaited = True
        for param, grad, _ in self._stand_ins:
            if params is None or param in params:
                param.grad = grad

    def drop_stand_ins(self) -> None:
        """Let none have one."""
        self._awaited = False
        for param, grad, _ in self._stand_ins:
            if param.grad is grad:
                param.grad = None

    def check(self, *, present: bool) -> None:
        """Check that all stand-ins are there still, or none; raises ``UnsupportedError`` naming a weight."""
        for param, grad, label in self._stand_ins:
            if (param.grad is grad) is not present:
                what = "removed or replaced before" if present else "to be used a second time by"
                raise limits.GRADIENTS.error(f"the gradient of {label} was {what} optimizer.step()")

    @contextmanager
    def standing(self, *, begun: bool = False) -> Iterator[None]:
        """Enclose what takes gradients away without an update or ``zero_grad()``: they say that they are gone.

        ``begun``: a backward of the present window has begun, so that some are not in ``param.grad``.
        """
        left = {param for param, _, _ in self._stand_ins if begun or param.grad is not None}
        try:
            yield
        finally:
            self.put_stand_ins({param for param in left if param.grad is None})

    # -- sums --------------------------------------------------------------------------------------------------------

    def show(self, edit: Callable[[Tensor], None] | None = None) -> None:
        """Show what has been added up so far; ``edit`` is done to it before."""
        filled = self._filled
        if edit is not None:
            self._edit(filled, edit)
        self._show(filled)

    def adopt(self, *, final: bool = True) -> None:
        """Let updates use what is there now, and take it away.

        ``final``: nothing is done to gradients any more before updates use them: copies of them may be kept. Raises
        ``UnsupportedError`` if somebody has kept a gradient whose memory or value is to change.
        """
        for shown in self._shown:
            self._adopt(shown)
        self._end(final=final)

    def discard(self) -> None:
        """Take what is shown away, whatever has been done to it."""
        self._end(final=True, check=False)

    def drop(self) -> None:
        """Let ``param.grad`` be nothing of ours."""
        self.discard()
        self.drop_stand_ins()

    # -- for users' code ---------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self, *, show: bool = False) -> Iterator[None]:
        """Enclose what says how updates will change the gradients: ``param.grad`` would not show it.

        ``show``: they are changed at once, and shown again if they were before.
        """
        shown = bool(self._shown)
        self.adopt(final=False)
        yield
        if shown:
            self.show() if show else self.put_stand_ins()

    def show_used(self) -> None:
        """Show what the last updates have used, to be read."""
        self.drop_stand_ins()
        if not self._shown:
            self._show(self._used)

    def forget_used(self) -> None:
        """Show it no longer, and keep it no longer."""
        self.discard()
        self._used = []

    def hide(self, *, final: bool) -> None:
        """Show nothing: updates will use what ``param.grad`` is now; ``final``: nothing else is done to it before."""
        self.adopt(final=final)
        self.drop_stand_ins()

    def keep(self) -> None:
        """Keep what updates are to use, to be shown afterwards."""
        self._used = self._filled
        self._residency.bring_home(_groups(self._used))

    @contextmanager
    def kept(self, gradients: Gradients) -> Iterator[None]:
        """Enclose updates whose gradients can be shown afterwards: they are made complete on the host, as used."""
        self.keep()
        squares = gradients.square_sums
        if squares is not None:
            squares = [vector_norm(one.host, dtype=torch.float32).square_() for one in self._used]
        edit = gradients.clipping.edit(now=True)
        if edit is not None:
            self._edit(self._used, edit)
        # Or the updates would count the squares again, of what is clipped by now.
        gradients.square_sums = None
        if not self._residency.settled:
            # An edit forgets device copies, and a settling pass begins with all that the plan has there.
            self._residency.settle()
        yield
        gradients.square_sums = squares

    # -- one by one --------------------------------------------------------------------------------------------------

    @property
    def _filled(self) -> list[Sum]:
        return [total for total in self._sums if total.filled]

    def _edit(self, totals: Sequence[Sum], edit: Callable[[Tensor], None]) -> None:
        self._residency.bring_home(_groups(totals))
        for total in totals:
            edit(total.host)
        # The edit was made on the host, so that the copies on the device are out of date.
        self._residency.forget(_groups(totals))

    def _show(self, filled: Sequence[Sum]) -> None:
        assert not self._shown
        present = set(filled)
        for total in self._sums:
            shown = _Shown(TrackedTensor(total.weight, GRADIENT), total, None, _users(total.host))
            if total in present:
                shown.tensor = total.weight.param.grad = total.host.detach()
            self._shown.append(shown)
        self._guard.show(shown.owned for shown in self._shown)

    def _adopt(self, shown: _Shown) -> None:
        total, grad, before = shown.total, shown.total.weight.param.grad, shown.tensor
        if grad is None:
            total.use_up()
        # The same object may have been given other memory (`p.grad.data = ...`), so its address counts, too.
        elif grad is before and grad.data_ptr() == total.host.data_ptr():
            # NumPy writes without being seen, so a view of that kind counts as a write.
            if self._guard.seen_otherwise(shown.owned):
                self._guard.write([shown.owned])
        else:
            self._guard.write([shown.owned])
            with torch.no_grad():
                total.host.copy_(grad)
            total.fill()

    def _end(self, *, final: bool, check: bool = True) -> None:
        shown, self._shown = self._shown, []
        if not shown:
            return
        self._guard.hide(one.owned for one in shown)
        for one in shown:
            if one.tensor is None or one.total.weight.param.grad is not None:
                one.total.weight.param.grad = None
        for one in shown:
            self._release(one, copy=final)
        held = [one for one in shown if check and _users(one.total.host) > one.users]
        if held:
            gc.collect()  # what refers to itself may be gone
            for one in held:
                if _users(one.total.host) > one.users:
                    raise limits.KEPT_GRADIENT.error(f"{one.owned.label} was kept")

    def _release(self, shown: _Shown, *, copy: bool) -> None:
        """Let go of what was shown; whoever has kept it has a copy from now on, if ``copy`` says so."""
        tensor, shown.tensor = shown.tensor, None
        if tensor is not None and copy and sys.getrefcount(tensor) > _OURS:
            self._residency.bring_home(shown.owned.groups)
            # Whoever kept it has this very object, so it is the object that gets memory of its own.
            tensor.data = tensor.data.clone()


def _groups(totals: Sequence[Sum]) -> list[LiveGroup]:
    return list(dict.fromkeys(total.group for total in totals))


def _users(tensor: Tensor) -> int:
    """Return how many tensors have the memory of ``tensor``, and a constant."""
    return storage_uses(tensor.untyped_storage())
