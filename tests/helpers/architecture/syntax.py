"""Questions about a parsed Python file: what it imports, what it names, what it changes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

MUTATING_METHODS = {
    *("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard"),
    *("sort", "reverse", "appendleft", "extendleft", "popleft"),
}
MUTABLE_MAKERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.stmt, str]]:
    """Every imported module, with `from a import b` given as "a", or "a.b" where b may be one of our modules."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node, "." * node.level + (node.module or "")
            elif node.module in ("megatron", "trident"):
                for alias in node.names:
                    yield node, f"{node.module}.{alias.name}"
            elif node.module:
                yield node, node.module


def imported_names(nodes: Iterable[ast.AST]) -> set[str]:
    """The dotted names in import statements: a and a.b of `from a import b`, where b may be a module."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def foreign_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Every imported thing and every dotted name, with import aliases written out."""
    aliases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
                if alias.asname:
                    aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            root, _, rest = name.partition(".")
            if name:
                yield node, f"{aliases.get(root, root)}.{rest}"


def dotted(node: ast.expr) -> str:
    """The dotted name of an expression; "" when it is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def is_true(node: ast.expr) -> bool:
    """Whether an expression is the word True."""
    return isinstance(node, ast.Constant) and node.value is True


def makes_mutable(node: ast.expr) -> bool:
    """Whether an expression makes a container that can change."""
    if isinstance(node, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
        return True
    return isinstance(node, ast.Call) and dotted(node.func).rsplit(".", 1)[-1] in MUTABLE_MAKERS


def changed_name(node: ast.AST) -> str:
    """The plain name whose contents a node changes; "" when it changes none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING_METHODS:
        return node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    for target in targets:
        if isinstance(target, (ast.Subscript, ast.Attribute)) and isinstance(target.value, ast.Name):
            return target.value.id
        if isinstance(node, ast.AugAssign) and isinstance(target, ast.Name):
            return target.id
    return ""


def is_shadowed(tree: ast.Module, node: ast.AST, name: str) -> bool:
    """Whether the function around a node has a variable or argument of that name."""
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        inside = list(ast.walk(function))
        if node in inside and any(
            (isinstance(inner, ast.arg) and inner.arg == name)
            or (isinstance(inner, ast.Name) and inner.id == name and isinstance(inner.ctx, ast.Store))
            for inner in inside
        ):
            return True
    return False


def is_type_checking(node: ast.stmt) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")


def is_function(node: ast.stmt) -> bool:
    """Whether a statement is a definition, whose body does not run at import."""
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def defined_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Every name that the code gives: functions, classes, arguments, variables, attributes."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
