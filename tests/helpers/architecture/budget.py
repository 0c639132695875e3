"""Lines of Python that packages have and that training imports, and the budget of each (`budget.toml`).

Run as a program (`python -m tests.helpers.architecture.budget`), it lowers the budgets that their packages do not need.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.helpers.architecture.syntax import imported_names

ROOT = Path(__file__).resolve().parents[3]
BUDGET = ROOT / "budget.toml"
ROOTS = ("megatron", "trident")
TRAINING = "pretrain_gpt.py"


@cache
def modules() -> dict[str, Path]:
    """Every module of both packages, by its dotted name."""
    paths = {path.relative_to(ROOT): path for root in ROOTS for path in (ROOT / root).rglob("*.py")}
    return {".".join(short.with_suffix("").parts).removesuffix(".__init__"): path for short, path in paths.items()}


def package_of(module: str) -> str:
    """The package that a module counts for: `megatron.train`, or `megatron` for modules of its own."""
    path = modules()[module].relative_to(ROOT)
    return ".".join(path.parts[:2] if len(path.parts) > 2 else path.parts[:1])


def lines(path: Path) -> int:
    """Lines of a file, blank ones and docstrings included."""
    return len(path.read_text().splitlines())


def reached(program: str) -> set[str]:
    """The modules that a program imports, directly or not, inside functions too."""
    seen: set[str] = set()
    waiting = _imported(ROOT / program)
    while waiting:
        seen |= waiting
        waiting = set().union(*(_imported(modules()[name]) for name in waiting)) - seen
    return seen


@cache
def sizes() -> dict[str, int]:
    """Lines of every package, and those of `megatron` that training imports, by their key in `budget.toml`."""
    counts = Counter(
        {TRAINING: sum(lines(modules()[name]) for name in reached(TRAINING) if name.startswith("megatron"))}
    )
    for name, path in modules().items():
        counts[package_of(name)] += lines(path)
    return dict(counts)


def budgets(path: Path = BUDGET) -> dict[str, int]:
    """The numbers in a file of upper limits, by their key."""
    entries = re.findall(r'(?m)^"(.+)" = ([\d_]+)', path.read_text())  # Python 3.10 has no tomllib
    return {key: int(number) for key, number in entries}


def lowered(budget: int, size: int) -> int:
    """The budget after a change: never more than the size, rounded up to ten."""
    return min(budget, -(-size // 10) * 10)


def _imported(path: Path) -> set[str]:
    """The modules of both packages that a file imports anywhere, with the packages they are in."""
    names = imported_names(ast.walk(ast.parse(path.read_text())))
    parts = [name.split(".") for name in names]
    return {".".join(words[:end]) for words in parts for end in range(1, len(words) + 1)} & modules().keys()


def main() -> None:
    """Rewrites the numbers of `budget.toml` in place; comments stay, a package that is gone goes."""
    now = sizes()
    text = BUDGET.read_text()
    for key, budget in budgets().items():
        line = rf'(?m)^"{re.escape(key)}" = [\d_]+'
        if key in now:
            text = re.sub(line, f'"{key}" = {lowered(budget, now[key]):_}', text)
        else:
            text = re.sub(line + r".*\n", "", text)
    BUDGET.write_text(text)


if __name__ == "__main__":
    main()
