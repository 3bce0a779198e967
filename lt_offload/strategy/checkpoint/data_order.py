"""The order of a plain DataLoader, taken up in the middle of an epoch.

A DataLoader has no position that could be saved: its order, and the seeds of its workers, come from random states when
an epoch begins. These states are kept. To resume, the epoch begins again from them, and the batches that training has
seen are fetched once more and dropped. This is exact for everything that the states decide, at the price of fetching.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch.utils.data import DataLoader

from lt_offload.strategy.checkpoint import random_state


class Repeatable:
    """Members that :func:`repeatable` adds to a DataLoader; by two of them Lightning saves and loads its state.

    Without these two it would warn, whenever a run goes on, of a loader that cannot.
    """

    _passes: tuple[dict[str, Any], ...] = ()
    """The random states from which the passes of this epoch began; more than one where a short loader is repeated."""
    _again: tuple[dict[str, Any], ...] = ()
    """Random states from which the next passes shall begin."""
    _left = 0
    """Batches that the next passes fetch and drop."""

    def __iter__(self) -> Iterator[Any]:
        # Workers get their seeds when the iterator is made, a sampler draws its order for the first batch.
        again, self._again = self._again[:1], self._again[1:]
        for states in again:
            self._set(states["made"])
        made = {"made": self._states()}
        self._passes += (made,)
        return self._batches(super().__iter__(), made, again)  # type: ignore[misc]

    def _batches(
        self, batches: Iterator[Any], made: dict[str, Any], again: tuple[dict[str, Any], ...]
    ) -> Iterator[Any]:
        # In a generator, so that this runs when the first batch is asked for: a sampler draws its order then.
        for states in again:
            self._set(states["first"])
        made["first"] = self._states()
        for batch in batches:
            if self._left:
                self._left -= 1
            else:
                yield batch

    def forget(self) -> None:
        """Forget the passes of an epoch that has ended."""
        self._passes = self._again = ()
        self._left = 0

    def drop(self, count: int) -> None:
        """Fetch and drop the first ``count`` batches of an epoch that has not given one."""
        self._left = count

    def state_dict(self) -> dict[str, Any]:
        """Return the random states from which the passes of this epoch began, as far as they have given a batch."""
        return {"passes": [states for states in self._passes if "first" in states]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next passes from ``state``."""
        self._again, self._passes = tuple(state["passes"]), ()

    def _states(self) -> dict[str, Any]:
        return random_state.capture(random_state.generators(loader_parts(self)))

    def _set(self, states: dict[str, Any]) -> None:
        random_state.restore(random_state.generators(loader_parts(self)), states)


def repeatable(loader: object) -> object:
    """Return ``loader`` as one whose epochs can begin again; itself if it saves its own position, or is no loader.

    The result is a shallow copy, of a subclass of its class: the user's object stays what it is.
    """
    if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
        return loader
    kind: Any = type(loader)
    # Not by a constructor: a class of the user's may take any arguments.
    made: Any = object.__new__(_class(kind))
    vars(made).update(vars(loader))
    return made


def loader_parts(loader: Any) -> dict[str, object]:
    """Return ``loader`` and the sources of its order and its samples, by name."""
    parts = {"loader": loader}
    for name in ("sampler", "batch_sampler", "dataset", "collate_fn"):
        parts[name] = getattr(loader, name, None)
    parts["batch_sampler.sampler"] = getattr(parts["batch_sampler"], "sampler", None)
    return parts


@cache
def _class(base: type) -> type[Any]:
    return type(base.__name__, (Repeatable, base), {"__module__": base.__module__, "__doc__": base.__doc__})
