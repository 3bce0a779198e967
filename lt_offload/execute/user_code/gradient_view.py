"""The value of ``param.grad`` from one moment of an iteration to the next: consumed, shown, or autograd's alone.

Between a backward and the step, and until it is cleared, it is what plain PyTorch would have there, as far as it is
kept: the sum so far in plans whose updates wait, what the updates have used if somebody asked to keep it, otherwise a
stand-in that says that it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.updates.gradients import Gradients
from lt_offload.execute.updates.window import Window
from lt_offload.execute.user_code.param_grad import ConsumedGradients, ShownGradients


class GradientView:
    """The gradients that the parameters of an engine show.

    Args:
        consumed: stand-ins.
        shown: sums.
        window: says whether there are sums.
        clear: forgets the sums of the window.
    """

    def __init__(
        self, consumed: ConsumedGradients, shown: ShownGradients, window: Window, clear: Callable[[], None]
    ) -> None:
        self.consumed, self.shown = consumed, shown
        self._window, self._clear = window, clear

    @property
    def cleared(self) -> bool:
        """True if what was left has been cleared since."""
        return self.shown.gone if self.shown.present else self.consumed.gone

    @property
    def used(self) -> dict[nn.Parameter, Tensor]:
        """The gradients that the last updates have used, where they were kept and are not cleared."""
        return {} if self.cleared else self.shown.used

    # -- an iteration ------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """An iteration begins: gradients are what others have made of them by now."""
        if self._window.added:
            self.use_shown_sums()
        elif self.cleared:
            self.shown.drop()
            self.shown.use(())

    def begin_in_window(self) -> None:
        """A forward of a loop that is not ours begins, in plans whose updates wait."""
        if self._window.added:
            if self.cleared:
                self._clear()
                self.shown.drop()
            self.use_shown_sums()

    def use_shown_sums(self) -> None:
        """Before sums cannot be written any more, as in a forward, adopt what was assigned to those shown."""
        if self.shown.present:
            self.shown.take(final=False)
            self.shown.put()

    def begin_backward(self, *, cleared: bool) -> None:
        """A backward begins: ``param.grad`` is nothing any more but what autograd makes it.

        Args:
            cleared: gradients that none are added to have to be gone.
        """
        if not self.shown.present:
            self.consumed.give_way(adding=self._window.added > 0, cleared=cleared)
        elif self._window.added:
            self.shown.take(final=False)
        else:
            self.shown.drop()
            self.shown.use(())

    def begin_step(self) -> None:
        """The optimizer's own step begins within ours: there is nothing for it to use, also without a backward."""
        self.shown.take() if self._window.added else self.shown.drop()
        self.consumed.drop()

    def begin_step_of_loop(self, *, final: bool) -> None:
        """The step of a loop that is not ours begins, in plans whose updates wait; sums may have been cleared."""
        if self.shown.present:
            if self.shown.gone:
                self._clear()
                self.shown.drop()
            else:
                self.shown.take(final=final)
            return
        if self.consumed.gone:
            self._clear()
        self.consumed.check(present=bool(self._window.added))
        self.consumed.drop()

    def leave(self) -> None:
        """Let ``param.grad`` be what a pass or the updates have left, as far as it is kept, until it is cleared."""
        if self.shown.present:
            return
        if self._window.delayed and self._window.added:
            self.shown.put()
        elif self.shown.used:
            self.shown.put_used()
        else:
            self.consumed.put()

    def drop(self) -> None:
        """Let ``param.grad`` be nothing of ours."""
        self.shown.drop()
        self.consumed.drop()

    # -- for users' code ---------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Enclose what says how updates will change the gradients: ``param.grad`` would not show it."""
        shown = self.shown.present
        self.shown.take(final=False)
        yield
        if shown:
            self.consumed.put()

    def show_clipped(self, edit: Callable[[Tensor], None] | None) -> None:
        """Show the sums as updates will use them; ``edit`` is what would have been done to them then."""
        self.hide(final=False)
        if edit is not None:
            self.shown.edit(edit)
        self.shown.put()

    def show_used(self) -> None:
        """Show what the last updates have used."""
        self.consumed.drop()
        if not self.shown.present:
            self.shown.put_used()

    def forget_used(self) -> None:
        """Show it no longer, and keep it no longer."""
        self.shown.drop()
        self.shown.use(())

    def hide(self, *, final: bool) -> None:
        """Show nothing: updates will use what ``param.grad`` is now; ``final``: nothing else is done to it before."""
        self.shown.take(final=final)
        self.consumed.drop()

    @contextmanager
    def kept(self, gradients: Gradients, residency: Residency) -> Iterator[None]:
        """Enclose updates whose gradients can be shown afterwards."""
        with_squares = gradients.square_sums is not None
        squares = self.shown.keep(gradients.clipping.edit(now=True), squares=with_squares)
        # Or the updates would count the squares again, of what is clipped by now.
        gradients.square_sums = None
        if not residency.settled:
            # `keep` may have forgotten device copies, and a settling pass begins with all that the plan has there.
            residency.settle()
        yield
        gradients.square_sums = squares
