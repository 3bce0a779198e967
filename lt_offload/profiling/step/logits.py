"""The end of a forward: logits that are for the model's own loss only, and computations after that loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lt_offload.compat.torch import address_of, tree_flatten, tree_leaves
from lt_offload.machine.accounting import Account
from lt_offload.machine.dispatch import FUNCTION_MODES, WatchingMode
from lt_offload.model.blocks import Structure
from lt_offload.model.calls import Call
from lt_offload.model.head import (
    LOSS_ARGUMENTS,
    HeadLoss,
    Scaling,
    asks_form,
    chunk_tokens,
    in_chunks,
    intercept_loss,
    scaling_step,
    suits,
    uses_causal_loss,
)
from lt_offload.profiling.meters import Lap, Meter
from lt_offload.schema.profile import OptionName


@dataclass(kw_only=True, slots=True)
class Tail:
    """The loss, between the last block's forward and its backward. Bytes include that block's output."""

    forward: Lap = Lap()
    backward: Lap = Lap()
    forward_peak: int = 0
    saved: int = 0
    """Bytes in use when the backward begins."""
    backward_peak: int = 0
    left: int = 0
    """Bytes in use when the last block's backward begins: the gradient of its output, and what the caller holds."""


class AfterLoss:
    """Computations between the model's own loss and its backward, without gradients of ``rest``, counted elsewhere."""

    def __init__(self, account: Account, meter: Meter, rest: Sequence[nn.Parameter]) -> None:
        self._account, self._meter, self._rest = account, meter, rest
        self.tail = Tail()
        self._first, self._peak = Lap(), 0
        """The time from the last block to the loss, and the peak."""
        self._others: set[int | None] = set()
        """Storages from before the end of the loss, and storages that are counted elsewhere."""

    def begin(self, loss: Any) -> None:
        """Begin; to be called with the model's own loss."""
        self._first, self._peak = self._meter.lap(), self._account.peak
        self._account.reset_peak()
        self._others = set(self._account.live())
        if isinstance(loss, Tensor) and loss.grad_fn is not None:
            # Autograd goes through what was made last first, so that all that follows the loss is done by then.
            loss.grad_fn.register_prehook(self._reached)

    def end(self, lap: Lap, kept: set[int | None]) -> tuple[Lap, int]:
        """Take the forward's figures; return the time and the peak since the last block. The step returns ``kept``."""
        if not self._others:
            return lap, self._account.peak
        self._others |= kept
        self.tail = Tail(forward=lap, forward_peak=self._peak_of_own(), saved=self._in_use())
        self.tail.backward_peak = self.tail.left = self.tail.saved
        both = Lap(seconds=self._first.seconds + lap.seconds, launch_s=self._first.launch_s + lap.launch_s)
        return both, max(self._peak, self._account.peak)

    def _reached(self, grads: object) -> None:
        self._others |= {self._account.serial(p.grad) for p in self._rest if p.grad is not None}
        # Of the next batch of a window each is there for a moment before it is added to their sum.
        largest = max((p.nbytes for p in self._rest if p.grad is not None), default=0)
        self.tail.backward_peak, self.tail.left = self._peak_of_own() + largest, self._in_use()

    def share(self, whole: Tail) -> None:
        """Take as much of the backward's time as this is of the forward's."""
        share = self.tail.forward.seconds / whole.forward.seconds if whole.forward.seconds else 0.0
        self.tail.backward = Lap(seconds=share * whole.backward.seconds, launch_s=share * whole.backward.launch_s)

    def _peak_of_own(self) -> int:
        return self._account.peak_without(serial for serial in self._others if serial is not None)

    def _in_use(self) -> int:
        return sum(nbytes for serial, nbytes in self._account.live().items() if serial not in self._others)


def calls_with_loss(call: Call) -> dict[OptionName, Call]:
    """Return the calls of the last block and the loss that a plan may choose from, where a step may have ``call``."""
    both = call.module
    assert isinstance(both, HeadLoss)
    if both.chunk:
        return {"chunked": call}
    chunk = chunk_tokens(both.head.out_features)
    if not in_chunks(call.leaves[0], both.head.weight, chunk):
        return {"fused": call}
    return {"fused": call, "chunked": replace(call, module=HeadLoss(both.head, chunk))}


