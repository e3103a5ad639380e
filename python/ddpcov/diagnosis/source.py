"""Places in somebody's source code: who called, what a forward says of an attribute, where an attribute is set.

A user's line is one outside torch, ddpcov and installed libraries. Only where a call has no such line is one of a library
named.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

__all__ = [
    "Line",
    "best",
    "caller",
    "guard",
    "is_readable",
    "mentions",
    "place_of_code",
    "place_of_line",
    "set_in_init",
    "spelled",
]

Line = tuple[CodeType, int]
"""A line that ran; put in words only if it is ever needed."""

_PYTHON = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_NOT_CALLING = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)

_TYPED = ("<string>", "<stdin>", "<ipython")


@functools.cache
def _rank(filename: str) -> int:
    """0 for a user's file, 1 for an installed library's, 2 for torch, Python and ddpcov itself."""
    if filename.startswith(_NOT_CALLING) or (filename.startswith("<") and not filename.startswith(_TYPED)):
        return 2
    if "site-packages" in filename or "dist-packages" in filename:
        return 1
    return 2 if filename.startswith(_PYTHON) else 0


def caller(frame: FrameType | None) -> Line | None:
    """The innermost line of a user among `frame` and those outside it; else that of a library."""
    best: FrameType | None = None
    best_rank = 2
    while frame is not None:
        rank = _rank(frame.f_code.co_filename)
        if rank < best_rank:
            best, best_rank = frame, rank
            if rank == 0:
                break
        frame = frame.f_back
    return None if best is None else (best.f_code, best.f_lineno)


def best(*places: dict[str, Any] | None) -> dict[str, Any] | None:
    """The first place in a user's file; where there is none, the first."""
    known = [place for place in places if place is not None]
    return next((place for place in known if _rank(place["file"]) == 0), known[0] if known else None)


def place_of_line(line: Line | None) -> dict[str, Any] | None:
    """File (relative to the working folder where it is inside), line and function."""
    return None if line is None else _place(line[0], line[1])


def place_of_code(function: Any) -> dict[str, Any] | None:
    """Where a function or method is defined; nothing for one written in C."""
    code = _code_of(function)
    return None if code is None else _place(code, code.co_firstlineno, getattr(function, "__qualname__", None))


def _place(code: CodeType, line: int, name: str | None = None) -> dict[str, Any]:
    file = code.co_filename
    with_folder = os.path.join(os.getcwd(), "")
    if os.path.abspath(file).startswith(with_folder):
        file = os.path.relpath(file)
    name = name or str(getattr(code, "co_qualname", code.co_name))  # co_qualname: Python 3.11
    return {"file": file, "line": line, "function": name.rpartition("<locals>.")[2]}


def spelled(name: str, root: Any) -> str:
    """A module's name as Python reaches it: `layers.3` → `layers[3]`, `heads.a` of a ModuleDict → `heads["a"]`."""
    out, module = "", root
    for part in name.split(".") if name else ():
        if isinstance(module, torch.nn.ModuleDict):
            out = f'{out or "model"}["{part}"]'
        elif part.isdigit():
            out = f"{out or 'model'}[{part}]"
        else:
            out += f".{part}" if out else part
        module = getattr(module, "_modules", {}).get(part)
    return out


@dataclass(frozen=True)
class _Parsed:
    """The syntax tree of a function, with the line numbers of its file."""

    tree: ast.AST
    attributes: dict[str, list[ast.Attribute]]
    """What the first argument of the function, `self` as a rule, is asked for; by line."""
    called: list[str]
    """Names of the methods that are called on a plain name."""


def _code_of(function: Any) -> CodeType | None:
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return code if isinstance(code, CodeType) else None


# Kept by the code alone: a function that is bound to a module would keep the module alive.
@functools.lru_cache(maxsize=256)
def _parsed(code: CodeType | None) -> _Parsed | None:
    if code is None:
        return None
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    ast.increment_lineno(tree, first - 1)
    everything = list(ast.walk(tree))
    function = next((n for n in everything if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))), None)
    arguments = [*function.args.posonlyargs, *function.args.args] if function is not None else []
    attributes: dict[str, list[ast.Attribute]] = {}
    called = []
    for node in everything:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if not arguments or node.value.id == arguments[0].arg:
                attributes.setdefault(node.attr, []).append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            called.append(node.func.attr)
    for nodes in attributes.values():
        nodes.sort(key=lambda node: node.lineno)
    return _Parsed(tree, attributes, called)


