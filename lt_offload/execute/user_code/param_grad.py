"""``param.grad`` outside a backward: a gradient that was consumed, or a sum that may be looked at and edited.

**Consumed** is a gradient after a planned backward: an update has used it, and it says so. In plain PyTorch it stays
until somebody clears it: a Trainer does that in its closure, after ``training_step``, and a loop of one's own where it
likes to. So the stand-ins stay until the next backward begins, and when training has ended: a loop that goes on without
``zero_grad()`` would add to them. With None in its place ``clip_grad_norm_`` returns 0, an edit of gradients edits
nothing, and such a loop ends with other weights, without a word. The stand-in has shape, dtype and device of a
gradient. It raises on every use but printing, assignment, ``zero_grad()`` and conversions of the model.

**Shown** are sums of gradients. In plans whose updates wait, every one is complete between the last backward and the
updates, in a place of its own on the host or on the device. ``param.grad`` shows that place on the host, without a
second copy. The guard brings a newer device copy home when it is read, and forgets it when it is written, so that the
update uses what was written. A tensor that was assigned is copied there; a gradient that was set to None is left out of
the updates. The place belongs to the next gradients afterwards. Code that has kept ``param.grad`` gets a copy, if
nothing is to change it any more.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from typing_extensions import override

from lt_offload import limits
from lt_offload.compat.torch import DisableTorchFunctionSubclass, make_wrapper_subclass, storage_uses
from lt_offload.execute.memory.live_group import LiveGroup
from lt_offload.execute.memory.residency import Residency
from lt_offload.execute.memory.tensors import Sum, Weight
from lt_offload.execute.user_code.guard import GRADIENT, Guard, TrackedTensor


class ConsumedGradient(Tensor):
    """Stands for the gradient of ``weight``, which is gone."""

    label: str

    @staticmethod
    def of(weight: Weight) -> ConsumedGradient:
        """Return the stand-in for a weight's gradient."""
        host = weight.host
        return ConsumedGradient._like(host, weight.label, dtype=host.dtype, device=host.device)

    @staticmethod
    def _like(form: Tensor, label: str, *, dtype: torch.dtype, device: torch.device) -> ConsumedGradient:
        made: ConsumedGradient = make_wrapper_subclass(
            ConsumedGradient, form.shape, dtype=dtype, device=device, layout=form.layout
        )
        made.label = label
        return made

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGradient({self.label}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)})"

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _ALLOWED:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _refusal(func, args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        one = args[0] if args else None
        # `model.to()` converts gradients, too, and a Trainer calls it when it ends.
        if str(func) == _CONVERSION and isinstance(one, ConsumedGradient):
            dtype, device = (kwargs or {}).get("dtype") or one.dtype, (kwargs or {}).get("device") or one.device
            return ConsumedGradient._like(one, one.label, dtype=dtype, device=device)
        raise _refusal(func, args)


_ALLOWED = {"__get__", "__set__", "__repr__", "__format__", "__str__", "__hash__"}
_ALLOWED |= {"size", "dim", "numel", "stride", "is_floating_point"}
# The compiler asks the next ones of every tensor, and of its gradient.
_ALLOWED |= {"storage_offset", "untyped_storage", "_is_view", "is_conj", "is_neg", "is_inference"}
_ALLOWED |= {"to", "cpu", "cuda", "float", "double", "half", "bfloat16"}
_ALLOWED |= {"requires_grad_", "_has_compatible_shallow_copy_type"}
"""Questions about its form, which has not changed, assignments to ``param.grad``, and conversions of a model."""
_CONVERSION = "aten._to_copy.default"


def _refusal(func: Any, args: tuple[Any, ...]) -> Exception:
    """Return the error for a call of ``func``; the gradient is among its arguments, perhaps in a list."""
    flat = [item for argument in args for item in (argument if isinstance(argument, (list, tuple)) else [argument])]
    label = next((item.label for item in flat if isinstance(item, ConsumedGradient)), "a weight")
    name = getattr(func, "__name__", None) or str(func)
    return limits.GRADIENTS.error(f"the gradient of {label} was used by {name}")


class ConsumedGradients:
    """The consumed gradients of a model's trainable weights, put in place and taken away."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._items = [(w.param, ConsumedGradient.of(w), w.label) for w in weights if w.param.requires_grad]
        self._awaited = False
        """They were put in place, and nobody has looked yet what has become of them."""

    def put(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Let every trainable weight have a consumed gradient; ``params``: those alone."""
        self._awaited = True
        for param, grad, _ in self._items:
            if params is None or param in params:
                param.grad = grad

    @contextmanager
    def standing(self, *, begun: bool = False) -> Iterator[None]:
        """Enclose what takes gradients away without an update or ``zero_grad()``: they say that they are gone.

        Args:
            begun: a backward of the present window has begun, so that some are not in ``param.grad``.
        """
        left = {param for param, _, _ in self._items if begun or param.grad is not None}
        try:
            yield
        finally:
            self.put({param for param in left if param.grad is None})

    def drop(self) -> None:
        """Let none have one."""
        self._awaited = False
        for param, grad, _ in self._items:
            if param.grad is grad:
                param.grad = None

    @property
    def gone(self) -> bool:
        """True if none of them is there any more, as after ``zero_grad()``."""
        return all(param.grad is None for param, _, _ in self._items)

    def check(self, *, present: bool) -> None:
        """Check that all of them are there still, or none.

        Raises:
            UnsupportedError: naming a weight.
        """
        for param, grad, label in self._items:
            if (param.grad is grad) is not present:
                what = "removed or replaced before" if present else "to be used a second time by"
                raise limits.GRADIENTS.error(f"the gradient of {label} was {what} optimizer.step()")

    def give_way(self, *, adding: bool, cleared: bool) -> None:
        """A backward begins, which gives new gradients.

        Args:
            adding: to those that the stand-ins stand for.
            cleared: otherwise those have to have been cleared.

        Raises:
            UnsupportedError: if there are some to add to that are gone, or others that were not cleared.
        """
        if self._awaited and (adding or cleared):
            self.check(present=adding)
        self.drop()


_OURS = 2
"""References to an object from a local variable and from the call that counts them."""


@dataclass(slots=True)
class _Shown:
    """The gradient of one weight."""

    owned: TrackedTensor
    total: Sum
    tensor: Tensor | None
    """The value of ``param.grad``; None if there is no gradient."""
    users: int
    """Number of tensors that have that memory without it."""


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
        """The sums that the last updates have used."""

    @property
    def present(self) -> bool:
        """True if they are shown."""
        return bool(self._shown)

    @property
    def gone(self) -> bool:
        """True if none of them is there any more, as after ``zero_grad()``."""
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
        self._used = self._brought_home()
        squared = [vector_norm(one.host, dtype=torch.float32).square_() for one in self._used] if squares else None
        if edit is not None:
            self._edit(self._used, edit)
        return squared

    def edit(self, edit: Callable[[Tensor], None]) -> None:
        """Change the sums of the present window before they are shown."""
        self._edit(self._brought_home(), edit)

    def _brought_home(self) -> list[Sum]:
        """Return the sums of the present window, which are complete on the host from now on."""
        filled = [total for total in self._sums if total.filled]
        self._residency.bring_home(_groups(filled))
        return filled

    def _edit(self, totals: Sequence[Sum], edit: Callable[[Tensor], None]) -> None:
        for total in totals:
            edit(total.host)
        # The edit was made on the host, so that the copies on the device are out of date.
        self._residency.forget(_groups(totals))

    @property
    def used(self) -> dict[nn.Parameter, Tensor]:
        """The gradients that the last updates have used, where they were kept."""
        return {total.weight.param: total.host for total in self._used}

    def use(self, params: Collection[nn.Parameter]) -> None:
        """Take what stands where sums of ``params`` are for what the last updates have used."""
        self._used = [total for total in self._sums if total.weight.param in params]

    def _put(self, filled: Sequence[Sum]) -> None:
        assert not self._shown
        present = set(filled)
        for total in self._sums:
            shown = _Shown(TrackedTensor(total.weight, GRADIENT), total, None, _users(total.host))
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
