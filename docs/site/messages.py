"""The sentences of the project's errors, as templates read from its source code without importing it.

A template has `…` where a message has a value. Sentences that a check yields, appends or returns, and that are raised
together later, count as messages of the error they end up in.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

BASE_ERROR = "MegatronError"
VALUE = "…"
_PATTERNS = ("megatron/**/*.py", "trident/**/*.py", "tools/**/*.py", "tasks/**/*.py", "examples/**/*.py")
_FEWEST_WORDS = 4  # of a sentence that is not raised where it is written
_WORD = re.compile(r"[A-Za-z][\w'-]+")


@dataclass(frozen=True, order=True)
class Message:
    """A sentence that an error may show: the file and line it is in, its type, and its template."""

    path: str
    line: int
    error: str
    template: str

    def matches(self, text: str) -> bool:
        """Whether `text` contains this message with any values in it, or at least its first sentence."""
        first = self.template.split(". ")[0]
        wanted = first if len(_WORD.findall(first)) >= _FEWEST_WORDS else self.template
        parts = wanted.split(VALUE)
        if max(parts, key=len) not in text:
            return False
        return re.search(".*?".join(map(re.escape, parts)), text, flags=re.DOTALL) is not None


@dataclass(frozen=True)
class SourceMessages:
    """What the source code says: the name of the exit code of each error type, and all messages by file and line."""

    exit_codes: Mapping[str, str]
    messages: tuple[Message, ...]


@functools.cache
def read_messages(root: Path) -> SourceMessages:
    """Reads the package and its programs in the folder `root`."""
    texts = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for pattern in _PATTERNS
        for path in sorted(root.glob(pattern))
    }
    trees = {path: ast.parse(text) for path, text in texts.items() if re.search("Error|problem|_rule", text)}
    kinds = _error_types(trees)
    messages = {message for path, tree in trees.items() for message in _FileReader(path, kinds).read(tree)}
    return SourceMessages(kinds, tuple(sorted(messages)))


def _error_types(trees: Mapping[str, ast.Module]) -> dict[str, str]:
    """The exit code of every error type that is derived from `MegatronError`."""
    bases: dict[str, str] = {}
    codes: dict[str, str] = {}
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.bases and isinstance(node.bases[0], ast.Name):
                bases.setdefault(node.name, node.bases[0].id)
                codes.update((node.name, code) for code in _exit_codes(node))
    codes_by_type = {}
    for name in bases:
        line = [name]
        while line[-1] in bases and line[-1] != BASE_ERROR:
            line.append(bases[line[-1]])
        if line[-1] == BASE_ERROR:
            codes_by_type[name] = next(codes[one] for one in line if one in codes)
    return codes_by_type


def _exit_codes(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "exit_code":
            yield ast.unparse(statement.value).rpartition(".")[2]


class _FileReader:
    """Collects the messages of one file."""

    def __init__(self, path: str, kinds: Mapping[str, str]) -> None:
        self._path = path
        self._kinds = kinds
        self._found: list[Message] = []

    def read(self, tree: ast.Module) -> list[Message]:
        """All messages of the functions of a module and of its classes."""
        for node in tree.body:
            for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self._read_function(inner)
        return self._found

    def _read_function(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        nodes = list(ast.walk(function))
        texts: dict[str, list[str]] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                texts.setdefault(node.targets[0].id, []).extend(filter(_is_sentence, _templates(node.value, {})))
        for node in nodes:
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                error = ast.unparse(node.exc.func).rpartition(".")[2]
                templates = [text for argument in node.exc.args for text in _templates(argument, texts)]
                if error in self._kinds:
                    self._found += [Message(self._path, node.lineno, error, text) for text in templates if _says(text)]
            elif self._path.startswith("megatron/config/") or "problem" in function.name:
                for expression in _handed_over(node):
                    templates = [text for text in _templates(expression, texts) if _is_sentence(text)]
                    self._found += [Message(self._path, expression.lineno, "ConfigError", text) for text in templates]


def _handed_over(node: ast.AST) -> list[ast.expr]:
    """The expressions that a node yields, returns or adds to a list."""
    if isinstance(node, (ast.Yield, ast.Return)) and node.value is not None:
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "extend"):
        return list(node.args)
    return []


def _says(template: str) -> bool:
    return _WORD.search(template) is not None


def _is_sentence(template: str) -> bool:
    return template.endswith((".", "?", VALUE)) and len(_WORD.findall(template)) >= _FEWEST_WORDS


def _templates(node: ast.expr, texts: Mapping[str, list[str]]) -> list[str]:
    """What an expression may say: several templates for a choice or a list, none for what is not a text."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = (_templates(side, texts) or [VALUE] for side in (node.left, node.right))
        return [one + other for one in left for other in right]
    if isinstance(node, ast.IfExp):
        return [*_templates(node.body, texts), *_templates(node.orelse, texts)]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [template for element in node.elts for template in _templates(element, texts)]
    if isinstance(node, ast.Name):
        return list(texts.get(node.id, []))
    return []
