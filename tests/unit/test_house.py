"""How the house is built: what may import what, how large files and folders are, and one meaning for each name."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lt_offload

ROOT = Path(__file__).parents[2]
PACKAGE = "lt_offload"

LAYERS = (
    ("errors", "suggest"),
    ("arguments", "units", "resources", "nested", "replacing", "yaml_files", "compat"),
    ("schema", "compiling"),
    ("machine", "optim", "distributed"),
    ("model",),
    ("limits",),
    ("profiling", "plan", "execute"),
    ("report",),
    ("strategy", "session"),
    ("hf",),
    (PACKAGE,),  # __init__.py: the public names
    ("finetune",),
    ("cli",),
)
"""From the ground up: a room imports itself and lower layers; rooms of one layer never import each other."""

ROOMS_OF_PLAN = (
    ("settings",),
    ("iteration",),
    ("assembly",),
    ("verify",),
    ("planners",),
    ("papers",),
    ("infeasible", "correct", "bounds", "rows"),
    ("windows", "beside"),
    ("solve",),
    ("batch", "sweep", "what_if"),
    ("several",),
    ("orders",),
    ("plan",),  # __init__.py
)
ROOMS_OF_EXECUTE = (
    ("device", "program"),
    ("memory",),
    ("updates",),
    ("blocks",),
    ("user_code",),
    ("interpreter", "iteration"),
    ("training",),
    ("engine",),
    ("execute",),  # __init__.py
    ("installed",),
)
WITHOUT_TORCH = ("plan", "schema", "report")
TORCH = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "transformers"}
OTHERS = TORCH | {"peft", "bitsandbytes", "trl", "accelerate", "datasets"}
OF_PYTHON = {"_replace", "_getframe", "_option_string_actions"}
FILES_OF_A_FOLDER = 13
LINES_OF_A_FILE = 600


# -- the graph of imports ---------------------------------------------------------------------------------------------


@cache
def modules() -> dict[str, Path]:
    """The files of the package by the names that they are imported by."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports below ``node``, those in functions included; those that only a type checker sees are not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield from statements(ast.Module([other], []))
        else:
            yield from statements(child)


