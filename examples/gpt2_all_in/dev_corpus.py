"""Prints the text of the dev corpus: a JSON line for each section of the documentation and each docstring.

`make_dev_corpus.sh` turns it into the token files next to this program.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_LEAST_LETTERS = 80


def sections() -> Iterator[str]:
    """The sections of the pages, then the docstrings of the modules, in the order of their paths."""
    for page in [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]:
        yield from page.read_text(encoding="utf-8").split("\n## ")
    for module in sorted((_ROOT / "megatron").rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield ast.get_docstring(node) or ""


def main() -> None:
    """Prints the corpus."""
    for text in sections():
        if len(text) >= _LEAST_LETTERS:
            print(json.dumps({"text": text.strip()}, ensure_ascii=False))


if __name__ == "__main__":
    main()
