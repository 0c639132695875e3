"""Patterns of wording that a reader stumbles over, counted, with a ceiling for each (`wording.toml`).

python -m tests.helpers.architecture.wording              the counts; ceilings that are higher fall to them
python -m tests.helpers.architecture.wording PATTERN ...  every line with one of these patterns, by file
python -m tests.helpers.architecture.wording --in megatron/engine   the counts below a folder
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.helpers.architecture.budget import budgets

ROOT = Path(__file__).resolve().parents[3]
CEILINGS = ROOT / "wording.toml"
CODE = ("megatron", "trident", "tools", "tasks", "examples", "pretrain_gpt.py", "train_on_text.py")
DOCUMENTS = ("docs", "README.md", "CONTRIBUTING.md")

# Words in identifiers: counted once for each function that has a parameter or local variable of that name.
NAMES = {
    "name: place": r"places?",
    "name: own": r"own",
    "name: wanted": r"wanted",
    "name: begin": r"begin",
    "name: asked": r"asked",
    "name: said": r"said",
    "name: words": r"words?",
    "name: piece, stretch, span": r"pieces?|stretch(es)?|spans?",
}
# The first word of a docstring.
DOCSTRINGS = {"docstring: What/Whether/How/Which": r"(What|Whether|How|Which|Where|When|Why|Who)\b"}
# Phrases in docstrings, comments, messages and documents.
PHRASES = {
    "is said/says": r"\b(is said|are said|says|said)\b",
    "is asked for/asks": r"\b(asks?|asked)\b",
    "hears, tells, greets": r"\b(hears?|heard|tells?|told|greets?|goodbye|farewell|obeys?)\b",
    "dies, dead": r"\b(die|dies|died|dying|dead)\b",
    "those of/that of": r"\b(those|that) of\b",
    "of which/to which": r"\b(of|to|in|from|by|for|with|at|on) which\b",
    "of its own": r"\bof (its|their|our|his|one's) own\b",
    "there is/are": r"\b[Tt]here (is|are)\b",
    "does not go with": r"\bnot go with\b",
    "is not known": r"\b(is|are) not known\b",
    "rehearsal": r"[Rr]ehears",
    "nobody, anybody": r"\b([Nn]obody|[Aa]nybody)\b",
    "beside": r"\b[Bb]eside\b",
}
PATTERNS = {**NAMES, **DOCSTRINGS, **PHRASES}


def hits(paths: tuple[str, ...] = CODE + DOCUMENTS) -> dict[str, list[tuple[str, int, str]]]:
    """Every hit of each pattern as (file, line number, line)."""
    found: dict[str, list[tuple[str, int, str]]] = defaultdict(list)
    for name in _files(paths):
        text = (ROOT / name).read_text(encoding="utf-8")
        lines = text.splitlines()
        for pattern, number in of_file(name, text):
            found[pattern].append((name, number, lines[number - 1].strip()))
    return {pattern: found[pattern] for pattern in PATTERNS}


def ceilings() -> dict[str, int]:
    """The most hits of each pattern."""
    return budgets(CEILINGS)


def lower(counts: dict[str, int]) -> None:
    """Writes the ceilings that are higher than the counts anew."""
    known = ceilings()
    entries = [f'"{pattern}" = {min(count, known.get(pattern, count))}\n' for pattern, count in counts.items()]
    CEILINGS.write_text("# Hits of tests/helpers/architecture/wording.py; a ceiling only falls.\n" + "".join(entries))


def of_file(name: str, text: str) -> Iterator[tuple[str, int]]:
    """Every hit in the text of a file, as pattern and line number."""
    if name.endswith(".py"):
        tree = ast.parse(text)
        yield from _in_code(tree)
    for pattern, expression in PHRASES.items():
        for match in re.finditer(expression, text):
            yield pattern, text.count("\n", 0, match.end()) + 1


def _in_code(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = _names(node)
            for pattern, expression in NAMES.items():
                if any(re.fullmatch(expression, name) for name in names):
                    yield pattern, node.lineno
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            document = ast.get_docstring(node)
            for pattern, expression in DOCSTRINGS.items():
                if document and re.match(expression, document):
                    yield pattern, getattr(node, "lineno", 1)


def _names(function: ast.AST) -> set[str]:
    """Parameters and local variables."""
    names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return names | {
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


@cache
def _files(paths: tuple[str, ...]) -> list[str]:
    """Python files and documents below some paths, as git lists them."""
    listing = subprocess.run(
        ["git", "ls-files", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [name for name in listing if name.endswith((".py", ".md")) and (ROOT / name).exists()]


def main() -> None:
    """Prints counts or lines; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Counts patterns of wording.")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="print the lines of patterns that contain this")
    parser.add_argument("--in", dest="paths", nargs="+", default=None, metavar="PATH", help="only below these paths")
    args = parser.parse_args()
    found = hits(tuple(args.paths or CODE + DOCUMENTS))
    if args.patterns:
        for pattern, entries in found.items():
            if any(word in pattern for word in args.patterns):
                print(f"== {pattern}: {len(entries)}")
                for name, number, line in entries:
                    print(f"{name}:{number}: {line}")
        return
    counts = {pattern: len(entries) for pattern, entries in found.items()}
    for pattern, count in counts.items():
        print(f"{count:6,}  {pattern}")
    if args.paths is None:
        lower(counts)


if __name__ == "__main__":
    main()