@cache
def imports(name: str) -> frozenset[str]:
    """What a module imports, by absolute names: modules of the package as they are, all others as written."""
    path, found = modules()[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for statement in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
        above = package[: len(package) - statement.level + 1] if statement.level else []
        source = ".".join([*above, *filter(None, [statement.module])])
        for alias in statement.names:
            member = f"{source}.{alias.name}"
            found.add(member if member in modules() else source)
    return frozenset(found)


def inner(name: str) -> set[str]:
    return {other for other in imports(name) if other in modules() and other != name}


def within(*rooms: str) -> list[str]:
    return [name for name in modules() if name.split(".")[1:2] in [[room] for room in rooms]]


def upward(layers: Sequence[Sequence[str]], rooms: dict[str, str]) -> list[str]:
    """Modules whose room is in no layer, and imports of a room that is not below; ``rooms`` by module."""
    height = {room: index for index, layer in enumerate(layers) for room in layer}
    found = [f"{name} is in no layer" for name, room in rooms.items() if room not in height]
    return found + [
        f"{name} imports {other}"
        for name, room in rooms.items()
        for other in sorted(inner(name) & rooms.keys())
        if rooms[other] != room and height.get(rooms[other], len(layers)) >= height.get(room, 0)
    ]


def test_the_walk_sees_imports_in_functions_and_relative_ones_but_none_for_type_checkers() -> None:
    source = """
import a.b
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import hidden
else:
    import shown
def f():
    from . import c
    class D:
        from ..e import g
"""
    found = [ast.unparse(statement) for statement in statements(ast.parse(source))]
    assert found == [
        "import a.b",
        "from typing import TYPE_CHECKING",
        "import shown",
        "from . import c",
        "from ..e import g",
    ]
    assert len(modules()) > 100
    assert f"{PACKAGE}.schema.profile" in imports(f"{PACKAGE}.profiling.measure")
    assert f"{PACKAGE}.strategy.register" in imports(PACKAGE)


# -- private names of others ------------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_lt_offload")) and name != "_" and name.isidentifier()


def own_names(tree: ast.AST) -> set[str]:
    """What a module makes itself: functions, classes, variables, parameters and attributes of ``self``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif ast.unparse(node.value) in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def private_names_of_others(tree: ast.AST, known: set[str], ours: set[str]) -> list[str]:
    """Private names of libraries that a module uses: those that are ``known``, and those that are not ``ours``."""
    found, here = [], own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                path = f"{module}.{alias.name}".strip(".").split(".")
                if path[0] in OTHERS and any(map(is_private, path)):
                    found.append(f"{node.lineno}: {'.'.join(path)}")
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in (here if node.attr in known else ours) | OF_PYTHON:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Constant) and node.value in known - here:
            found.append(f"{node.lineno}: {node.value!r}")
    return found


@cache
def known_to_compat() -> frozenset[str]:
    found: set[str] = set()
    for name in within("compat"):
        for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.alias):
                found |= set(node.name.split("."))
    return frozenset(filter(is_private, found))


def test_private_names_of_libraries_are_used_in_compat_alone() -> None:
    rest = {name: path for name, path in modules().items() if name.split(".")[1:2] != ["compat"]}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in rest.items()}
    ours = {name for tree in trees.values() for name in own_names(tree)}
    used = {name: private_names_of_others(tree, set(known_to_compat()), ours) for name, tree in trees.items()}
    assert {name: lines for name, lines in used.items() if lines} == {}


def test_the_search_for_private_names_sees_them() -> None:
    source = """
import torch._dynamo
from torch.utils._pytree import tree_map
from lt_offload.compat.torch import address_of
def f(tensor, other):
    self._mine = other._mine, other._theirs
    return tensor._cdata, torch._C._has_storage, getattr(tensor, "_cdata"), sys._getframe()
"""
    found = private_names_of_others(ast.parse(source), {"_cdata"}, {"_mine"})
    assert sorted(found) == [
        "2: torch._dynamo",
        "3: torch.utils._pytree.tree_map",
        "6: other._theirs",
        "7: '_cdata'",
        "7: tensor._cdata",
        "7: torch._C",
        "7: torch._C._has_storage",
    ]


# -- what may import what ---------------------------------------------------------------------------------------------


def test_nothing_imports_upwards_and_siblings_never_import_each_other() -> None:
    rooms = {name: (name.split(".") * 2)[1] for name in modules()}
    assert upward(LAYERS, rooms) == []


@pytest.mark.parametrize(("verb", "layers"), [("plan", ROOMS_OF_PLAN), ("execute", ROOMS_OF_EXECUTE)])
def test_no_room_of_a_verb_imports_upwards(verb: str, layers: Sequence[Sequence[str]]) -> None:
    rooms = {name: (name.split(".") + [verb])[2] for name in within(verb)}
    assert upward(layers, rooms) == []


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph, circles = {name: inner(name) for name in modules()}, []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            break
        except CycleError as error:
            circle = error.args[1][::-1]
            circles.append(" imports ".join(circle))
            graph[circle[0]].discard(circle[1])  # and look for others
    assert circles == []


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_what_is_without_torch_imports_nothing_that_needs_it(room: str) -> None:
    reached = set(within(room))
    waiting = list(reached)
    while waiting:
        found = inner(waiting.pop()) - reached
        reached |= found
        waiting += found
    needed = [(name, other) for name in sorted(reached) for other in sorted(imports(name))]
    assert [f"{name} imports {other}" for name, other in needed if other.split(".")[0] in TORCH] == []


def test_what_is_without_torch_loads_none_of_it() -> None:
    code = f"import {', '.join(within(*WITHOUT_TORCH))}, sys; print(*sorted({TORCH} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


# -- files and folders ------------------------------------------------------------------------------------------------


def sources() -> Iterator[Path]:
    for folder in (PACKAGE, "scripts", "tests"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_folders_are_small_enough_to_be_read_at_a_glance() -> None:
    files = defaultdict(list)
    for path in sources():
        files[path.parent.relative_to(ROOT)].append(path.name)
    assert {str(folder): len(names) for folder, names in files.items() if len(names) > FILES_OF_A_FOLDER} == {}


def test_files_are_short_enough_to_be_one_concept() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {name: count for name, count in lines.items() if count > LINES_OF_A_FILE} == {}


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_class_name_means_one_thing() -> None:
    """With and without an underscore, at the top of a module and inside classes and functions."""
    places = defaultdict(list)
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{name}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def written() -> list[str]:
    """Dotted names of the package in the README, the recipes, the configurations and the project's entry points."""
    paths = [ROOT / "README.md", ROOT / "pyproject.toml"]
    paths += sorted(path for folder in ("recipes", "configs") for path in (ROOT / folder).rglob("*.*"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return sorted({name.replace(":", ".") for name in re.findall(rf"\b{PACKAGE}(?:[.:][A-Za-z_]\w*)+", text)})


def resolve(name: str) -> object:
    """The module or member that a dotted name stands for."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in modules():
            found: object = importlib.import_module(".".join(parts[:count]))
            for part in parts[count:]:
                found = getattr(found, part)
            return found
    raise AssertionError(f"{name} is no name of the package")


@pytest.mark.parametrize("name", [f"{PACKAGE}.{name}" for name in lt_offload.__all__] + written())
def test_every_name_that_users_write_resolves(name: str) -> None:
    assert resolve(name) is not None


def test_documents_and_recipes_name_the_package_at_all() -> None:
    assert {f"{PACKAGE}.OffmateStrategy", f"{PACKAGE}.cli.main.main"} <= set(written())


# -- the map ----------------------------------------------------------------------------------------------------------


MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", MAP)))


@pytest.mark.parametrize("path", NAMED)
def test_what_the_map_names_is_there(path: str) -> None:
    """Files and folders, from the repository's root, from the package, or from the room that is described."""
    roots = (ROOT, ROOT / PACKAGE, ROOT / PACKAGE / "plan", ROOT / PACKAGE / "execute")
    assert any((root / path).exists() for root in roots)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("execute.memory.residency", ("Residency.prefetch", "Transfer.fetch")),
        ("plan.verify.check", ("_budgets",)),
        ("machine.accounting", ("Account",)),
        ("execute.updates.clipping", ("Clipping.clip_norm", "Clipping.edit")),
    ],
)
def test_the_answers_of_the_map_are_right(module: str, names: tuple[str, ...]) -> None:
    """Where a weight's copy is issued, where the budget is enforced, where clipping is done."""
    assert f"lt_offload/{module.replace('.', '/')}.py" in MAP
    for name in names:
        thing: object = importlib.import_module(f"{PACKAGE}.{module}")
        for part in name.split("."):
            thing = getattr(thing, part)
        assert f"`{name}`" in MAP
