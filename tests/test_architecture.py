"""Checks the project's rules on every file, and that every rule can fail, on a snippet that violates it."""

from __future__ import annotations

import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.architecture import rules, tables
from tests.helpers.architecture.rules import RULES, Rule, Source
from tests.helpers.architecture.syntax import imported_names

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("megatron", "trident")
PROGRAMS = tuple(f"{name}.py" for name in sorted(tables.PROGRAMS))
DOCS = ("docs/site/draw_pictures.py", "docs/site/published_commands.py")  # the programs among the modules of the site
PRODUCT = (
    "megatron/**/*.py",
    "trident/**/*.py",
    "tools/**/*.py",
    "tasks/**/*.py",
    *PROGRAMS,
    "examples/**/*.py",
    *DOCS,
)
_AROUND = ("benchmarks", "campaigns", "csrc", "docs/site", "tests")
EVERYTHING = (*PRODUCT, *(f"{folder}/**/*.py" for folder in _AROUND), "setup.py")
MEASURED_EVERYWHERE = (rules.files_and_functions_are_short,)

OFFENDERS = [
    line.encode().decode("unicode_escape").split(" | ")
    for line in (ROOT / "tests" / "helpers" / "architecture" / "offenders.txt").read_text().splitlines()[1:]
]
# Files and functions that are too long, and a function without a docstring: their texts are too long for that file.
LONG = (
    ["files_and_functions_are_short", "megatron/train/x.py", "a = 1\n" * 501, "501 lines"],
    ["files_and_functions_are_short", "tests/x.py", "def f():\n" + "    a = 1\n" * 60, "f has 61 lines"],
    ["everything_public_is_described", "tools/x.py", '"""A."""\ndef f():\n' + "    a()\n" * 10, "f has no docstring"],
)

# What must stay allowed: a rule that forbids too much is as wrong as one that forbids nothing.
INNOCENT: tuple[tuple[str, str], ...] = (
    ("megatron/engine/x.py", '"""A."""\nimport deepspeed\ndeepspeed.initialize(model=1)\nengine.deepspeed.step()'),
    ("megatron/engine/x.py", '"""A."""\nimport deepspeed\nfrom megatron.parallel.mesh import Axis'),
    ("megatron/parallel/x.py", '"""A."""\nimport torch.distributed as dist\ndist.all_reduce(1)'),
    (
        "megatron/train/x.py",
        '"""A."""\nNAMES = {"a": 1}\n\ndef _f(seen):\n    seen.append(NAMES["a"])\n    model.eval()',
    ),
    (
        "tools/x.py",
        '"""A."""\nfrom megatron.config.flags.command_line import flag\ndef _f():\n    import torch\n    print(torch)',
    ),
    ("megatron/data/loader.py", '"""A."""\nfrom megatron.data.datasets import sample'),
    (
        "megatron/train/x.py",
        '"""A."""\nclass A:\n    """A."""\n'
        "    @property\n    def f(self):\n        a = 1\n        return a\n"
        "    def close(self):\n        self.file.close()\n"
        'class B(A):\n    """B."""\n    def f(self):\n        a = 1\n        return a',
    ),
    ("megatron/data/order/x.py", '"""A."""\nfrom megatron.data.formats.sidecar import a'),
    ("megatron/tokenizers/gpt2.py", '"""A."""\ndef _f():\n    import tokenizers'),
)


@cache
def source(path: Path) -> Source:
    """A file of the project."""
    return Source(path.relative_to(ROOT).as_posix(), path.read_text())