def is_readable(function: Any) -> bool:
    """Whether its source is there, so that what it does not mention can be told."""
    return _parsed(_code_of(function)) is not None


def mentions(function: Any, attribute: str, owner: Any = None) -> dict[str, Any] | None:
    """The first place where the function speaks of `self.attribute`; else a method of `owner` that the function calls."""
    code = _code_of(function)
    parsed = _parsed(code)
    if code is None or parsed is None:
        return None
    if nodes := parsed.attributes.get(attribute):
        return _place(code, nodes[0].lineno, getattr(function, "__qualname__", None))
    for name in parsed.called if owner is not None else ():
        method = getattr(type(owner), name, None)
        if inspect.isfunction(method) and (found := mentions(method, attribute)) is not None:
            return found
    return None


def guard(function: Any, attribute: str) -> tuple[str, int, frozenset[str]] | None:
    """What must hold for the first mention of `self.attribute` to run: text, line, and the names that must not be None."""
    return _guard(_code_of(function), attribute)


@functools.lru_cache(maxsize=4096)
def _guard(code: CodeType | None, attribute: str) -> tuple[str, int, frozenset[str]] | None:
    parsed = _parsed(code)
    wanted = {id(node) for node in parsed.attributes.get(attribute, ())} if parsed is not None else None
    if parsed is None or not wanted:
        return None
    found: list[tuple[str, int, frozenset[str]]] = []

    def visit(node: ast.AST, condition: tuple[ast.expr, bool] | None) -> None:
        if id(node) in wanted:
            if condition is not None and not found:
                test, is_met = condition
                text = ast.unparse(test if is_met else ast.UnaryOp(ast.Not(), test))
                found.append((text, test.lineno, frozenset(_not_none(test, is_met))))
            return
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            visit(node.test, condition)
            parts: list[tuple[bool, Any]] = [(True, node.body), (False, node.orelse)]
            for is_met, part in parts:
                for child in part if isinstance(part, list) else [part]:
                    visit(child, (node.test, is_met))
            return
        for child in ast.iter_child_nodes(node):
            visit(child, condition)

    visit(parsed.tree, None)
    return found[0] if found else None


def _not_none(test: ast.expr, is_met: bool) -> Iterator[str]:
    """Names that cannot be None where the test comes out so."""
    if isinstance(test, ast.Name) and is_met:
        yield test.id
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _not_none(test.operand, not is_met)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if is_met else ast.Or):
        for part in test.values:
            yield from _not_none(part, is_met)
    elif isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and len(test.ops) == 1:
        other, operation = test.comparators[0], test.ops[0]
        if isinstance(other, ast.Constant) and other.value is None and isinstance(operation, ast.IsNot if is_met else ast.Is):
            yield test.left.id


def set_in_init(module_class: type, attribute: str) -> dict[str, Any] | None:
    """The line that sets `self.attribute`, or registers it by name: in the class's own methods, `__init__` first."""
    for owner in module_class.__mro__:
        if owner.__module__.startswith("torch.nn.modules.module"):
            break
        methods = [v for v in vars(owner).values() if inspect.isfunction(v)]
        for method in sorted(methods, key=lambda m: m.__name__ != "__init__"):
            parsed = _parsed(method.__code__)
            line = _setting_line(parsed.tree, attribute) if parsed else None
            if line is not None:
                return _place(method.__code__, line, method.__qualname__)
    return None


def _setting_line(tree: ast.AST, attribute: str) -> int | None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (t for one in targets for t in ast.walk(one)):
                if isinstance(target, ast.Attribute) and target.attr == attribute and isinstance(target.ctx, ast.Store):
                    return node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            is_registering = node.func.attr in ("register_parameter", "add_module", "register_module")
            if is_registering and isinstance(node.args[0], ast.Constant) and node.args[0].value == attribute:
                return node.lineno
    return None
