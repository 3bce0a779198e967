"""The context in which Trainers are made: they get a subclass of their class that streams weights.

No other class is changed but ``Trainer``, whose constructor has a second one in front of it while such a context is
open anywhere. The second one acts only in the thread (or task) that opened the context. The new class goes with the
object, wherever and whenever it is used afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from lt_offload.arguments import checked
from lt_offload.errors import ConfigError
from lt_offload.hf.run import Run
from lt_offload.hf.trainer import Offloaded
from lt_offload.machine.replaced import Replaced
from lt_offload.schema.plan import PlannerName
from lt_offload.strategy.first.planning import settings_of

Trainer: Any = import_module("transformers").Trainer  # a type checker would have to read all of transformers
_options: ContextVar[Mapping[str, Any] | None] = ContextVar("lt_offload_hf_trainer", default=None)
"""The options of the innermost context that is open here."""
_classes: dict[type[Any], type[Any]] = {}


@checked
def hf_trainer(
    *,
    memory: str | int | float | None = None,
    host_memory: str | int | float | None = None,
    planner: PlannerName = "auto",
    micro_batches: int | Literal["auto"] = 1,
    tile_tokens: int | None = None,
    blocks: str | None = None,
    host_update: bool = True,
    activation_offload: bool = True,
    recompute: bool = True,
    chunked_loss: bool = False,
    gradient_reserve: float | None = None,
    plan: str | Path | None = None,
    solver_time_limit: float = 30.0,
    report_dir: str | Path | None = None,
    sample_batch: Any = None,
) -> AbstractContextManager[None]:
    """Let every ``transformers.Trainer`` that is made within the context train inside ``memory``, with plain numbers.

    Subclasses, TRL's and your own, are meant as well. Only the constructor has to be called within: it would move the
    model to the GPU. The Trainer stays what it has become, and ``train``, ``evaluate``, ``predict`` and ``save_model``
    may be called within or later. Other threads, and Trainers made elsewhere, are not touched.

    With ``use_cpu=True``, or without a GPU, the same plan runs on an emulated device of ``memory`` bytes.

    Args:
        memory: device memory that training may occupy, such as ``"10GB"``, ``"10GiB"`` or bytes; None: what is free.
        host_memory: RAM that training may take; None: what is free.
        planner: which planner to use; ``"auto"`` simulates several and takes the fastest.
        micro_batches: parts of a batch that go through each block in turn, see ``lt_offload.micro_batched_reference``.
        tile_tokens: tokens at a time in the parts of blocks that treat each token on its own, for long sequences, see
            ``lt_offload.tile_tokens``; None: all tokens.
        blocks: name of the ``nn.ModuleList`` or ``nn.Sequential`` that holds the layers; None: found by structure.
        host_update: allow optimizer updates on the host.
        activation_offload: allow activations to travel to the host and back.
        recompute: allow activations to be computed again.
        chunked_loss: let the output projection and the loss take a few tokens at a time wherever they can, with the
            sums of ``lt_offload.chunked_loss_reference``; by default only where nothing else fits.
        gradient_reserve: for ``planner="memferry"``: the part of all gradient bytes that the device may hold.
        plan: path of a saved plan to replay instead of planning.
        solver_time_limit: seconds that planning may take.
        report_dir: folder for profile.json, plan.json, trace.json and report.html; None: ``lt_offload`` in the
            Trainer's ``output_dir``.
        sample_batch: a batch of the largest shape that will come, as the data collator returns it: a step of it runs on
            trial, to be planned for. None: the first training step shows what to plan, and so does each that is larger
            than there is room for.

    Raises:
        ConfigError: if a setting cannot be used as given.
        UnsupportedError: by the Trainer's constructor, naming the argument that cannot be honoured.
    """
    options = locals()
    settings_of(options)  # refuses what cannot be used as given here, and not when a Trainer is made
    return _opened(options)


class OffloadedTrainerMixin:
    """A base of Trainers of one's own, each of which trains as one that was made within :func:`hf_trainer`.

    It stands before the Trainer: ``class Mine(OffloadedTrainerMixin, Trainer)``.

    Args:
        *args: of the Trainer.
        offload: arguments of :func:`hf_trainer` by their names, such as ``{"memory": "10GB"}``; None: its defaults.
        **kwargs: of the Trainer.

    Raises:
        ConfigError: if a setting cannot be used as given; by a subclass, if the Trainer stands before this class.
        UnsupportedError: naming the Trainer's argument that cannot be honoured.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a Trainer that stands before the mixin, whose constructor would never come here."""
        super().__init_subclass__(**kwargs)
        first = next(base for base in cls.__mro__ if base is OffloadedTrainerMixin or base is Trainer)
        if first is Trainer:
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise ConfigError(
                f"class {cls.__name__}({bases}): OffloadedTrainerMixin stands behind the Trainer; put it first"
            )

    @checked
    def __init__(self, *args: Any, offload: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        with hf_trainer(**(offload or {})):
            super().__init__(*args, **kwargs)


@contextmanager
def _opened(options: Mapping[str, Any]) -> Iterator[None]:
    before = _options.set(options)
    try:
        with _CONSTRUCTOR.active():
            yield
    finally:
        _options.reset(before)


def _offloading(constructor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:
        options = _options.get()
        if options is not None and not isinstance(trainer, Offloaded):
            # Before the constructor runs, as that would move the model to the GPU.
            trainer.__class__ = offloaded_class(type(trainer))
            vars(trainer)["offmate"] = Run(trainer, options)
        constructor(trainer, *args, **kwargs)

    return __init__


_CONSTRUCTOR = Replaced(lambda: Trainer, "__init__", _offloading)


def offloaded_class(cls: type[Any]) -> type[Any]:
    """Return the offloaded subclass of ``cls``, of the same name for logs and model cards."""
    # One for all Trainers of a class, so that their types are equal.
    if cls not in _classes:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _classes[cls] = type(cls.__name__, (Offloaded, cls), names)
    return _classes[cls]