@cache
def sources(patterns: tuple[str, ...]) -> tuple[Source, ...]:
    """Every file that matches."""
    return tuple(source(path) for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_follows_the_rules(rule: Rule) -> None:
    files = sources(EVERYTHING if rule in MEASURED_EVERYWHERE else PRODUCT)
    findings = [f"{file.path}:{line}: {text}" for file in files for line, text in rule(file)]
    assert not findings, f"{rule.__doc__}\n" + "\n".join(findings)


def test_each_rule_finds_what_breaks_it() -> None:
    by_name = {rule.__name__: rule for rule in RULES}
    missed = [
        (name, text)
        for name, path, text, finding in (*OFFENDERS, *LONG)
        if not any(finding in message for _, message in by_name[name](Source(path, text)))
    ]
    assert missed == []
    assert {name for name, *_ in (*OFFENDERS, *LONG)} == set(by_name)


@pytest.mark.parametrize(("path", "text"), INNOCENT)
def test_what_is_allowed_stays_allowed(path: str, text: str) -> None:
    source = Source(path, text)
    assert [sentence for rule in RULES for _, sentence in rule(source)] == []


def test_ruff_finds_nothing() -> None:
    """No unused import, `print`, `global`, `assert`, `eval` or shell; pyproject.toml has the rules."""
    finished = subprocess.run([sys.executable, "-m", "ruff", "check", "-q"], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_the_files_are_found() -> None:
    paths = {source.path for source in sources(EVERYTHING)}
    assert {
        "pretrain_gpt.py",
        "finetune_t0_non_causal_decoder.py",
        "megatron/log.py",
        "megatron/config/flags/command_line.py",
        "tests/test_architecture.py",
    } <= paths


def test_every_package_has_a_docstring() -> None:
    packages = [
        path for root in LIBRARY for path in (ROOT / root).iterdir() if path.is_dir() and any(path.glob("*.py"))
    ]
    missing = [package.name for package in packages if not (package / "__init__.py").is_file()]
    assert not missing, f"packages without __init__.py: {missing}"
    unplaced = [
        package.name for package in packages if package.name not in {*tables.PACKAGE_PLACES, *tables.COMPANIONS}
    ]
    assert not unplaced, f"packages without a place in the import order: {unplaced}"


def test_modules_import_each_other_in_no_circle() -> None:
    """Wherever the import stands: an `if TYPE_CHECKING:` hides a circle from Python, not from a reader."""
    files = {file.module: file for file in sources(("megatron/**/*.py", "trident/**/*.py"))}
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        graph[name] = imported_names(file.nodes) & files.keys()
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_every_subpackage_has_a_place() -> None:
    folders = [path.parent for root in LIBRARY for path in (ROOT / root).glob("*/**/__init__.py")]
    parents = {folder.parent for folder in folders if folder.parent.parent != ROOT}
    found = {
        ".".join(parent.relative_to(ROOT).parts): {folder.name for folder in folders if folder.parent == parent}
        for parent in parents
    }
    placed = {}
    for parent, order in tables.SUBPACKAGE_ORDER.items():
        folder = ROOT.joinpath(*parent.split("."))
        modules = {name for name in order if (folder / f"{name}.py").is_file()}
        placed[parent] = set(order) - {"."} - modules
    assert found == placed


def test_the_root_has_few_programs_and_files() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} - {"setup"} == tables.PROGRAMS
    files = {path.name for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")}
    assert len(files - tables.METADATA) <= 15


@pytest.mark.parametrize("folder", [*LIBRARY, "tools", "tasks", "tests", "examples"])
def test_no_folder_is_overfull(folder: str) -> None:
    files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths = [path.as_posix() for path in files if path.name not in ("README.md", "py.typed")]
    built = r"/__pycache__/|/\.|\.(so|dylib|o)$"  # what Python, editors and compilers leave beside the sources
    assert not list(rules.crowded_folders(path for path in paths if not re.search(built, path)))


def test_an_overfull_folder_is_named() -> None:
    paths = [f"megatron/data/order/file{number}.py" for number in range(16)]
    assert list(rules.crowded_folders(paths)) == ["megatron/data/order has 16 files; a folder has at most 15"]
    assert not list(rules.crowded_folders(paths[1:]))
    assert not list(rules.crowded_folders(f"megatron/model/blocks/file{number}.py" for number in range(16)))


def test_only_the_engine_needs_deepspeed() -> None:
    beside_it = ("trident/plan/", "trident/evaluate/training/")
    modules = [
        source.module.removesuffix(".__init__")
        for source in sources(("megatron/**/*.py", "trident/**/*.py"))
        if source.package not in ("engine", "train") and not source.path.startswith(beside_it)
    ]
    program = (
        "import importlib, sys\n"
        "sys.modules['deepspeed'] = None\n"
        f"[importlib.import_module(name) for name in {modules!r}]\n"
        "import torch\n"
        "sys.exit(3 if torch.distributed.is_initialized() else 0)\n"
    )
    _run_python(program)


def test_flags_are_read_without_torch_and_numpy() -> None:
    _run_python(
        "import sys\nimport megatron.config\nimport pretrain_gpt\n"
        "heavy = {'torch', 'numpy', 'deepspeed', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )


def test_the_data_packages_do_not_need_torch() -> None:
    patterns = ("megatron/tokenizers/*.py", "megatron/data/**/*.py", "trident/corpus/**/*.py")
    modules = [source.module.removesuffix(".__init__") for source in sources(patterns)]
    _run_python(
        f"import importlib, sys\nsys.modules['torch'] = None\n[importlib.import_module(name) for name in {modules!r}]\n"
    )


def _run_python(program: str) -> None:
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
