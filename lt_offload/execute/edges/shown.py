"""Gradients in ``param.grad``, while code of users runs that may look at them and edit them before the updates.

In plans whose updates wait, every sum of gradients is complete between the last backward and the updates, in a place of
its own on the host or on the device. What ``param.grad`` shows is that place on the host: no second copy. The guard
brings a newer device copy home when it is read, and forgets it when it is written, so that the update uses what was
written. Whatever was assigned is copied there; a gradient that was set to None is left out of the updates.

The place belongs to the next gradients afterwards. Whoever has kept ``param.grad`` gets a copy, as far as nothing is
to change it any more.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from lt_offload import limits
from lt_offload.execute.copies import Residency
from lt_offload.execute.edges.guard import GRADIENT, Guard, Owned
from lt_offload.execute.tensors import Sum, Weight

_OURS = 2
"""References to an object from a local variable and from the call that counts them."""


@dataclass(slots=True)
class _Shown:
    """The gradient of one weight."""

    owned: Owned
    total: Sum
    tensor: Tensor | None
    """What ``param.grad`` is; None if there is no gradient."""
    users: int
    """How many tensors have that memory without it."""


class ShownGradients:
    """The sums of gradients of a model's weights, in ``param.grad``.

    Args:
        weights: of the engine; only those with a sum are shown.
        guard: sees what is done to the gradients.
        residency: has their device copies.
    """

    def __init__(self, weights: Sequence[Weight], guard: Guard, residency: Residency) -> None:
        self._sums = [weight.total for weight in weights if weight.total is not None]
        self._guard, self._residency = guard, residency
        self._shown: list[_Shown] = []
        self._used: list[Sum] = []
        """What the last updates have used."""

    @property
    def present(self) -> bool:
        """Whether they are shown."""
        return bool(self._shown)

    @property
    def gone(self) -> bool:
        """Whether none of them is there any more, as after ``zero_grad()``."""
        return all(shown.total.weight.param.grad is None for shown in self._shown)

    def put(self) -> None:
        """Show what has been added up so far."""
        self._put([total for total in self._sums if total.filled])

    def put_used(self) -> None:
        """Show what the last updates have used, to be read."""
        self._put(self._used)

    def keep(self, edit: Callable[[Tensor], None] | None, *, squares: bool) -> list[Tensor] | None:
        """Make complete on the host what updates are about to use, so that it can be shown afterwards.

        Args:
            edit: what is done to gradients before updates use them; it is done now.
            squares: the squares of their norms are asked for.

        Returns:
            The squares, before ``edit``.
        """
        self._used = [total for total in self._sums if total.filled]
        groups = list(dict.fromkeys(total.group for total in self._used))
        self._residency.bring_home(groups)
        found = [vector_norm(total.host, dtype=torch.float32).square_() for total in self._used] if squares else None
        if edit is not None:
            for total in self._used:
                edit(total.host)
            self._residency.forget(groups)
        return found

    @property
    def used(self) -> dict[nn.Parameter, Tensor]:
        """What the last updates have used, where it was kept."""
        return {total.weight.param: total.host for total in self._used}

    def use(self, params: Collection[nn.Parameter]) -> None:
        """Take what stands where sums of ``params`` are for what the last updates have used."""
        self._used = [total for total in self._sums if total.weight.param in params]

    def _put(self, filled: Sequence[Sum]) -> None:
        assert not self._shown
        present = set(filled)
        for total in self._sums:
            shown = _Shown(Owned(total.weight, GRADIENT), total, None, _users(total.host))
            if total in present:
                shown.tensor = total.weight.param.grad = total.host.detach()
            self._shown.append(shown)
        self._guard.show(shown.owned for shown in self._shown)

    def take(self, *, final: bool = True) -> None:
        """Let updates use what is there now, and take it away.

        Args:
            final: nothing is done to gradients any more before updates use them: copies of them may be kept.

        Raises:
            UnsupportedError: if somebody has kept a gradient whose memory or value is to change.
        """
        for shown in self._shown:
            self._adopt(shown)
        self._end(final=final)

    def drop(self) -> None:
        """Take them away, whatever has been done to them."""
        self._end(final=True, check=False)

    def _adopt(self, shown: _Shown) -> None:
        total, grad, before = shown.total, shown.total.weight.param.grad, shown.tensor
        if grad is None:
            total.filled = False
        elif grad is before and grad.data_ptr() == total.host.data_ptr():
            if self._guard.seen_otherwise(shown.owned):
                self._guard.write([shown.owned])
        else:
            self._guard.write([shown.owned])
            with torch.no_grad():
                total.host.copy_(grad)
            total.filled = True

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
            tensor.data = tensor.data.clone()


def _users(tensor: Tensor) -> int:
    """Return how many tensors have the memory of ``tensor``, and a constant."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