class LogitsWatch(WatchingMode):
    """Observes uses of the last block's output, from its return to the end of the run.

    On the stack of modes from :meth:`begin` to :meth:`end` only: code before that is not slowed down by it. ``on_loss``
    is told the loss that the model has computed of these logits itself.
    """

    def __init__(self, structure: Structure, on_loss: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_loss = on_loss
        self._owner, self._head = structure.owner, structure.blocks[-1].module
        self._possible = self._owner is not None and suits(self._head) and uses_causal_loss(self._owner)
        self._logits: Tensor | None = None
        """The logits after the steps of ``_scaling``."""
        self._scaling: Scaling = ()
        self._before: list[weakref.ref[Tensor]] = []
        """The logits before each of these steps; code that still has them may use them."""
        self._used = self._inside_loss = False
        self._arguments: list[tuple[Any, int, dict[str, Any]]] = []
        """Arguments of the calls of the loss: labels, size of the vocabulary, others."""

    def install(self) -> Callable[[], None]:
        """Watch the calls of the model's loss; return a function that ends all watching."""
        undo = ExitStack()
        if self._possible:
            assert self._owner is not None
            undo.callback(intercept_loss(self._owner, self._loss))
            undo.callback(self._leave)
        return undo.close

    def begin(self, out: Any) -> None:
        """Begin to watch ``out``, which the last block has returned."""
        self._possible = self._possible and isinstance(out, Tensor)
        if self._possible:
            self._logits = out
            self.place()

    def forgo(self) -> None:
        """Stop watching, as another forward begins: a loss can no longer be matched to its logits."""
        self._leave()
        self._possible = False

    def end(self, result: Any) -> None:
        """End; to be called with the result of the run."""
        logits = self._leave()
        if logits is not None:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            own = {address_of(tensor.untyped_storage()) for tensor in (logits, *self._earlier())}
            self._used |= any(address_of(leaf.untyped_storage()) in own for leaf in leaves)

    def _earlier(self) -> list[Tensor]:
        """Return the logits as they were before, as far as somebody has them."""
        return [tensor for ref in self._before if (tensor := ref()) is not None]

    def _leave(self) -> Tensor | None:
        """Take the mode off the stack if it is there; return the logits then."""
        logits, self._logits = self._logits, None
        if logits is not None:
            above = self.lift()
            self._used |= above != 0
            if above is None and FUNCTION_MODES.size():
                # A caller's own mode that ended meanwhile has taken this one off, and left its own place to us.
                FUNCTION_MODES.pop()
                FUNCTION_MODES.push(self)
                self.lift()
        return logits

    def calls(self, call: Call) -> Mapping[OptionName, Call]:
        """Return the last block's calls under the options that have the loss, made from its plain ``call``."""
        rows = call.leaves[0].numel() // call.leaves[0].shape[-1] if call.slots == (0,) and len(call.leaves) == 1 else 0
        if not self._possible or self._used or len(self._arguments) != 1 or not rows or not call.has_backward:
            return {}
        head = self._head
        labels, vocabulary, others = self._arguments[0]
        assert type(head) is torch.nn.Linear
        if vocabulary != head.out_features or call.contexts.autocasts:
            return {}
        leaves, spec = tree_flatten(((call.leaves[0], labels), others | {"scaling": self._scaling}))
        return calls_with_loss(
            Call(
                module=HeadLoss(head),
                leaves=leaves,
                spec=spec,
                slots=(0,),
                needs_grad=call.needs_grad,
                has_backward=True,
                contexts=call.contexts,
                reached={0},
            )
        )

    def _loss(self, loss: Callable[..., Any], logits: Tensor, labels: Any, vocab_size: int, **options: Any) -> Any:
        # Not watched meanwhile: what the loss itself does with the logits is the use that is looked for.
        own, self._inside_loss = self._logits, True
        result = loss(logits, labels, vocab_size, **options)
        self._inside_loss = False
        if logits is own:
            others = {name: options[name] for name in LOSS_ARGUMENTS if name in options}
            self._arguments.append((labels, vocab_size, others))
            self._on_loss(result)
        return result

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        logits = self._logits
        if logits is None or self._inside_loss or asks_form(func):
            return func(*args, **kwargs)
        step = scaling_step(func, args, kwargs)
        if step is not None and args[0] is logits and not self._arguments:
            self._before.append(weakref.ref(logits))
            self._logits, self._scaling = func(*args, **kwargs), (*self._scaling, step)
            return self._logits
        own = [logits, *self._earlier()]
        self._used |= any(leaf is tensor for leaf in tree_leaves((args, kwargs)) for tensor in own)
        return func(*args, **kwargs)
