"""Libraries and the user's own modules, told apart by where they lie."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from lt_offload.model.objects import is_library


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/usr/lib/python3/dist-packages/some_module/__init__.py", True),
        ("/home/me/.local/lib/python3.11/site-packages/some_module.py", True),
        ("/home/me/project/some_module.py", False),
        (None, False),
    ],
)
def test_a_module_is_a_library_where_any_environment_has_installed_it(
    monkeypatch: pytest.MonkeyPatch, file: str | None, library: bool
) -> None:
    """A virtual environment may see the libraries of the system, PyTorch among them."""
    module = ModuleType("some_module")
    module.__file__ = file
    monkeypatch.setitem(sys.modules, "some_module", module)
    is_library.cache_clear()
    assert is_library("some_module") is library
    is_library.cache_clear()


def test_torch_is_a_library_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be built in its own folder: no tensor is ever taken apart as an object of the user's."""
    monkeypatch.setattr(sys.modules["torch"], "__file__", "/home/me/pytorch/torch/__init__.py")
    is_library.cache_clear()
    assert is_library("torch._subclasses.fake_tensor")
    is_library.cache_clear()
