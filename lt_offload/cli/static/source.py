"""Functions, classes and their docstrings, read from source files without importing them.

A constructor's parameters are settings and a verb's are flags; this finds their names, types, defaults and meanings.
The command line reads a file that was made of them; see ``definitions.py``.
"""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lt_offload.cli.static.documented import Documented, Parameter

PACKAGE = "lt_offload"
_PACKAGE_FOLDER = Path(__file__).resolve().parents[2]

Definition = ast.ClassDef | ast.FunctionDef


def read_definition(module: str, name: str) -> Documented:
    """Return what the source of ``module`` says about its function or class ``name``.

    Raises:
        LookupError: if there is no such module, or it defines no such thing.
    """
    node = _definitions(module).get(name)
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        raise LookupError(f"{module} defines no {name}")
    return _documented(module, node)


@cache
def _documented(module: str, node: Definition) -> Documented:
    texts = [ast.get_docstring(node) or ""]
    function: ast.FunctionDef | None = node if isinstance(node, ast.FunctionDef) else None
    if isinstance(node, ast.ClassDef):
        function = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        texts += [] if function is None else [ast.get_docstring(function) or ""]
    meanings = {name: about for text in texts for name, about in arguments(text).items()}
    before = next(filter(None, texts), "").split("\nArgs:")[0].split("\n\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in before]
    parameters = _fields(node) if function is None and isinstance(node, ast.ClassDef) else _parameters(function)
    return Documented(
        name=node.name,
        summary=paragraphs[0],
        details="\n".join(paragraphs[1:]),
        parameters=tuple(
            Parameter(
                name=parameter,
                kind=kind,
                annotation=_spelled_out(module, annotation),
                default=None if default is None else ast.unparse(default),
                about=meanings.get(parameter, ""),
                group=_group(module, annotation),
            )
            for parameter, kind, annotation, default in parameters
        ),
    )


def arguments(docstring: str) -> dict[str, str]:
    """Return the meaning of each argument that a docstring explains under ``Args:``."""
    match = re.search(r"^Args:\n((?:[ \t]+.*\n|\n)*)", docstring + "\n", flags=re.MULTILINE)
    found: dict[str, list[str]] = {}
    name = ""
    for line in textwrap.dedent(match[1] if match else "").splitlines():
        # Google's style of docstrings allows a type in parentheses behind the name.
        begins = re.match(r"\*{0,2}(\w+)(?: \([^)]*\))?: *(.*)", line)
        if begins:
            name = begins[1]
            found[name] = [begins[2]]
        elif name:
            found[name].append(line.strip())
    return {name: " ".join(" ".join(lines).split()) for name, lines in found.items()}


_Plain = tuple[str, str, ast.expr | None, ast.expr | None]
"""Name, kind, type and default of a parameter."""


def _parameters(function: ast.FunctionDef | None) -> list[_Plain]:
    if function is None:
        return []
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(args.defaults)), *args.defaults]
    found: list[_Plain] = [
        (arg.arg, "word", arg.annotation, default)
        for arg, default in zip(positional, defaults, strict=True)
        if arg.arg not in ("self", "app")
    ]
    if args.vararg is not None:
        found.append((args.vararg.arg, "words", args.vararg.annotation, None))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append((arg.arg, "flag", arg.annotation, default))
    return found


def _fields(node: ast.ClassDef) -> list[_Plain]:
    """Return the fields of a dataclass."""
    return [
        (field.target.id, "flag", field.annotation, field.value)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def _spelled_out(module: str, annotation: ast.expr | None) -> str:
    """Return a type as text, with the values of literal types that have a name."""
    if annotation is None:
        return ""
    text = ast.unparse(annotation)
    for node in ast.walk(annotation):
        found = _followed(module, node)
        if found is not None and isinstance(found[1], ast.Assign) and isinstance(node, ast.Name | ast.Attribute):
            text = text.replace(ast.unparse(node), _spelled_out(found[0], found[1].value))
    return text


def _group(module: str, annotation: ast.expr | None) -> Documented | None:
    """Return the class of this package that ``annotation`` names, whose fields are settings, too."""
    for node in ast.walk(annotation) if annotation is not None else ():
        found = _followed(module, node)
        if found is not None and isinstance(found[1], ast.ClassDef) and found[0].startswith(PACKAGE):
            return _documented(found[0], found[1])
    return None


def _followed(module: str, node: ast.AST) -> tuple[str, ast.AST] | None:
    """Return the module and the statement that define what ``node`` names, if this package does."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = _definitions(module).get(node.value.id)
        where = _imported(module, owner, node.value.id) if owner is not None else None
        return None if where is None else _looked_up(where, node.attr)
    return _looked_up(module, node.id) if isinstance(node, ast.Name) else None


def _looked_up(module: str, name: str) -> tuple[str, ast.AST] | None:
    found = _definitions(module).get(name) if module.startswith(PACKAGE) else None
    if isinstance(found, ast.ImportFrom):
        original = next(alias.name for alias in found.names if (alias.asname or alias.name) == name)
        return _looked_up(found.module or "", original)
    return None if found is None else (module, found)


def _imported(module: str, statement: ast.AST, name: str) -> str | None:
    """Return the module that ``name`` stands for where ``statement`` has imported it."""
    if isinstance(statement, ast.ImportFrom):
        original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
        return f"{statement.module}.{original}"
    return None


@cache
def _definitions(module: str) -> dict[str, Any]:
    """Return the statements at the top of ``module`` that define or import a name, by that name."""
    found: dict[str, ast.AST] = {}
    path = _path(module)
    if path is None:
        return found
    # The list grows while it is walked: imports for type checkers stand in an if, and name types all the same.
    pending = list(ast.parse(path.read_text(encoding="utf-8")).body)
    for statement in pending:
        if isinstance(statement, ast.If):
            pending += [*statement.body, *statement.orelse]
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            found |= {target.id: statement for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.ImportFrom):
            found |= {alias.asname or alias.name: statement for alias in statement.names}
    return found


@cache
def _path(module: str) -> Path | None:
    """Return the file of ``module``; only its outermost package is looked for, so that nothing is imported."""
    outermost, *rest = module.split(".")
    if outermost == PACKAGE:
        root = _PACKAGE_FOLDER
    else:
        # Only the outermost package is looked for: to find a submodule imports all packages above it.
        spec = find_spec(outermost)
        if spec is None or spec.origin is None:
            return None
        root = Path(spec.origin).parent
    places = (root.joinpath(*rest).with_suffix(".py"), root.joinpath(*rest, "__init__.py"))
    return next((place for place in places if rest and place.is_file()), None)
