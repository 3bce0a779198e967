from __future__ import annotations

import inspect
import pickle

import pytest

from lt_offload import errors


def tree() -> dict[str, type[BaseException]]:
    return {
        name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and cls.__module__ == errors.__name__
    }


def test_everything_is_one_tree() -> None:
    assert all(issubclass(cls, errors.OffloadError) for cls in tree().values())


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.UnsupportedError, errors.ConfigError),
        (errors.PlanError, errors.ConfigError),
        (errors.ModelError, ValueError),
        (errors.InfeasibleError, ValueError),
        (errors.CheckpointError, OSError),
        (errors.OverBudget, RuntimeError),
    ],
)
def test_bases(cls: type[BaseException], builtin: type[BaseException]) -> None:
    assert issubclass(cls, builtin)


def test_the_drawing_shows_every_class() -> None:
    assert errors.__doc__ is not None
    drawn = {word.strip("()") for line in errors.__doc__.splitlines()[2:] for word in line.replace("└", " ").split()}
    assert set(tree()) <= drawn


def test_infeasible_knows_what_would_do() -> None:
    error = errors.InfeasibleError("memory=1 is too small", needed_bytes=5)
    assert (str(error), error.needed_bytes) == ("memory=1 is too small", 5)
    assert errors.InfeasibleError("no").needed_bytes is None


def test_errors_cross_processes() -> None:
    again = pickle.loads(pickle.dumps(errors.OverBudget("4 of 3 bytes")))
    assert isinstance(again, errors.OverBudget)
    assert str(again) == "4 of 3 bytes"
