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
MEASURED_EVERYWHERE = (rules.files_and_functions_are_short, rules.no_global)

# One offending file for each rule: the path it would have, its text, and what the rule must say.
OFFENDERS: tuple[tuple[Rule, str, str, str], ...] = (
    (
        rules.imports_follow_the_package_order,
        "megatron/data/x.py",
        "import megatron.train.loop",
        "data imports train",
    ),
    (
        rules.imports_follow_the_package_order,
        "megatron/data/x.py",
        "from megatron import train",
        "data imports train",
    ),
    (
        rules.imports_follow_the_package_order,
        "megatron/inference/x.py",
        "def f():\n    from megatron.train import loop",
        "inference imports train",
    ),
    (
        rules.imports_follow_the_package_order,
        "megatron/train/x.py",
        "from megatron.inference import a",
        "does not come before it",
    ),
    (
        rules.imports_follow_the_package_order,
        "megatron/train/x.py",
        "from trident.corpus import a",
        "train imports corpus, a companion of the trainer",
    ),
    (
        rules.imports_follow_the_package_order,
        "trident/serve/x.py",
        "from trident import plan",
        "serve imports plan, a companion of the trainer",
    ),
    (
        rules.imports_follow_the_package_order,
        "trident/attic/x.py",
        "import megatron.log",
        "is an unknown companion",
    ),
    (
        rules.imports_follow_the_package_order,
        "megatron/train/x.py",
        "from . import loop",
        "relative import",
    ),
    (
        rules.imports_follow_the_package_order,
        "megatron/train/x.py",
        "import pretrain_gpt",
        "imports the program",
    ),
    (
        rules.imports_follow_the_package_order,
        "megatron/train/x.py",
        "import tests.helpers",
        "imports its tests",
    ),
    (
        rules.imports_follow_the_package_order,
        "megatron/attic.py",
        "import megatron.log",
        "is an unknown package",
    ),
    (
        rules.subpackage_imports_follow_the_order,
        "megatron/data/formats/x.py",
        "from megatron.data.order.plan import DataPlan",
        "formats imports order",
    ),
    (
        rules.subpackage_imports_follow_the_order,
        "megatron/data/datasets/x.py",
        "from megatron.data import loader",
        "datasets imports .,",
    ),
    (
        rules.subpackage_imports_follow_the_order,
        "trident/corpus/cleaning/filters/x.py",
        "import trident.corpus.cleaning.near_duplicates.near_index",
        "filters imports near_duplicates",
    ),
    (rules.third_party_modules_have_one_home, "megatron/data/x.py", "import argparse", "argparse"),
    (
        rules.third_party_modules_have_one_home,
        "tools/x.py",
        "from argparse import ArgumentParser",
        "argparse",
    ),
    (
        rules.third_party_modules_have_one_home,
        "megatron/train/x.py",
        "from deepspeed import comm",
        "deepspeed",
    ),
    (
        rules.third_party_modules_have_one_home,
        "megatron/train/x.py",
        "import torch\ntorch.cuda.synchronize()",
        "torch.cuda",
    ),
    (
        rules.third_party_modules_have_one_home,
        "megatron/train/x.py",
        "import torch as t\nt.cuda.empty_cache()",
        "torch.cuda",
    ),
    (
        rules.third_party_modules_have_one_home,
        "megatron/model/x.py",
        "import torch.distributed as dist",
        "torch.distributed",
    ),
    (
        rules.third_party_modules_have_one_home,
        "megatron/model/x.py",
        "from torch import distributed",
        "torch.distributed",
    ),
    (
        rules.third_party_modules_have_one_home,
        "megatron/train/x.py",
        "import os\nos.environ['A']",
        "os.environ",
    ),
    (rules.third_party_modules_have_one_home, "tools/x.py", "from os import getenv", "os.getenv"),
    (
        rules.third_party_modules_have_one_home,
        "megatron/train/x.py",
        "import sys\nsys.exit(1)",
        "sys.exit",
    ),
    (rules.third_party_modules_have_one_home, "megatron/checkpoint/x.py", "import pickle", "pickle"),
    (
        rules.third_party_modules_have_one_home,
        "megatron/checkpoint/x.py",
        "import torch\ntorch.load('a')",
        "torch.load",
    ),
    (
        rules.third_party_modules_have_one_home,
        "megatron/parallel/x.py",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "all_gather_object pickles",
    ),
    (
        rules.third_party_modules_have_one_home,
        "megatron/parallel/x.py",
        "from torch.distributed import broadcast_object_list",
        "broadcast_object_list pickles",
    ),
    (
        rules.third_party_modules_have_one_home,
        "megatron/data/x.py",
        "np.load('a', allow_pickle=True)",
        "allow_pickle",
    ),
    (rules.third_party_modules_have_one_home, "tools/x.py", "import os\nos.system('ls')", "os.system"),
    (rules.deepspeed_has_one_door, "megatron/engine/x.py", "view(engine.deepspeed._config)", "_config is"),
    (
        rules.deepspeed_has_one_door,
        "megatron/engine/x.py",
        "wrapper.averaged_gradients",
        "averaged_gradients",
    ),
    (rules.deepspeed_has_one_door, "megatron/train/x.py", 'hasattr(weight, "ds_tensor")', "ds_tensor is"),
    (
        rules.deepspeed_has_one_door,
        "megatron/engine/x.py",
        "import deepspeed\ndeepspeed.ops",
        "deepspeed.ops",
    ),
    (
        rules.deepspeed_has_one_door,
        "megatron/engine/x.py",
        "from deepspeed.runtime.bf16_optimizer import BF16_Optimizer",
        "not documented",
    ),
    *(
        (rules.files_are_replaced_and_read_in_one_place, path, text, says)
        for path, text, says in (
            ("megatron/train/x.py", "import os\nos.replace('a', 'b')", "os.replace"),
            ("tools/x.py", "import os\nos.fsync(1)", "os.fsync"),
            ("megatron/data/x.py", "temporary.rename(path)", "temporary.rename"),
            ("megatron/data/x.py", "Path('a').replace(path)", "replace; use"),
            ("trident/convert/x.py", "json.load(open('a'))", "json.load("),
            ("trident/convert/x.py", "json.loads(read_plain(path))", "json.loads(read_plain(path))"),
        )
    ),
    (rules.no_global, "megatron/log.py", "def f():\n    global A\n    A = 1", "global A"),
    (rules.no_print, "megatron/train/x.py", "print(1)", "print"),
    (rules.no_print, "megatron/train/x.py", "import sys\nsys.stdout.write('a')", "sys.stdout"),
    (rules.no_mutable_module_state, "megatron/train/x.py", "seen = []", "seen is a mutable value"),
    (
        rules.no_mutable_module_state,
        "megatron/train/x.py",
        "seen: dict = collections.defaultdict(int)",
        "seen is",
    ),
    (
        rules.no_mutable_module_state,
        "megatron/train/x.py",
        "_SEEN = {}\ndef f():\n    _SEEN['a'] = 1",
        "changed here",
    ),
    (
        rules.no_mutable_module_state,
        "megatron/train/x.py",
        "_SEEN = set()\ndef f():\n    _SEEN.add(1)",
        "changed here",
    ),
    (
        rules.no_mutable_module_state,
        "megatron/train/x.py",
        "_STATE = State()\ndef f():\n    _STATE.a = 1",
        "changed here",
    ),
    (rules.no_mutable_module_state, "megatron/train/x.py", "def f(a=[]):\n    pass", "mutable default"),
    (rules.no_hidden_code, "megatron/train/x.py", "eval('1')", "eval"),
    (rules.no_hidden_code, "tools/x.py", "exec('1')", "exec"),
    (rules.no_hidden_code, "tools/x.py", "subprocess.run('ls', shell=True)", "shell=True"),
    (rules.files_and_functions_are_short, "megatron/train/x.py", "a = 1\n" * 501, "501 lines"),
    (
        rules.files_and_functions_are_short,
        "tests/x.py",
        "def f():\n" + "    a = 1\n" * 60,
        "f has 61 lines",
    ),
    (rules.imports_are_at_the_top, "megatron/train/x.py", "def f():\n    import json", "f imports json"),
    (rules.imports_are_at_the_top, "megatron/train/x.py", "def f():\n    import wandb", "f imports wandb"),
    (rules.entry_points_start_light, "pretrain_gpt.py", "import torch", "torch at the top"),
    (
        rules.entry_points_start_light,
        "tools/x.py",
        "from megatron.data.formats.indexed import A",
        "megatron.data.formats.indexed at the top",
    ),
    (rules.entry_points_start_light, "tools/x.py", "if True:\n    import numpy", "numpy at the top"),
    (rules.config_is_pure, "megatron/config/x.py", "import numpy", "config imports numpy"),
    (rules.config_is_pure, "megatron/config/x.py", "def f():\n    import torch", "config imports torch"),
    (rules.names_are_whole_words, "megatron/train/x.py", "def f(args):\n    pass", "args"),
    (rules.names_are_whole_words, "megatron/train/x.py", "model_cfg = 1", "model_cfg"),
    (
        rules.names_are_whole_words,
        "megatron/train/x.py",
        "class SignalHandler:\n    pass",
        "SignalHandler",
    ),
    (rules.names_are_whole_words, "megatron/train/utils.py", "", "file or folder name utils"),
    (rules.everything_public_is_described, "megatron/train/x.py", "", "module has no docstring"),
    (
        rules.everything_public_is_described,
        "megatron/train/x.py",
        '"""A."""\ndef f():\n    pass',
        "f has no docstring",
    ),
    (
        rules.everything_public_is_described,
        "megatron/train/x.py",
        '"""A."""\nclass A:\n    """A."""\n    def f(self):\n        a()\n        b()',
        "A.f has no docstring",
    ),
    (rules.no_assert_statements, "megatron/train/x.py", "assert 1", "assert"),
    (
        rules.packages_import_without_side_effects,
        "megatron/train/__init__.py",
        "import a\na.go()",
        "only imports",
    ),
    (rules.no_project_is_named, "megatron/observe/x.py", "STYLES = ('jax_lm',)", "jax_lm is the name"),
    (
        rules.no_project_is_named,
        "megatron/config/x.py",
        "class DsGpt2Flags:\n    pass",
        "DsGpt2 is the name",
    ),
    (
        rules.imports_follow_the_package_order,
        "megatron/train/x.py",
        "from examples.dsgpt2 import flags",
        "imports the program",
    ),
    (
        rules.few_modules_use_the_run_config,
        "megatron/train/x.py",
        "from megatron.config import RunConfig",
        "RunConfig",
    ),
    (
        rules.the_model_only_knows_its_config,
        "megatron/model/x.py",
        "from megatron.config import DataConfig",
        "DataConfig",
    ),
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


@pytest.mark.parametrize(("rule", "path", "text", "says"), OFFENDERS)
def test_each_rule_can_fail(rule: Rule, path: str, text: str, says: str) -> None:
    sentences = [sentence for _, sentence in rule(Source(path, text))]
    assert any(says in sentence for sentence in sentences), f"{rule.__name__} said {sentences}"


def test_every_rule_has_a_violating_example() -> None:
    assert {rule for rule, *_ in OFFENDERS} == set(RULES)


@pytest.mark.parametrize(("path", "text"), INNOCENT)
def test_what_is_allowed_stays_allowed(path: str, text: str) -> None:
    source = Source(path, text)
    assert [sentence for rule in RULES for _, sentence in rule(source)] == []


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
        statements = list(rules.imports(file.nodes))
        named = {f"{module}.{alias.name}" for node, module in statements for alias in getattr(node, "names", ())}
        graph[name] = ({module for _, module in statements} | named) & files.keys()
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
